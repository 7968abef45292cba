"""``MemoryReport`` holds the memory of one training step, and shows and writes it."""

import csv
import io
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import nn

from . import advice
from .export import open_new, write_json
from .plot import plot
from .record import KEYS, Record, group
from .tables import MEBIBYTE, bars, mib, table, wrapped
from .trace import Row, Storage, Trace

# The columns of the rows.  The number of an event means nothing to a reader of the file.
COLUMNS = [column.name for column in fields(Row) if column.name != "event"]


class MemoryReport(Record):
    """The memory of one training step.  All numbers are bytes unless they say MiB.

    ``print(report)`` shows a summary and tables.

    Attributes:
        label: the name of the report.
        model: the class of the model.
        device: "cpu", "cuda:0", or "fake" for tensors without values.
        rows: memory at each hook of each module, see ``Row``.
        storages: all allocations, see ``Storage``.
        events, marks: allocations and releases in order, and the phases; see ``Trace``.
        resident: bytes that existed before the step: parameters, buffers, inputs, optimizer state.
        peak: the most bytes alive at once, without the resident bytes; ``total`` includes them.
        peak_event: the number of the event of the peak.
        allocator_peak: on CUDA, the most bytes that the allocator had handed out, with its rounding and with the
            workspaces of ops; otherwise None.
        parameters: the number of parameters.
        flops: arithmetic of convolutions and matrix products by phase; a multiplication and an addition count as two.
        convolutions: the number of convolutions in forward, and of those that backward ran again for a checkpoint or a
            byte budget.
        notes: remarks on these numbers.
    """

    @classmethod
    def of(
        cls, trace: Trace, model: nn.Module, device: str, notes: list[str], allocator_peak: int | None = None
    ) -> "MemoryReport":
        return cls(
            label=trace.exp,
            model=type(model).__name__,
            device=device,
            rows=trace.rows,
            storages=trace.storages,
            events=trace.events,
            marks=trace.marks,
            resident=trace.resident,
            peak=trace.peak,
            peak_event=trace.peak_event,
            allocator_peak=allocator_peak,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            flops=trace.flops,
            convolutions=trace.convolutions,
            notes=notes,
        )

    def findings(self) -> list[advice.Finding]:
        """The savings available, the largest first."""
        return advice.findings(self)

    def summary(self) -> str:
        """Sentences that say what keeps the most, what was alive at the peak, and what would save how much."""
        return advice.summary(self)

    def table(self, count: int | None = 20) -> str:
        """A table of the ``count`` modules that keep the most for backward; None shows all modules."""
        kept = self.saved_by("module")
        types = {row.name: row.layer_type for row in self.rows}
        by_module: dict[str, list[Storage]] = {}
        for storage in self.saved_storages:
            for module in dict.fromkeys(module for module, _ in storage.savers):
                by_module.setdefault(module, []).append(storage)
        total = self.saved or 1
        lines = []
        for name, nbytes in list(kept.items())[:count]:
            kinds = group(by_module[name], "kind")
            lines.append((name, types.get(name, ""), ", ".join(list(kinds)[:3]), mib(nbytes), f"{nbytes / total:.1%}"))
        if count is not None and len(kept) > count:
            rest = sum(list(kept.values())[count:])
            lines.append((f"{len(kept) - count} more modules", "", "", mib(rest), f"{rest / total:.1%}"))
        lines.append(("all", "", "", mib(self.saved), f"{self.saved / total:.0%}"))
        return table(("module", "type", "what it keeps", "MiB kept", "share"), lines, left=3)

    def rows_table(self, count: int | None = None) -> str:
        """A table of the first ``count`` rows, in MiB; None shows all rows."""
        # In the order of the fields of a row.
        names = ("layer_idx", "call_idx", "layer_type", "name", "hook_type", "phase")
        lines = [
            (
                *(str(value) for name, value in asdict(row).items() if name in names),
                mib(row.mem_all),
                mib(row.mem_cached),
                f"{row.mem_all_diff / MEBIBYTE:+,.1f}",
                f"{row.mem_cached_diff / MEBIBYTE:+,.1f}",
            )
            for row in self.rows[:count]
        ]
        text = table((*names, "mem_all", "mem_cached", "all diff", "cached diff"), lines, left=len(names))
        hidden = len(self.rows) - len(lines)
        return f"{text}\n{hidden} more rows" if hidden else text

    def __str__(self) -> str:
        title = f"{self.label}: {self.model}, one training step on {self.device} tensors"
        return "\n".join(
            [
                title,
                "═" * len(title),
                wrapped(self.summary()),
                "",
                f"Kept for backward, {mib(self.saved)} MiB, by kind",
                bars(self.saved_by("kind")),
                "by the op that keeps it (what several keep counts in equal parts)",
                bars(self.saved_by("op")),
                "by spatial size",
                bars(self.saved_by("size")),
                "",
                f"Alive at the peak, {mib(self.peak)} MiB, by kind",
                bars(self.peak_by("kind")),
                "",
                self.table(),
                *(f"\nNote: {note}" for note in self.notes),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """The report without the single allocations, as plain values."""
        return {
            "label": self.label,
            "model": self.model,
            "device": self.device,
            "parameters": self.parameters,
            "resident_bytes": self.resident,
            "resident_by_kind": self.resident_by_kind(),
            "saved_bytes": self.saved,
            "peak_bytes": self.peak,
            "total_bytes": self.total,
            "allocator_peak_bytes": self.allocator_peak,
            "peak_phase": self.peak_phase,
            "saved_by": {by: self.saved_by(by) for by in KEYS},
            "alive_at_peak_by": {by: self.peak_by(by) for by in ("kind", "module", "dtype")},
            "convolutions": self.convolutions,
            "flops": self.flops,
            "findings": [asdict(finding) | {"text": str(finding)} for finding in self.findings()],
            "summary": self.summary(),
            "notes": self.notes,
            "rows": [_columns(row) for row in self.rows],
        }

    def to_csv(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """Writes the rows of this report, and of other reports, to a CSV file.

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
        """
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(_columns(row) for report in (self, *others) for row in report.rows)
        with open_new(path, overwrite) as file:
            file.write(text.getvalue().encode())

    def to_json(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes ``to_dict()`` to a JSON file; raises FileExistsError as ``to_csv`` does."""
        write_json(self.to_dict(), path, overwrite)

    def plot(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """Draws memory over the step: stacked by kind, or with other reports one line for each report.

        The suffix of the path sets the format: png, svg, pdf, ...

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
            ImportError: matplotlib is not installed.
            ValueError: the suffix is no known format.
        """
        plot([self, *others], path, overwrite)


def _columns(row: Row) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name in COLUMNS}
