"""Puts several reports side by side, and explains why one needs more than another."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .report import MemoryReport, size_name
from .tables import MEBIBYTE, mib, table, wrapped

# The number of differences that a sentence names.
NAMED = 4


@dataclass(frozen=True)
class Comparison:
    """Several reports side by side; the first one is the baseline.

    ``print(comparison)`` shows a table and explanations.

    Attributes:
        reports: a report of one step each.
    """

    reports: tuple[MemoryReport, ...]

    def table(self) -> str:
        """A line for each report: parameters, bytes before the step, kept bytes, peak, ratios to the first report."""
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
                f"{report.recomputed:+.0%}" if report.flops["recomputed"] else "",
            )
            for report in self.reports
        ]
        head = "", "params", "before", "kept", "peak", "in all", "kept less", "in all less", "arithmetic"
        return table(head, lines)

    def explanations(self) -> list[str]:
        """A sentence for each further report: its difference to the first report, by kind and spatial size."""
        return [explain(self.reports[0], other) for other in self.reports[1:]]

    def to_dict(self) -> dict[str, Any]:
        """The explanations, and ``MemoryReport.to_dict()`` of each report."""
        return {"explanations": self.explanations(), "reports": [report.to_dict() for report in self.reports]}

    def __str__(self) -> str:
        legend = (
            "MiB.  before: parameters, inputs and what else was there before the step.  kept: for backward, at the end "
            "of forward.  peak: on top of what was there before; in all: with it.  less: times less than "
            f"{self.reports[0].label}.  arithmetic: what backward runs again, as a share of the step without it."
        )
        texts = [wrapped(legend), *(f"\n{wrapped(text)}" for text in self.explanations())]
        return "\n".join([self.table(), "", *texts])


def compare(*reports: MemoryReport) -> Comparison:
    """Compares reports: a table, and sentences that say why each further report needs more or fewer bytes.

    The first report is the baseline.

    Raises:
        ValueError: there are fewer than two reports.
    """
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
    parts = Counter[tuple[str, str]]()
    for sign, report in ((-1, first), (1, other)):
        for storage in report.saved_storages:
            parts[storage.kind, size_name(storage.shape)] += sign * storage.nbytes
    largest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:NAMED]
    # A part that would be printed as 0.0 says nothing.
    named = [part for part in largest if part is largest[0] or abs(part[1]) >= MEBIBYTE / 20]
    made_up = "; ".join(f"{kind} at {size} {nbytes / MEBIBYTE:+,.1f}" for (kind, size), nbytes in named)
    return (
        f"{other.label} keeps {mib(abs(difference))} MiB {more} than {first.label}{parameters.replace('%', ' %')}. "
        f"Largest differences, MiB: {made_up}."
    )
