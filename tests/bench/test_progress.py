"""A run of the benches prints its progress with an estimate, five last lines, and on request the usual tables."""

import importlib.util
import json
import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.closing import average, closing_lines, times
from bench.harness import Result
from bench.progress import Progress, case_of, clock
from bench.results import Report, Section
from tests.tools import warm

ROOT = Path(__file__).parents[2]


class Clock:
    """Replaces the module ``time`` in the module of the progress."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("bench.progress.time.monotonic", lambda: self.now)

    def run(self, progress: Progress, case: str, seconds: float) -> str | None:
        line = progress.begin(case)
        self.now += seconds
        progress.add(case, seconds)
        return line


@pytest.fixture
def clocked(monkeypatch):
    return Clock(monkeypatch)


def test_a_first_run_estimates_by_what_has_run_so_far(clocked):
    progress = Progress(["a", "a", "b", "c", "c"], {})
    assert clocked.run(progress, "a", 20.0) == "[1/3] 0:00, time left not known yet: a"
    # The first contender of a case measures; the other contenders report its measurement.
    assert clocked.run(progress, "a", 1.0) is None
    assert clocked.run(progress, "b", 49.0) == "[2/3] 0:21, about 0:42 left by the cases so far: b"
    assert clocked.run(progress, "c", 1.0) == "[3/3] 1:10, about 0:35 left by the cases so far: c"


def test_a_later_run_estimates_by_the_last_one_and_its_own_pace(clocked):
    progress = Progress(["a", "b", "c"], {"a": 10.0, "b": 40.0, "c": 5.0, "gone": 1000.0})
    assert clocked.run(progress, "a", 20.0) == "[1/3] 0:00, about 0:55 left by the last run: a"
    # The machine is half as fast today.
    assert clocked.run(progress, "b", 80.0) == "[2/3] 0:20, about 1:30 left by the last run: b"


def test_a_case_that_is_new_takes_the_mean_of_those_so_far(clocked):
    progress = Progress(["a", "b", "new"], {"a": 10.0, "b": 40.0})
    assert clocked.run(progress, "a", 10.0).startswith("[1/3] 0:00, time left not known yet")
    line = clocked.run(progress, "b", 40.0)
    assert line == "[2/3] 0:10, about 0:50 left by the last run and by the cases so far: b"
    assert clocked.run(progress, "new", 1.0) == "[3/3] 0:50, about 0:25 left by the cases so far: new"


def test_clock():
    assert [clock(seconds) for seconds in (0, 59.6, 61, 3600)] == ["0:00", "1:00", "1:01", "60:00"]


@pytest.mark.parametrize(
    ("function", "params", "name"),
    [
        ("test_step", {"case": "2x3", "contender": "ours"}, "conv_abn: 2x3"),
        ("test_inference", {"case": "2x3"}, "conv_abn inference: 2x3"),
        ("test_step", {"contender": "ours"}, "conv_abn"),
        ("test_bandwidth", None, "conv_abn bandwidth"),
    ],
)
def test_the_name_of_a_case(function, params, name):
    given = {} if params is None else {"callspec": SimpleNamespace(params=params)}
    assert case_of(SimpleNamespace(path=Path("bench/test_conv_abn.py"), originalname=function, **given)) == name


def result(step: float, kept: int = 4, peak: int = 8) -> Result:
    return Result([step] * 5, [step] * 5, [step] * 5, kept, peak)


def report_of(tmp_path, **cases) -> Report:
    report = Report(torch.device("cpu"), tmp_path)
    report.section("a", Section("A bench")).cases.update(cases)
    return report


def test_five_lines(tmp_path):
    report = report_of(
        tmp_path,
        faster={"eager": result(4.0, 8, 8), "compiled": result(1.0), "ours": result(2.0, 2, 4)},
        slower={"eager": result(1.0, 8, 8), "compiled": Result(missing="no compiler"), "ours": result(2.0, 2, 8)},
        equal={"eager": result(1.00), "ours": result(1.01)},
    )
    # This contender does not count kept bytes.
    inference = report.section("b", Section("Inference", parts=("forward",), counts=("peak",)))
    inference.cases["one"] = {"eager": result(1.0, 1, 8), "ours": result(1.0, 9, 8)}
    assert closing_lines(report) == [
        "step / eager mode's: 1.00, geometric mean of 4 cases (0.50 to 2.00); faster in 1, slower in 1, equal in 2",
        "step / torch.compile's: 2.00, geometric mean of 1 case (2.00 to 2.00); faster in 0, slower in 1, equal in 0",
        "bytes kept for backward / eager mode's: 0.40, geometric mean of 3 cases (0.25 to 1.00)",
        "peak bytes of a step / eager mode's: 0.84, geometric mean of 4 cases (0.50 to 1.00)",
        f"JSON: {tmp_path}; `python -m bench.report {tmp_path}` prints it in Markdown",
    ]


def test_refused_contenders_are_in_no_mean(tmp_path):
    report = report_of(
        tmp_path, a={"eager": result(1.0), "ours": Result(refused="z off by 1"), "compiled": result(1.0)}
    )
    first, second, *_ = closing_lines(report)
    assert first == "step / eager mode's: not measured; 1 contender refused, see above"
    assert second == "step / torch.compile's: not measured"


def test_times_and_averages():
    assert times([0.5, 0.97, 0.99, 1.01, 1.03]).endswith("faster in 2, slower in 1, equal in 2")
    assert average([]) == times([]) == "not measured"


BENCH = """
    import pytest
    from functools import partial
    from torch import nn
    import torch
    from bench.harness import Timing, compete, once
    from bench.jobs import LayerJob, step_results
    from bench.replay import CLOCK, report_step
    from bench.results import Section

    def layer(slope):
        return nn.Sequential(nn.BatchNorm2d(4), nn.LeakyReLU(slope, inplace=True))

    @once
    def run(case):
        torch.manual_seed(0)
        x = torch.randn(2, 4, 8, 8, requires_grad=True)
        data = {"x": x, "dz": torch.randn_like(x), "weight": torch.ones(4), "bias": torch.zeros(4)}
        exact = {name: t.detach().double().requires_grad_(name == "x") for name, t in data.items()}
        slopes = {"eager": 0.01, "ours": 0.5 if case == "wrong" else 0.01}
        return compete(
            {name: partial(lambda name: LayerJob(layer(slopes[name]), data), name) for name in slopes},
            {"": lambda: step_results(LayerJob(layer(0.01).double(), exact))},
            dict.fromkeys(("z", "dx", "dweight", "dbias"), 1e-4),
            Timing(torch.device("cpu"), 0.0),
        )

    @pytest.mark.benchmark(timer=CLOCK)
    @pytest.mark.parametrize("contender", ["eager", "ours"])
    @pytest.mark.parametrize("case", CASES)
    def test_step(case, contender, report, benchmark):
        section = report.section("tiny", Section("A tiny bench"))
        results = section.cases[case] = run(case)
        report_step(benchmark, case, contender, results[contender])
