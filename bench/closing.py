"""The five lines that close a run: our times and bytes beside those of eager mode and the compiler, and the files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean

from .harness import Result
from .results import NOISE, Report, Section, timed

Measure = Callable[[Section, Result], float]


def closing_lines(report: Report) -> list[str]:
    """The lines about all cases in which ours and the rival were timed."""

    def step(section: Section, result: Result) -> float:
        return section.whole(result)

    def count(kind: str) -> Measure:
        # A section counts only some kinds of bytes.
        return lambda section, result: getattr(result, kind) if kind in section.counts else 0

    sections = list(report.sections.values())
    refused = sum(len(section.refusals()) for section in sections)
    without = f"; {refused} contender{'s' if refused > 1 else ''} refused, see above" if refused else ""
    return [
        f"step / eager mode's: {times(ratios(sections, 'eager', step))}{without}",
        f"step / torch.compile's: {times(ratios(sections, 'compiled', step))}",
        f"bytes kept for backward / eager mode's: {average(ratios(sections, 'eager', count('kept')))}",
        f"peak bytes of a step / eager mode's: {average(ratios(sections, 'eager', count('peak')))}",
        f"JSON: {files(report.directory)}",
    ]


def ratios(sections: Iterable[Section], rival: str, measure: Measure) -> list[float]:
    """Ours divided by the rival's, for each case that has both figures."""
    found = []
    for section in sections:
        for results in section.cases.values():
            if timed(results, "ours") and timed(results, rival):
                ours, theirs = (measure(section, results[name]) for name in ("ours", rival))
                if ours and theirs:
                    found.append(ours / theirs)
    return found


def average(of: list[float]) -> str:
    if not of:
        return "not measured"
    cases = f"{len(of)} case{'s' if len(of) > 1 else ''}"
    return f"{geometric_mean(of):.2f}, geometric mean of {cases} ({min(of):.2f} to {max(of):.2f})"


def times(of: list[float]) -> str:
    faster, slower = sum(ratio < 1 - NOISE for ratio in of), sum(ratio > 1 + NOISE for ratio in of)
    split = f"; faster in {faster}, slower in {slower}, equal in {len(of) - faster - slower}"
    return average(of) + (split if of else "")


def files(folder: Path) -> str:
    """Where the JSON is, and the command that reads it."""
    return f"{folder}; `python -m bench.report {folder}` prints it in Markdown"
