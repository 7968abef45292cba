"""``MemoryReport`` holds the memory of one training step: its bytes by module, op, dtype, kind and size, and texts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from . import advice
from .tables import bars, mib, table, wrapped
from .trace import RECOMPUTED, RESIDENT_KINDS, Row, Storage

NO_SIZE = "no spatial size"


def size_name(shape: Sequence[int]) -> str:
    """The spatial size of a shape (N, C, *spatial), such as "64×64"."""
    return "×".join(map(str, shape[2:])) or NO_SIZE


# The keys by which bytes can be grouped.  A storage that several modules or ops have saved counts for each of them in
# equal parts.
KEYS: dict[str, Callable[[Storage], Sequence[str]]] = {
    "module": lambda storage: [module for module, _ in storage.savers] or [storage.module],
    "op": lambda storage: [op or "held otherwise" for _, op in storage.savers] or [storage.op],
    "dtype": lambda storage: [str(storage.dtype).removeprefix("torch.")],
    "kind": lambda storage: [storage.kind],
    "size": lambda storage: [size_name(storage.shape)],
}


def group(storages: Sequence[Storage], by: str) -> dict[str, float]:
    """The bytes of the storages, grouped by one of ``KEYS``, the largest group first."""
    if by not in KEYS:
        raise ValueError(f"fusedseg.memory: by must be one of {', '.join(KEYS)}, got {by!r}")
    total: Counter[str] = Counter()
    for storage in storages:
        names = dict.fromkeys(KEYS[by](storage))
        for name in names:
            total[name] += storage.nbytes / len(names)  # type: ignore[assignment]
    return dict(total.most_common())


@dataclass
class MemoryReport:
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
        notes: remarks on these numbers.
    """

    label: str
    model: str
    device: str
    rows: list[Row] = field(repr=False)
    storages: list[Storage] = field(repr=False)
    events: list[int] = field(repr=False)
    marks: dict[str, int]
    resident: int
    peak: int
    peak_event: int
    allocator_peak: int | None
    parameters: int
    flops: dict[str, int]
    notes: list[str]

    @property
    def saved(self) -> int:
        """Bytes kept for backward at the end of forward, without parameters and buffers."""
        return sum(storage.nbytes for storage in self.saved_storages)

    @property
    def total(self) -> int:
        """The most bytes alive at once, including the bytes that existed before the step."""
        return self.resident + self.peak

    @property
    def saved_storages(self) -> list[Storage]:
        """The storages kept for backward at the end of forward."""
        return [storage for storage in self.storages if storage.savers]

    @property
    def alive_at_peak(self) -> list[Storage]:
        """The storages alive at the peak, without those that existed before the step."""
        at = self.peak_event
        return [s for s in self.storages if 0 <= s.born <= at and (s.freed is None or s.freed > at)]

    @property
    def peak_phase(self) -> str:
        """The phase of the peak, which is forward, loss, backward or optimizer."""
        return next((name for name in reversed(self.marks) if self.marks[name] <= self.peak_event), "forward")

    @property
    def recomputed(self) -> float:
        """The arithmetic that checkpoints and byte budgets add, relative to the step without them."""
        added = self.flops[RECOMPUTED]
        return added / max(sum(self.flops.values()) - added, 1)

    @property
    def repeated(self) -> float:
        """The arithmetic that runs again in backward, as a share of the forward's."""
        return self.flops[RECOMPUTED] / max(self.flops["forward"], 1)

    def saved_by(self, by: str) -> dict[str, float]:
        """Bytes kept for backward by "module", "op", "dtype", "kind" or "size" (spatial), the largest first.

        A storage that several modules or ops keep counts in equal parts for each of them, so that the sum is ``saved``.

        Raises:
            ValueError: ``by`` is none of these keys.
        """
        return group(self.saved_storages, by)

    def peak_by(self, by: str) -> dict[str, float]:
        """Bytes alive at the peak by one of the keys of ``saved_by``, without those that existed before the step."""
        return group(self.alive_at_peak, by)

    def resident_by_kind(self) -> dict[str, int]:
        """Bytes that existed before the step, by kind."""
        kinds = {kind: sum(s.nbytes for s in self.storages if s.born < 0 and s.kind == kind) for kind in RESIDENT_KINDS}
        return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}

    def findings(self) -> list[advice.Finding]:
        """The savings available, the largest first."""
        return advice.findings(self.saved_storages, self.saved)

    def summary(self) -> str:
        """Sentences that say what keeps the most, what was alive at the peak, and what would save how much."""
        resident = self.resident_by_kind()
        there = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in resident.items())
        lines = [
            f"{self.parameters:,} parameters. Forward keeps {mib(self.saved)} MiB for backward. The step peaks at "
            f"{mib(self.peak)} MiB, in {self.peak_phase}, on top of the {mib(self.resident)} MiB that were there "
            f"before it ({there}): {mib(self.total)} MiB in all."
        ]
        if self.allocator_peak is not None:
            most = mib(self.allocator_peak)
            lines.append(f"CUDA's allocator had handed out {most} MiB at most, rounded up by block.")
        lines += self._largest()
        lines += advice.of_loss(self.storages, self.rows, self.marks.get("backward", 0), self.saved)
        at_peak = self.peak_by("kind")
        if at_peak:
            alive = ", ".join(f"{kind} {mib(nbytes)}" for kind, nbytes in list(at_peak.items())[:4])
            lines.append(f"Alive at the peak, largest first: {alive}.")
        if self.flops[RECOMPUTED]:
            lines.append(f"Backward runs calls of the forward again: {self.recomputed:+.0%} arithmetic.")
        found = self.findings()
        if found:
            less = sum(finding.saving for finding in found)
            lines.append(f"Savings available, {mib(less)} MiB of the {mib(self.saved)} kept:")
            lines += [f"  • {finding}" for finding in found]
        return "\n".join(lines)

    def _largest(self) -> list[str]:
        """A sentence about the spatial size that keeps the most, compared with the size of the parameters."""
        sizes = {size: nbytes for size, nbytes in self.saved_by("size").items() if size != NO_SIZE}
        if not sizes:
            return []
        size, nbytes = next(iter(sizes.items()))
        weights = self.resident_by_kind().get("parameters", 0)
        text = f"Tensors of spatial size {size} are {nbytes / self.saved:.0%} of what is kept"
        if weights < self.saved / 4:
            text += (
                f"; the parameters weigh {mib(weights)} MiB, so fewer channels at this size save more than fewer layers"
            )
        return [f"{text}."]

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
            "flops": self.flops,
            "findings": [asdict(finding) | {"text": str(finding)} for finding in self.findings()],
            "summary": self.summary(),
            "notes": self.notes,
            "rows": [asdict(row) for row in self.rows],
        }