"""


@pytest.fixture
def bench(tmp_path):
    """Runs a small bench in a copy of bench/ without its own benches; returns the exit status and the output."""
    pytest.importorskip("pytest_benchmark")
    shutil.copytree(
        ROOT / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("test_*", "out", "results", "__*__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def run(cases: list[str], *options: str) -> tuple[int, str]:
        text = f"CASES = {cases!r}\n{textwrap.dedent(BENCH)}"
        (tmp_path / "bench" / "test_tiny.py").write_text(text)
        # With pytest-randomly, the cases would run in another order.
        # In a worker of xdist, pytest-benchmark would disable itself.
        env = warm.without(["PYTEST_XDIST"]) | {"COLUMNS": "120"}
        done = warm.run("pytest", "bench", "-p", "no:randomly", *options, cwd=tmp_path, env=env)
        return done.returncode, done.stdout + done.stderr

    return run


def test_a_run_that_refuses_a_contender(bench, tmp_path):
    processes = ["-n", "2"] if importlib.util.find_spec("xdist") else []
    status, out = bench(["one", "wrong"], *processes)
    assert status == 1, out
    lines = out.splitlines()
    cases = [line for line in lines if line.startswith("[")]
    assert re.fullmatch(r"\[1/2\] \d:\d\d, time left not known yet: tiny: one", cases[0])
    assert re.fullmatch(r"\[2/2\] \d:\d\d, about \d:\d\d left by the cases so far: tiny: wrong", cases[1])
    assert len(cases) == 2
    assert "FAILED bench/test_tiny.py::test_step[wrong-ours]" in lines
    assert "ours disagrees with the float64 reference: z off by" in out
    # The run prints the five lines and no table of pytest-benchmark.
    where = tmp_path / "bench" / "out"
    first = next(i for i, line in enumerate(lines) if line.startswith("step / eager mode's: "))
    eager, compiler, kept, peak, files = lines[first : first + 5]
    assert re.search(
        r" of 1 case \(.*; faster in \d, slower in \d, equal in \d; 1 contender refused, see above$", eager
    )
    assert compiler == "step / torch.compile's: not measured"
    assert kept.startswith("bytes kept for backward / eager mode's: 1.00, geometric mean of 1 case")
    assert peak.startswith("peak bytes of a step / eager mode's: ")
    assert files.startswith(f"JSON: {where};")
    assert " 1 failed, 3 passed" in lines[-1]
    assert "Rounds" not in out
    assert (where / "tiny.json").is_file()
    # The time of a failed bench is not stored, because the bench may have ended early.
    remembered = tmp_path / ".pytest_cache" / "v" / "bench" / "seconds-cpu-run"
    assert list(json.loads(remembered.read_text())) == ["tiny: one"]


@pytest.mark.slow
def test_a_later_run_with_tables(bench):
    for line in ("time left not known yet", r"about \d:\d\d left by the last run"):
        status, out = bench(["one"], "-v")
        assert status == 0, out
        assert re.search(rf"^\[1/1\] \d:\d\d, {line}: tiny: one$", out, re.MULTILINE)
        assert "Rounds" in out
