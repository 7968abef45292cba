"""The README's table and its figures are those of the files in bench/results, and so are the pages of results."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.conftest import REPORT, pytest_terminal_summary
from bench.front import NETWORKS, RECORDS, WAYS, front_lines
from bench.gpu import steps
from bench.report import FRONT, RESULTS, ReportError, front_of, lines_between, main, report_lines
from bench.results import Report, load

ROOT = Path(__file__).parents[2]
H100 = ROOT / "bench" / "results" / "nvidia-h100-80gb-hbm3"
GIB = 2**30
CASE = "PlainConvUNet, 2x1x128x128x128 fp16 nhwc"


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_a_page_has_the_table_of_the_results(page):
    assert lines_between(ROOT / page, FRONT) == front_of(load(H100))


def test_the_page_beside_the_results_is_what_the_report_prints():
    assert lines_between(H100 / "README.md", RESULTS) == report_lines(load(H100))


def test_a_run_of_the_benches_ends_with_the_table(tmp_path):
    report, printed = Report(torch.device("cpu"), tmp_path), []
    report.files = load(H100)
    terminal = SimpleNamespace(section=printed.append, write_line=printed.append)
    pytest_terminal_summary(terminal, SimpleNamespace(stash={REPORT: report}))
    table = front_of(report.files)
    assert printed[-1 - len(table) : -1] == table


def test_figures_of_an_earlier_run_have_its_number():
    """Figures of two cards and two commits stood side by side, and nothing said so."""
    of_runs = {
        way: {"run": run, "peak_bytes": GIB, "step": {"median_ms": 40.0}} for way, run in (("eager", 2), ("aten", 4))
    }
    cases = {CASE: {"samples": 2, "contenders": of_runs}}
    lines = front_lines(cases, {"2": "commit a", "4": "commit b, another card"})
    assert lines[2].endswith("1.00, 40.0, 50.0 ² |")
    assert lines[7].endswith("1.00, 40.0, 50.0 |")
    assert lines[-1] == "Without a number: run 4, commit b, another card. ² commit a."


def test_the_table_is_of_cases_and_ways_that_the_bench_runs():
    assert {*NETWORKS, *RECORDS} <= {str(case) for case in steps.CASES}
    assert WAYS.keys() <= steps.WAYS.keys()


def test_a_run_without_whole_steps_has_no_table(tmp_path, capsys):
    page = tmp_path / "README.md"
    page.write_text(f"{FRONT.begin}\n{FRONT.end}\n")
    (tmp_path / "norms.json").write_text(json.dumps({"machine": {}, "results": {}}))
    assert main([str(tmp_path), "--front", str(page)]) == 2
    assert "expected whole steps" in capsys.readouterr().err
    assert page.read_text() == f"{FRONT.begin}\n{FRONT.end}\n"
    with pytest.raises(ReportError):
        lines_between(page, RESULTS)


# Figures of the README beside its table: a number and its unit.
FIGURE = re.compile(r"([\d,]+(?:\.\d+)?) (GiB|MiB|ms|s)\b")
# The first of two figures with one unit.
RANGE = re.compile(r"([\d.]+)(?=(?: to| and) [\d,.]+ (GiB|MiB|ms|s)\b)")
# A name, an input's size or a plan that contains a number and a unit is no figure.
NO_FIGURES = re.compile(r"H100 80GB|of 8 GB|24 and 40 GB")


def spellings(value: float) -> set[str]:
    return {f"{value:.0f}", f"{value:.1f}", f"{value:.2f}"}


def measured() -> Iterator[tuple[str, str]]:
    """Every figure of whole steps, as text may round it, with its unit; a time also for one sample."""
    for case in json.loads((H100 / "steps.json").read_text())["results"].values():
        for of in case["contenders"].values():
            times = [of[part]["median_ms"] for part in ("step", "optimizer", "host") if part in of]
            times += [time / case["samples"] for time in times]
            values = [("ms", time) for time in times]
            values += [("GiB", of[kind] / GIB) for kind in ("kept_bytes", "peak_bytes", "reserved_bytes") if kind in of]
            values += [("s", of["first_step_s"])] if "first_step_s" in of else []
            yield from ((text, unit) for unit, value in values for text in spellings(value))
    for rate in RECORDS.values():
        yield from ((text, "ms") for text in spellings(1e3 / rate))


# A row of the table of counted presets in docs/nnunet.md, from the peak in eager mode on.
COUNTED = re.compile(r"^\| ResEnc \w+ \|(?:[^|]+\|){2}(.*)$", re.MULTILINE)


def counted() -> Iterator[tuple[str, str]]:
    """The counted peaks that the README repeats; ``tests/integrations/test_nnunet_presets.py`` counts them."""
    for row in COUNTED.findall((ROOT / "docs" / "nnunet.md").read_text()):
        yield from ((number, "GiB") for number in re.findall(r"\d+\.\d", row))


def figures(text: str) -> list[tuple[str, str]]:
    text = NO_FIGURES.sub("", text)
    return [(match[1], match[2]) for pattern in (FIGURE, RANGE) for match in pattern.finditer(text)]


def test_every_figure_of_the_readme_has_a_file():
    """The page had 37.3 ms for a step that the file has with 34.2."""
    before, _, rest = (ROOT / "README.md").read_text().partition(FRONT.begin)
    found = figures(before + rest.partition(FRONT.end)[2])
    assert len(found) > 12
    assert set(found) - set(measured()) - set(counted()) == set()


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_texts_of_pictures_have_the_figures_of_the_pictures(page):
    """Who cannot see a picture reads its text."""
    texts = re.findall(r'(?:alt="|:alt: )([^"\n]+)', (ROOT / page).read_text())
    results = json.loads((H100 / "steps.json").read_text())["results"]
    kernels = {f"{of['kernels']['ms']:.0f}" for case in results.values() for of in case["contenders"].values()
               if "kernels" in of}  # fmt: skip
    known = {number for number, unit in measured() if unit in ("GiB", "ms")} | kernels
    for text in texts:
        assert set(re.findall(r"(?<![\w.])\d+(?:\.\d)? (?=GiB|ms)", text)) <= {f"{number} " for number in known}
    assert texts
