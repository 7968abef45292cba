"""The memory layout of an activation tensor (N, C, *spatial)."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

# The memory format with adjacent channels, by the number of dimensions.
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
Found = TypeVar("Found")


class Layout(NamedTuple):
    """A tensor that is contiguous or channels_last, and the groups of values of which a norm takes its statistics.

    With ``rows`` the channels are adjacent in memory (channels_last, or N x C): N counts samples times positions, and S
    is 1.  Without ``rows`` the tensor is contiguous, and positions are adjacent: element (n, c, s) lies at
    (n C + c) S + s.

    By default a statistic covers one channel of the whole tensor.  ``by_sample`` makes a layout of I tensors that lie
    one after the other, one for each sample.  Then N is 1 or, with ``rows``, counts positions, and a statistic covers D
    adjacent channels of one sample.
    """

    rows: bool
    N: int
    C: int
    S: int
    I: int = 1
    D: int = 1

    @property
    def stat(self) -> str:
        """The value of the kernels' constexpr STAT.  A single sample counts as a batch of one."""
        return "group" if self.D > 1 else "instance" if self.I > 1 else "batch"

    def by_sample(self, samples: int, groups: int | None) -> "Layout":
        """The layout for statistics of each sample, in ``groups`` groups of channels; None keeps this one."""
        if groups is None:
            return self
        N = self.N // samples if samples else 0
        return self._replace(N=N, I=samples, D=self.C // groups)


def memory_of(t: Tensor) -> int:
    """The number of the memory that a tensor lies in, which its views share."""
    return t.untyped_storage()._cdata


def suggests_channels_last(x: Tensor) -> bool:
    """Whether aten treats ``x``, (N, C, *spatial), as channels_last.

    Aten decides by strides only.  The stride of a dimension of size 1 counts too, although views may give it any value.

    Source: ``is_channels_last_strides_2d`` in torch's c10/core/MemoryFormat.h.
    """
    if x.stride(1) == 0:
        return False
    least = 0
    for d in (1, *range(x.dim() - 1, 1, -1), 0):
        n, step = x.shape[d], x.stride(d)
        if n == 0 or step < least or (d == 0 and least == x.stride(1)):
            return False
        least = step * n
    return True


def is_rows(x: Tensor) -> bool:
    """Whether an image with values is in channels_last, and not contiguous as well."""
    rows = x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]) and not x.is_contiguous()
    return rows and x.numel() > 0 and x.is_floating_point()


def _of_form(find: Callable[[torch.Size, tuple[int, ...]], Found]) -> Callable[[Tensor], Found]:
    """Decorates a function of shape and strides, whose result is found once; it becomes a function of a tensor."""
    # The limit is for shapes that change in every call.
    known: Callable[[torch.Size, tuple[int, ...]], Found] = functools.lru_cache(1024)(find)

    @functools.wraps(find)
    def of(x: Tensor) -> Found:
        # A subclass, such as a fake tensor, may have symbols for sizes, which a cache cannot find again.
        return (known if type(x) is Tensor else find)(x.shape, x.stride())

    return of


@_of_form
def layout_of(shape: torch.Size, strides: tuple[int, ...]) -> Layout | None:
    """The layout of a dense tensor; None for any other strides."""
    N, C, *spatial = shape
    S = 0 if N == 0 or C == 0 else math.prod(spatial)
    if _contiguous(shape, strides):
        return Layout(True, N, C, 1) if S <= 1 else Layout(False, N, C, S)
    if _contiguous((N, *spatial, C), (strides[0], *strides[2:], strides[1])):
        return Layout(True, N * S, C, 1)
    return None


def _contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """The answer of ``Tensor.is_contiguous`` for a tensor of this shape with these strides."""
    if 0 in shape:
        return True
    step = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n != 1:
            if stride != step:
                return False
            step = step * n
    return True


@_of_form
def pitch_of(shape: torch.Size, strides: tuple[int, ...]) -> int | None:
    """The distance in memory of two positions of an image whose channels are adjacent; None for other strides."""
    C = shape[1]
    if len(shape) not in FORMATS or 0 in shape or (C > 1 and strides[1] != 1):
        return None
    pitch, step = C, None
    for d in (*range(len(shape) - 1, 1, -1), 0):
        if shape[d] == 1:
            continue
        if step is None:
            pitch = step = strides[d]
        elif strides[d] != step:
            return None
        step *= shape[d]
    return pitch if pitch >= C else None


def dense(x: Tensor) -> tuple[Tensor, Layout]:
    """``x`` and its layout; a contiguous copy of ``x`` if it is neither contiguous nor channels_last."""
    layout = layout_of(x)
    if layout is None:
        x = x.contiguous()
        layout = layout_of(x)
        assert layout is not None
    return x, layout


def like(dz: Tensor, z: Tensor) -> Tensor:
    """``dz`` with the strides of the dense tensor ``z``; a copy if it has other strides, such as an expanded ``dz``."""
    if dz.stride() == z.stride():
        return dz
    return torch.empty_like(z).copy_(dz)


def laid_out(t: Tensor, stride: Sequence[int]) -> Tensor:
    """``t`` with these strides; a copy if it has other ones."""
    if t.stride() == tuple(stride):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
