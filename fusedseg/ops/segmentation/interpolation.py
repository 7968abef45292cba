"""Linear interpolation along one axis as a matrix, of which a tile uses a part."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Axis(NamedTuple):
    """Output position i is (1 - second[i]) times input position first[i], plus second[i] times the next one."""

    n_in: int
    first: tuple[int, ...]
    second: tuple[float, ...]

    @property
    def n_out(self) -> int:
        return len(self.first)

    def inputs(self, start: int, stop: int) -> slice:
        """The input positions that the output positions from ``start`` to ``stop`` need."""
        return slice(self.first[start], min(self.first[stop - 1] + 2, self.n_in))

    def matrix(self, like: Tensor) -> Tensor:
        """(n_out, n_in), in the dtype and on the device of ``like``."""
        first = torch.tensor(self.first, device=like.device).unsqueeze(1)
        second = torch.tensor(self.second, dtype=like.dtype, device=like.device).unsqueeze(1)
        matrix = like.new_zeros(self.n_out, self.n_in).scatter_(1, first, 1 - second)
        return matrix.scatter_add_(1, (first + 1).clamp(max=self.n_in - 1), second)


@functools.lru_cache(maxsize=64)
def axis_of(n_in: int, n_out: int, align_corners: bool) -> Axis:
    """The positions and weights of ``torch.nn.functional.interpolate`` with mode "linear"."""
    if align_corners:
        scale = (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
        source = [i * scale for i in range(n_out)]
    else:
        source = [max(0.0, n_in / n_out * (i + 0.5) - 0.5) for i in range(n_out)]
    first = [min(int(x), n_in - 1) for x in source]
    return Axis(n_in, tuple(first), tuple(min(x - i, 1.0) for x, i in zip(source, first, strict=True)))
