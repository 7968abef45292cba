"""Reports the results of benches: goals and tables in Markdown, and changes between two runs.

python -m bench.report bench/results/nvidia-h200                                      # goals and tables
python -m bench.report bench/results/nvidia-h200 --into README_OF_RESULTS.md          # between its marks
python -m bench.report bench/results/nvidia-h200 --front README.md docs/results.md    # the table of whole steps alone
python -m bench.report OLD NEW                                                        # what changed
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from .front import front_lines
from .gpu import goals
from .results import (
    COPY,
    NOISE,
    PARTS,
    CaseResults,
    Files,
    ReportError,
    figure,
    load,
    markdown,
    sections,
    two_digits,
)


class Marks(NamedTuple):
    """The lines of a page between which a command writes."""

    begin: str
    end: str


RESULTS = Marks("<!-- results: begin -->", "<!-- results: end -->")
FRONT = Marks("<!-- whole steps: begin -->", "<!-- whole steps: end -->")
# The GPUs that have goals.
GOALS_OF = ("H100", "H200")
BYTES = ("kept_bytes", "peak_bytes", "reserved_bytes")


def machine_lines(files: Files) -> list[str]:
    """The machine and the commit of the figures; all of them if there are several."""
    machines = [content["machine"] for content in files.values()]
    known = {key: [] for about in machines for key in about if key not in ("load", "runs")}
    for about in machines:
        for key, values in known.items():
            if about.get(key) not in (None, *values):
                values.append(about.get(key))
    return [", ".join(f"{key} {' and '.join(map(str, values))}" for key, values in known.items() if values)]


def goal_lines(verdicts: Sequence[goals.Verdict]) -> list[str]:
    rows = []
    for verdict in verdicts:
        goal, value = verdict.goal, verdict.value
        bound = f"{'≥' if goal.at_least else '≤'} {goal.bound:.2f}"
        state = "met" if verdict.met else f"not measured: {verdict.why}" if value is None else "**missed**"
        rows.append([goal.what, goal.case, goal.figure, bound, "–" if value is None else f"{value:.3f}", state])
    met, measured = (sum(map(of, verdicts)) for of in (lambda v: v.met, lambda v: v.value is not None))
    count = f"{met} of {len(verdicts)} goals met, {measured - met} missed, {len(verdicts) - measured} not measured."
    return [count, "", *markdown(["", "case", "figure", "goal", "measured", ""], rows)]


class Column(NamedTuple):
    """A column of the table: the ratio of ours to a rival, of the time of a part or of bytes."""

    head: str
    rival: str
    key: str


COLUMNS = (
    *(Column(f"{part} / eager", "eager", part) for part in PARTS),
    *(Column(f"step / {name}", name, "step") for name in ("compiled", "aggressive", "checkpoint")),
    Column("kept / eager", "eager", "kept_bytes"),
    Column("kept / aggressive", "aggressive", "kept_bytes"),
    Column("peak / eager", "eager", "peak_bytes"),
    Column("peak / aggressive", "aggressive", "peak_bytes"),
    Column("peak / checkpoint", "checkpoint", "peak_bytes"),
)


def ratio(case: CaseResults, column: Column) -> float | None:
    ours, theirs = (figure(case, name, column.key) for name in ("ours", column.rival))
    return None if ours is None or not theirs else ours / theirs


def table_lines(files: Files) -> list[str]:
    """The tables of each bench: ratios of ours to the rivals, and the step and the bytes of every contender."""
    lines: list[str] = []
    for stem, title, cases in sections(files):
        lines += [f"### {title}", "", *ratio_lines(cases)]
        if any("samples" in case for case in cases.values()):
            lines += [*step_lines(cases), *absent_lines(cases), *note_lines(files[stem], cases)]
            continue
        names = list(dict.fromkeys(name for case in cases.values() for name in case["contenders"] if name != COPY))
        lines += contender_lines("step in ms: median (middle three fifths)", cases, names, step_cell)
        lines += contender_lines("MiB kept, at the peak", cases, names, bytes_cell)
        lines += absent_lines(cases)
    return lines


def ratio_lines(cases: Mapping[str, CaseResults]) -> list[str]:
    """Ratios of ours to the rivals; below 1, ours is faster or smaller."""
    judged = {name: case for name, case in cases.items() if figure(case, "ours", "step") is not None}
    ratios = {name: [ratio(case, column) for column in COLUMNS] for name, case in judged.items()}
    used = [i for i in range(len(COLUMNS)) if any(row[i] is not None for row in ratios.values())]
    if not used:
        return []
    rates = any(COPY in case["contenders"] for case in judged.values())
    rows = []
    for name, case in judged.items():
        row = [name, *(two_digits(ratios[name][i]) for i in used)]
        rows.append([*row, two_digits(share_of_copy(case))] if rates else row)
    means = [geometric_mean([row[i] for row in ratios.values() if row[i]]) for i in used]
    rows.append(["geometric mean", *map(two_digits, means), *[""] * rates])
    head = ["ours divided by", *(COLUMNS[i].head for i in used), *["bandwidth / copy's"] * rates]
    return [*markdown(head, rows), ""]


def contender_lines(
    head: str, cases: Mapping[str, CaseResults], names: Sequence[str], cell: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """A row for each case and a column for each contender."""
    rows = [[case, *(cell(of["contenders"].get(name, {})) for name in names)] for case, of in cases.items()]
    rows = [row for row in rows if any(text != "–" for text in row[1:])]
    return [*markdown([head, *names], rows), ""] if rows else []


def step_cell(of: Mapping[str, Any]) -> str:
    return times_cell(of.get("step"))


def times_cell(times: Mapping[str, float] | None) -> str:
    """The median, and the middle three fifths; figures of older runs have the range of all steps."""
    if times is None:
        return "–"
    low, high = (times.get(key, times.get(other)) for key, other in (("p20_ms", "min_ms"), ("p80_ms", "max_ms")))
    return f"{times['median_ms']:.2f}" + ("" if low is None else f" ({low:.2f}–{high:.2f})")


def step_lines(cases: Mapping[str, CaseResults]) -> list[str]:
    """A table for each network of whole steps: a row for each way."""
    lines = []
    for name, case in cases.items():
        rows = [[way, *step_row(case, of)] for way, of in case["contenders"].items() if "kept_bytes" in of]
        used = [i for i in range(len(STEP_HEAD)) if i == 0 or any(row[i] != "–" for row in rows)]
        if rows:
            table = markdown([STEP_HEAD[i] for i in used], [[row[i] for i in used] for row in rows])
            lines += [f"**{name}**{', ' + case['cited'] if 'cited' in case else ''}", "", *table, ""]
    return lines


STEP_HEAD = (
    "way", "MiB kept, at the peak", "kept, peak / eager", "step, ms", "step / eager", "host, ms", "with optimizer, ms",
    "with cudnn.benchmark: step, with optimizer", "samples/s", "TFLOP/s", "kernels: launches, ms",
    "kernels, ms by kind", "difference of the gradients",
)  # fmt: skip


def step_row(case: CaseResults, of: Mapping[str, Any]) -> list[str]:
    eager = case["contenders"].get("eager", {})
    tried, kernels = of.get("benchmark", {}), of.get("kernels")
    step, base, best = (found.get("median_ms") for found in (
        of.get("step", {}), eager.get("step", {}), tried.get("optimizer") or of.get("optimizer") or of.get("step", {})
    ))  # fmt: skip
    shares = [of[kind] / eager[kind] for kind in ("kept_bytes", "peak_bytes") if eager.get(kind)]
    kinds = kernels["kinds"].items() if kernels else ()
    return [
        bytes_cell(of),
        ", ".join(map(two_digits, shares)) or "–",
        step_cell(of),
        two_digits(step / base if step and base else None),
        times_cell(of.get("host")),
        times_cell(of.get("optimizer")),
        ", ".join(times_cell(tried[part]) for part in ("step", "optimizer") if part in tried) or "–",
        f"{1e3 * case['samples'] / best:.1f}" if best else "–",
        f"{case['flop'] / 1e9 / step:.0f}" if step and "flop" in case else "–",
        f"{kernels['launches']}, {kernels['ms']:.1f}" if kernels else "–",
        ", ".join(f"{kind} {found['ms']:.1f}" for kind, found in kinds if found["ms"] >= 0.05) or "–",
        f"{of['difference']:.1e}" if "difference" in of else "–",
    ]


def note_lines(content: Mapping[str, Any], cases: Mapping[str, CaseResults]) -> list[str]:
    """What the file says about its figures, and about those of single ways."""
    single: dict[str, list[str]] = {}
    for case, found in cases.items():
        for way, of in found["contenders"].items():
            for note in of.get("notes", []):
                single.setdefault(note, []).append(f"{case}, {way}")
    lines = [f"* {note}" for note in content.get("notes", [])]
    lines += [f"* {'; '.join(where)}: {note}" for note, where in single.items()]
    return [*lines, ""] if lines else []


def bytes_cell(of: Mapping[str, Any]) -> str:
    counted = [f"{of[kind] / 2**20:.2f}" for kind in ("kept_bytes", "peak_bytes") if kind in of]
    return ", ".join(counted) or "–"


def absent_lines(cases: Mapping[str, CaseResults]) -> list[str]:
    """The contenders without figures, and why; each reason once."""
    found: dict[str, None] = {}
    for case, of in cases.items():
        for name, result in of["contenders"].items():
            if result.get("refused"):
                found[f"refused: {name}, {case}: {result['refused']}"] = None
            elif result.get("missing"):
                found[f"did not run: {name}: {result['missing']}"] = None
    return [*found, ""] if found else []


def share_of_copy(case: CaseResults) -> float | None:
    """The bandwidth of a step, counted on the fewest passes, as a share of a copy's; None if it was not measured."""
    try:
        ours, copy = (
            case["contenders"][name][part]["gb_per_s"] for name, part in (("ours", "step"), (COPY, "forward"))
        )
    except KeyError:
        return None
    return ours / copy


