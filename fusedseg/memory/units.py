"""Formats bytes, and groups storages."""

from collections import Counter
from collections.abc import Callable, Sequence

from .trace import Storage

MEBIBYTE = 2**20
NO_SIZE = "no spatial size"


def mib(nbytes: float) -> str:
    return f"{nbytes / MEBIBYTE:,.1f}"


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
