"""The figures of one training step, and its bytes by module, op, dtype, kind and size."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

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
class Record:
    """The figures of one training step; ``MemoryReport`` adds tables, texts and files, and describes the fields."""

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
    convolutions: dict[str, int]
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
        """The phase of the peak: forward, loss, backward or optimizer."""
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
