"""Several reports beside each other, and why one needs more than another."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .plot import plot
from .report import MemoryReport
from .tables import table, wrapped
from .trace import Storage
from .units import MEBIBYTE, mib, size_name

# differences that a sentence names
NAMED = 4


@dataclass(frozen=True)
class Comparison:
    """Reports of one step each; the first is what the others are measured against."""

    reports: tuple[MemoryReport, ...]

    def table(self) -> str:
        first = self.reports[0]
        lines = [
            (
                report.label,
                f"{report.parameters / 1e6:.1f} M",
                mib(report.resident),
                mib(report.saved),
                mib(report.peak),
                mib(report.total),
                f"{first.saved / max(report.saved, 1):.2f}×",
                f"{first.total / max(report.total, 1):.2f}×",
                str(report.convolutions["recomputed"]),
                f"{report.recomputed:+.0%}" if report.flops["recomputed"] else "",
            )
            for report in self.reports
        ]
        head = (
            "",
            "params",
            "before",
            "kept",
            "peak",
            "in all",
            "kept less",
            "in all less",
            "convs again",
            "arithmetic",
        )
        return table(head, lines)

    def explanations(self) -> list[str]:
        """What makes up the difference of each to the first, at which spatial size and of which kind."""
        return [explain(self.reports[0], other) for other in self.reports[1:]]

    def plot(self, path: str | Path, *, overwrite: bool = False) -> None:
        """One picture, a line for each report; needs matplotlib."""
        plot(self.reports, path, overwrite)

    def to_dict(self) -> dict[str, Any]:
        return {"explanations": self.explanations(), "reports": [report.to_dict() for report in self.reports]}

    def __str__(self) -> str:
        legend = (
            "MiB.  before: parameters, inputs and what else was there before the step.  kept: for backward, at the end "
            "of forward.  peak: on top of what was there before; in all: with it.  less: times less than "
            f"{self.reports[0].label}.  convs again: convolutions that checkpoints run twice, and what it adds to the "
            "arithmetic of the step."
        )
        texts = [wrapped(legend), *(f"\n{wrapped(text)}" for text in self.explanations())]
        return "\n".join([self.table(), "", *texts])


def compare(*reports: MemoryReport) -> Comparison:
    """Beside each other: a table, and in sentences why the others need more or less than the first."""
    if len(reports) < 2:
        raise ValueError(f"fusedseg.memory.compare: expected two reports or more, got {len(reports)}")
    return Comparison(reports)


def explain(first: MemoryReport, other: MemoryReport) -> str:
    difference = other.saved - first.saved
    if not difference:
        return f"{other.label} keeps as much as {first.label}."
    more = "more" if difference > 0 else "less"
    fewer = 1 - other.parameters / max(first.parameters, 1)
    parameters = f", with {abs(fewer):.0%} {'fewer' if fewer > 0 else 'more'} parameters" if abs(fewer) > 0.005 else ""
    parts = {group: parts_of(other).get(group, 0) - parts_of(first).get(group, 0) for group in groups(first, other)}
    largest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:NAMED]
    made_up = "; ".join(f"{kind} at {size} {nbytes / MEBIBYTE:+,.1f}" for (kind, size), nbytes in largest if nbytes)
    return (
        f"{other.label} keeps {mib(abs(difference))} MiB {more} than {first.label}{parameters.replace('%', ' %')}. "
        f"Largest differences, MiB: {made_up}."
    )


def groups(*reports: MemoryReport) -> list[tuple[str, str]]:
    return list(dict.fromkeys(group for report in reports for group in parts_of(report)))


def parts_of(report: MemoryReport) -> dict[tuple[str, str], int]:
    """Kept bytes by kind and spatial size."""
    parts: dict[tuple[str, str], int] = {}
    for storage in report.saved_storages:
        parts[group_of(storage)] = parts.get(group_of(storage), 0) + storage.nbytes
    return parts


def group_of(storage: Storage) -> tuple[str, str]:
    return storage.kind, size_name(storage.shape)
