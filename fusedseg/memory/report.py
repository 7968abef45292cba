"""``MemoryReport`` holds the memory of one training step, and shows and writes it."""

from pathlib import Path
from typing import Any

from torch import nn

from . import advice, export, tables
from .plot import plot
from .record import Record
from .trace import Trace


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
        return tables.modules_table(self, count)

    def rows_table(self, count: int | None = None) -> str:
        """A table of the first ``count`` rows; None shows all rows."""
        return tables.rows_table(self.rows, count)

    def __str__(self) -> str:
        return tables.full(self)

    def to_dict(self) -> dict[str, Any]:
        """The report without the single allocations, as plain values."""
        return export.to_dict(self)

    def to_csv(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """Writes the rows of this report, and of other reports, to a CSV file.

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
        """
        export.write_csv([row for report in (self, *others) for row in report.rows], path, overwrite)

    def to_json(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Writes ``to_dict()`` to a JSON file; raises FileExistsError as ``to_csv`` does."""
        export.write_json(self.to_dict(), path, overwrite)

    def plot(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """Draws memory over the step: stacked by kind, or with other reports one line for each report.

        The suffix of the path sets the format: png, svg, pdf, ...

        Raises:
            FileExistsError: the file exists, and ``overwrite`` is False.
            ImportError: matplotlib is not installed.
            ValueError: the suffix is no known format.
        """
        plot([self, *others], path, overwrite)
