"""The windows of a max-pool: their description, and where they begin."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NUMPY = {torch.int16: np.int16, torch.int32: np.int32, torch.int64: np.int64}


class Pool(NamedTuple):
    """Window, stride, padding and dilation for each spatial dimension, and ceil_mode."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def overlaps(self) -> bool:
        return any((k - 1) * d >= s for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True))

    def output_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        out = []
        # The compiler before PyTorch 2.10 cannot follow a slice of a named tuple.
        kernel, stride, padding, dilation, _ = self
        for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=True):
            count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if self.ceil_mode else 0)) // s + 1
            # No window begins in the padding on the right.
            out.append(count - 1 if self.ceil_mode and (count - 1) * s >= n + p else count)
        return tuple(out)


def steps(size: tuple[int, ...]) -> list[int]:
    """The number of elements from one position to the next along each dimension."""
    return [math.prod(size[axis + 1 :]) for axis in range(len(size))]


def rows_told_apart(size: tuple[int, ...], pool: Pool) -> bool:
    """Whether the distance to the window's first position determines a position, as in windows not wider than x."""
    reach = 0
    for k, d, step in zip(reversed(pool.kernel), reversed(pool.dilation), reversed(steps(size)), strict=True):
        if k > 1 and reach >= d * step:
            return False
        reach += (k - 1) * d * step
    return True


def first_positions(
    size, out_size, pool: Pool, device: torch.device, dtype: torch.dtype, inside: bool = False
) -> Tensor:
    """The flat index of the first position of every window.

    This position may lie in the padding; with ``inside`` it is the first position inside x.
    """
    first = np.zeros((), dtype=np.int64)
    for axis, (step, s, p, d) in enumerate(zip(steps(size), pool.stride, pool.padding, pool.dilation, strict=True)):
        along = np.arange(-p, out_size[axis] * s - p, s)
        if inside:
            along = np.where(along < 0, along + -(along // d) * d, along)
        first = first + (along * step).reshape(-1, *(1,) * (len(size) - 1 - axis))
    # No op of torch has made the tensor, so the memory report does not take it for a tensor of the model.
    return torch.from_numpy(first.astype(NUMPY[dtype])).to(device)
