"""``MemoryReport`` holds the memory of one training step, and shows and writes it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from . import advice, export, tables
from .plot import plot
from .trace import RECOMPUTED, RESIDENT_KINDS, Row, Storage, Trace
from .units import group


@dataclass
class MemoryReport:
    """Where the bytes of one training step go; all numbers are bytes unless they say MiB.

    label: of the report.  model: its class.  device: "cpu", "cuda:0", or "fake" (tensors without values).
    rows: memory at each hook of each module, see ``Row``.
    storages: every allocation, see ``Storage``; events, times, marks: see ``Trace``.
    resident: what was there before the step: parameters, buffers, inputs, optimizer state.
    saved: kept for backward at the end of forward, parameters and buffers excluded.
    peak: most bytes alive at once beyond the resident ones; ``total`` is both.
    allocator_peak: on CUDA, the most that the allocator had handed out, with its rounding and ops' workspaces.
    parameters: their number.  flops: of convolutions and matrix products, by phase; multiply and add count as two.
    convolutions: how many ran in forward, and how many a checkpoint ran again.
    notes: what to know about these numbers.
    """

    label: str
    model: str
    device: str
    rows: list[Row] = field(repr=False)
    storages: list[Storage] = field(repr=False)
    events: list[int] = field(repr=False)
    times: list[int] = field(repr=False)
    marks: dict[str, int]
    resident: int
    peak: int
    peak_event: int
    allocator_peak: int | None
    parameters: int
    flops: dict[str, int]
    convolutions: dict[str, int]
    notes: list[str]

    @classmethod
    def of(
        cls, trace: Trace, model: nn.Module, device: str, notes: list[str], allocator_peak: int | None = None
    ) -> "MemoryReport":
        return cls(
            trace.exp,
            type(model).__name__,
            device,
            trace.rows,
            trace.storages,
            trace.events,
            trace.times,
            trace.marks,
            trace.resident,
            trace.peak,
            trace.peak_event,
            allocator_peak,
            sum(parameter.numel() for parameter in model.parameters()),
            trace.flops,
            trace.convolutions,
            notes,
        )

    @property
    def saved(self) -> int:
        return sum(storage.nbytes for storage in self.saved_storages)

    @property
    def total(self) -> int:
        """Most bytes alive at once, with what was there before the step."""
        return self.resident + self.peak

    @property
    def saved_storages(self) -> list[Storage]:
        return [storage for storage in self.storages if storage.savers]

    @property
    def alive_at_peak(self) -> list[Storage]:
        """Without what was there before."""
        at = self.peak_event
        return [s for s in self.storages if 0 <= s.born <= at and (s.freed is None or s.freed > at)]

    @property
    def peak_phase(self) -> str:
        return next((name for name in reversed(self.marks) if self.marks[name] <= self.peak_event), "forward")

    @property
    def recomputed(self) -> float:
        """Arithmetic that checkpoints add, relative to the step without it."""
        added = self.flops[RECOMPUTED]
        return added / max(sum(self.flops.values()) - added, 1)

    def saved_by(self, by: str) -> dict[str, float]:
        """Bytes kept for backward by "module", "op", "dtype", "kind" or "size" (spatial), the largest first.

        What several modules or ops keep counts in equal parts for each, so that the sum is ``saved``.
        """
        return group(self.saved_storages, by)

    def peak_by(self, by: str) -> dict[str, float]:
        """Bytes alive at the peak, likewise, beyond what was there before the step."""
        return group(self.alive_at_peak, by)

    def resident_by_kind(self) -> dict[str, int]:
        kinds = {kind: sum(s.nbytes for s in self.storages if s.born < 0 and s.kind == kind) for kind in RESIDENT_KINDS}
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def findings(self) -> list[advice.Finding]:
        """The savings available, the largest first."""
        return advice.findings(self)

    def summary(self) -> str:
        """What keeps the most, what was alive at the peak, and what would save the most, in sentences."""
        return advice.summary(self)

    def table(self, count: int | None = 20) -> str:
        """The modules that keep the most for backward, ``count`` of them."""
        return tables.modules_table(self, count)

    def rows_table(self, count: int | None = None) -> str:
        """The rows, at most ``count`` of them."""
        return tables.rows_table(self.rows, count)

    def __str__(self) -> str:
        return tables.full(self)

    def to_dict(self) -> dict[str, Any]:
        return export.to_dict(self)

    def to_csv(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """The rows, and those of other reports.  An existing file is an error unless ``overwrite``, here and below."""
        export.write_csv([row for report in (self, *others) for row in report.rows], path, overwrite)

    def to_json(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Everything but the single allocations."""
        export.write_json(self.to_dict(), path, overwrite)

    def to_chrome_trace(self, path: str | Path, *, overwrite: bool = False) -> None:
        """For chrome://tracing or ui.perfetto.dev: bytes by kind over the step, and the modules' calls."""
        export.write_json(export.chrome_trace(self), path, overwrite)

    def to_snapshot(self, path: str | Path, *, overwrite: bool = False) -> None:
        """A pickle for PyTorch's memory visualiser, pytorch.org/memory_viz, as from CUDA's allocator."""
        export.write_snapshot(self, path, overwrite)

    def plot(self, path: str | Path, *others: "MemoryReport", overwrite: bool = False) -> None:
        """Memory over the step, one picture: by kind, or with other reports a line for each.

        Needs matplotlib; the suffix of the path says which format: png, svg, pdf, ...
        """
        plot([self, *others], path, overwrite)