def front_of(files: Files) -> list[str]:
    """The README's table and an empty line; nothing if the run has no whole steps of its networks."""
    found = ((files[stem]["machine"], cases) for stem, _, cases in sections(files) if stem == "steps")
    lines = [line for about, cases in found for line in front_lines(cases, about.get("runs", {}))]
    return [*lines, ""] if lines else []


def report_lines(files: Files) -> list[str]:
    lines = [f"Measured with {machine_lines(files)[0]}.", "", *front_of(files)]
    gpus = [content["machine"].get("gpu", "") for content in files.values()]
    if any(name in gpu for name in GOALS_OF for gpu in gpus):
        lines += [*goal_lines(goals.judge(files)), ""]
    return [*lines, *table_lines(files)]


def write_into(path: Path, lines: Sequence[str], marks: Marks) -> None:
    """Replaces the lines between the marks of a file.

    Raises:
        ReportError: the file does not have one of each mark in this order; it stays unchanged.
    """
    before, _, after = divided(path, marks)
    path.write_text(before + "\n".join([marks.begin, "", *lines, marks.end]) + after)


def lines_between(path: Path, marks: Marks) -> list[str]:
    """What ``write_into`` has written.

    Raises:
        ReportError: as ``write_into``.
    """
    return divided(path, marks)[1].splitlines()[2:]


