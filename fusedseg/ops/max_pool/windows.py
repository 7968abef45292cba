"""The windows of a max-pool: their description, and where they begin."""

import itertools
import math
from collections.abc import Sequence
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


def first_positions(size: tuple[int, ...], count: tuple[int, ...], pool: Pool, device: torch.device) -> Tensor:
    """The flat index of the first position of every window, which may lie in the padding."""
    along = [np.arange(c) * s - p for c, s, p in zip(count, pool.stride, pool.padding, strict=True)]
    return _summed(along, steps(size), device)


def first_codes(count: tuple[int, ...], pool: Pool, device: torch.device, axes: Sequence[int]) -> Tensor:
    """The code along ``axes`` of the first position of every window that is not in the padding before x, uint8."""
    before = [
        -(-np.maximum(p - np.arange(c) * s, 0) // d) if axis in axes and p else np.zeros(1, dtype=np.int64)
        for axis, (c, s, p, d) in enumerate(zip(count, pool.stride, pool.padding, pool.dilation, strict=True))
    ]
    return _summed(before, steps(pool.kernel), device).byte()


def _summed(along: list[np.ndarray], factors: list[int], device: torch.device) -> Tensor:
    """For each window the sum of its numbers along each dimension, times the factor of the dimension."""
    found = np.zeros((), dtype=np.int64)
    for numbers, factor in zip(along, factors, strict=True):
        found = found[..., None] + numbers * factor
    # No op of torch has made the tensor, so the memory report does not take it for a tensor of the model.
    return torch.from_numpy(found).to(device)


def distances(size: tuple[int, ...], pool: Pool, device: torch.device) -> Tensor:
    """The distance of each code from the first position of a window, in flat indices."""
    axes = (
        range(0, k * d * step, d * step) for k, d, step in zip(pool.kernel, pool.dilation, steps(size), strict=True)
    )
    return torch.from_numpy(np.array([sum(at) for at in itertools.product(*axes)])).to(device)
