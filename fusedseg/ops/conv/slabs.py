"""Slabs: ranges of samples of a large tensor, which are computed one after the other to lower the peak of memory."""

import torch
from torch import Tensor

# A slab has at least this many bytes, so that it keeps a GPU busy for longer than a launch takes.
SLAB_BYTES = 2**25


def slabs(samples: int, nbytes: int) -> list[slice]:
    """Ranges that cover the samples of a tensor of ``nbytes``.

    It is a single one if the tensor is not large, or while the compiler traces.
    """
    if torch.compiler.is_compiling() or nbytes < 2 * SLAB_BYTES or samples < 2:
        return [slice(None)]
    step = -(-samples // min(samples, nbytes // SLAB_BYTES))
    return [slice(n, min(n + step, samples)) for n in range(0, samples, step)]


class Sum:
    """Adds the gradients of slabs in fp32 or wider; ``total`` has the dtype of the first one, or is None."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, t: Tensor | None) -> None:
        if t is None:
            return
        if self._dtype is None:
            self._total, self._dtype = t, t.dtype
            return
        assert self._total is not None
        wide = torch.promote_types(self._dtype, torch.float32)
        self._total = self._total.to(wide).add_(t)

    @property
    def total(self) -> Tensor | None:
        return None if self._total is None or self._dtype is None else self._total.to(self._dtype)