def divided(path: Path, marks: Marks) -> tuple[str, str, str]:
    """The text of a file before its marks, between them and after them."""
    before, begin, rest = path.read_text().partition(marks.begin)
    between, end, after = rest.partition(marks.end)
    if not begin or not end or marks.begin in rest or marks.end in after:
        raise ReportError(f"{path}: expected one line {marks.begin!r} and after it one line {marks.end!r}")
    return before, between, after


def changes(old: Files, new: Files) -> list[str]:
    """The medians that changed by more than their spread, the bytes that differ, and the cases in only one run."""
    rows: list[list[str]] = []
    before, after = ({stem: cases for stem, _, cases in sections(files)} for files in (old, new))
    only = [
        f"only in the {which}: {stem}: {case}"
        for which, here, there in (("old", before, after), ("new", after, before))
        for stem, cases in here.items()
        for case in cases
        if case not in there.get(stem, {})
    ]
    for stem in before.keys() & after.keys():
        for case in before[stem].keys() & after[stem].keys():
            contenders = [results[stem][case]["contenders"] for results in (before, after)]
            for name in contenders[0].keys() & contenders[1].keys():
                rows += [[stem, case, name, *row] for row in changed(*(of[name] for of in contenders))]
    head = ["bench", "case", "contender", "", "old", "new", "new / old"]
    lines = ["old: " + machine_lines(old)[0], "new: " + machine_lines(new)[0], ""]
    return [*lines, *(markdown(head, sorted(rows)) if rows else ["nothing changed"]), "", *only]


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields (figure, old, new, ratio) for each change of a contender in a case.

    A median has not changed if it lies within the old 20th to 80th percentile, or differs by less than ``NOISE``.
    """
    for part in PARTS:
        if part in old and part in new:
            a, b = old[part], new[part]
            apart = not a.get("p20_ms", a["median_ms"]) <= b["median_ms"] <= a.get("p80_ms", a["median_ms"])
            times = b["median_ms"] / a["median_ms"]
            if apart and abs(times - 1) > NOISE:
                yield [f"{part}, ms", f"{a['median_ms']:.4f}", f"{b['median_ms']:.4f}", f"{times:.3f}"]
    for key in BYTES:
        if key in old and key in new and old[key] != new[key]:
            times = new[key] / old[key] if old[key] else float("inf")
            yield [key.replace("_", " "), str(old[key]), str(new[key]), f"{times:.3f}"]
    for key in ("refused", "missing"):
        if old.get(key, "") != new.get(key, ""):
            yield [key, old.get(key, "") or "–", new.get(key, "") or "–", ""]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m bench.report", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="with the JSON files of a run")
    parser.add_argument("new", type=Path, nargs="?", help="with those of a later run, to be compared with it")
    parser.add_argument("--into", type=Path, metavar="FILE", help=f"replace what stands behind {RESULTS.begin}")
    parser.add_argument(
        "--front", type=Path, nargs="+", default=(), metavar="FILE", help=f"replace the table behind {FRONT.begin}"
    )
    options = parser.parse_args(arguments)
    if options.new and (options.into or options.front):
        parser.error("--into and --front are of one run")
    try:
        files = load(options.folder)
        lines = changes(files, load(options.new)) if options.new else report_lines(files)
        if options.front:
            table = front_of(files)
            if not table:
                raise ReportError(
                    f"{options.folder}: expected whole steps of the networks of bench/front.py, found none"
                )
            for page in options.front:
                write_into(page, table, FRONT)
        if options.into:
            write_into(options.into, lines, RESULTS)
        if not (options.into or options.front):
            print("\n".join(lines))
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
