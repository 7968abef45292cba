"""The windows of a max-pool: their description, and where they begin."""

import itertools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Pool(NamedTuple):
    """Window, stride, padding and dilation for each spatial dimension, and ceil_mode."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

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
    size: tuple[int, ...],
    count: tuple[int, ...],
    pool: Pool,
    device: torch.device,
    least: tuple[int, ...] | None = None,
) -> Tensor:
    """The flat index of the first position of every window, which may lie in the padding.

    With ``least`` it is the first position of the window that is at least ``least[axis]`` along each dimension.
    """
    first = np.zeros((), dtype=np.int64)
    for axis, (step, s, p, d) in enumerate(zip(steps(size), pool.stride, pool.padding, pool.dilation, strict=True)):
        along = np.arange(-p, count[axis] * s - p, s)
        if least is not None:
            missing = np.maximum(least[axis] - along, 0)
            along = along + -(-missing // d) * d
        first = first + (along * step).reshape(-1, *(1,) * (len(size) - 1 - axis))
    # No op of torch has made the tensor, so the memory report does not take it for a tensor of the model.
    return torch.from_numpy(first).to(device)


def distances(size: tuple[int, ...], pool: Pool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The code of each distance from the first position of a window, and the distance of each code, in flat indices.

    The first table is right if distances determine positions (``rows_told_apart``).
    """
    axes = (
        range(0, k * d * step, d * step) for k, d, step in zip(pool.kernel, pool.dilation, steps(size), strict=True)
    )
    distance_of = np.array([sum(at) for at in itertools.product(*axes)])
    code_of = np.zeros(distance_of.max() + 1, dtype=np.uint8)
    code_of[distance_of] = np.arange(len(distance_of))
    return torch.from_numpy(code_of).to(device), torch.from_numpy(distance_of).to(device)
