"""Writes tables of text for terminals."""

import shutil
import textwrap
from collections.abc import Sequence

from .advice import summary
from .record import Record
from .trace import Row
from .units import MEBIBYTE, group, mib

# The width of the longest bar, and the most bars of a table.
BAR, BARS = 24, 8
# The widest and the narrowest text.
WIDTH, NARROWEST = 110, 40


def table(head: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with aligned columns under a head; the first ``left`` columns are aligned to the left."""
    widths = [max(len(row[i]) for row in [head, *lines]) for i in range(len(head))]
    aligned = [
        "  ".join(f"{cell:<{width}}" if i < left else f"{cell:>{width}}" for i, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in [head, *lines])
    ]
    return "\n".join(line.rstrip() for line in [aligned[0], "─" * (sum(widths) + 2 * len(widths) - 2), *aligned[1:]])


def wrapped(text: str) -> str:
    """Breaks lines that are longer than ``WIDTH`` or wider than the terminal, and indents the lines of a list item."""
    # A file or a pipe has no width.
    width = min(WIDTH, max(shutil.get_terminal_size((WIDTH, 24)).columns - 1, NARROWEST))
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=" " * (len(line) - len(line.lstrip(" •"))))
        for line in text.splitlines()
    )


def bars(values: dict[str, float]) -> str:
    """A line for each of the first values, with its share of the sum and a bar."""
    total = sum(values.values()) or 1.0
    shown = list(values.items())[:BARS]
    rest = sum(values.values()) - sum(value for _, value in shown)
    if len(values) > BARS:
        shown.append((f"{len(values) - BARS} more", rest))
    lines = [
        (name, mib(value), f"{value / total:.0%}", "█" * round(BAR * value / total) or "▏") for name, value in shown
    ]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(3)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {value:>{widths[1]}} MiB  {share:>{widths[2]}}  {bar}"
        for name, value, share, bar in lines
    )


def modules_table(report: Record, count: int | None) -> str:
    """The bytes that each module keeps for backward, with their kinds."""
    kept = report.saved_by("module")
    types = {row.name: row.layer_type for row in report.rows}
    by_module: dict[str, list] = {}
    for storage in report.saved_storages:
        for module in dict.fromkeys(module for module, _ in storage.savers):
            by_module.setdefault(module, []).append(storage)
    total = report.saved or 1
    lines = []
    for name, nbytes in list(kept.items())[:count]:
        kinds = group(by_module[name], "kind")
        lines.append((name, types.get(name, ""), ", ".join(list(kinds)[:3]), mib(nbytes), f"{nbytes / total:.1%}"))
    if count is not None and len(kept) > count:
        rest = sum(list(kept.values())[count:])
        lines.append((f"{len(kept) - count} more modules", "", "", mib(rest), f"{rest / total:.1%}"))
    lines.append(("all", "", "", mib(report.saved), f"{report.saved / total:.0%}"))
    return table(("module", "type", "what it keeps", "MiB kept", "share"), lines, left=3)


def rows_table(rows: Sequence[Row], count: int | None) -> str:
    """The first ``count`` rows as a table, in MiB."""
    lines = [
        (
            str(row.layer_idx),
            str(row.call_idx),
            row.layer_type,
            row.name,
            row.hook_type,
            row.phase,
            mib(row.mem_all),
            mib(row.mem_cached),
            f"{row.mem_all_diff / MEBIBYTE:+,.1f}",
            f"{row.mem_cached_diff / MEBIBYTE:+,.1f}",
        )
        for row in rows[:count]
    ]
    names = ("layer_idx", "call_idx", "layer_type", "name", "hook_type", "phase")
    text = table((*names, "mem_all", "mem_cached", "all diff", "cached diff"), lines, left=6)
    hidden = len(rows) - len(lines)
    return f"{text}\n{hidden} more rows" if hidden else text


def full(report: Record) -> str:
    """The text that ``print(report)`` shows."""
    title = f"{report.label}: {report.model}, one training step on {report.device} tensors"
    return "\n".join(
        [
            title,
            "═" * len(title),
            wrapped(summary(report)),
            "",
            f"Kept for backward, {mib(report.saved)} MiB, by kind",
            bars(report.saved_by("kind")),
            "by the op that keeps it (what several keep counts in equal parts)",
            bars(report.saved_by("op")),
            "by spatial size",
            bars(report.saved_by("size")),
            "",
            f"Alive at the peak, {mib(report.peak)} MiB, by kind",
            bars(report.peak_by("kind")),
            "",
            modules_table(report, 20),
            *(f"\nNote: {note}" for note in report.notes),
        ]
    )
