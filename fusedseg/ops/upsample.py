"""Linear, bilinear and trilinear interpolation by gathering, forward and backward: ``kernels/upsample.py``.

Both directions are deterministic, and each is the transpose of the other.  Only the sizes are kept for backward.
``interpolate.py`` calls this file where the kernels serve a tensor, and PyTorch's kernels elsewhere.
"""

import functools
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _backend, _torch
from .check import ACTIVATION_DTYPES
from .double_backward import is_batch, one_by_one
from .layout import FORMATS

# The mode of ``torch.nn.functional.interpolate``, by the number of spatial dimensions.
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
# An input that more outputs read along an axis is left to aten, because one thread would read them one by one.
MOST_READERS = 64
# A factor is a fraction with at most this denominator.  It is off by 1e-9 at most.
DENOMINATOR = 2**15


class Axis(NamedTuple):
    """An axis of ``small`` inputs and ``large`` outputs.  Output o lies at (o step + shift) / den.

    ``values`` is the number of inputs that an output reads, ``readers`` the largest number of outputs that read an
    input.  Both are 1 only if output o is input o.
    """

    small: int
    large: int
    step: int = 1
    shift: int = 0
    den: int = 1
    values: int = 1
    readers: int = 1

    @property
    def fits(self) -> bool:
        """Whether the kernels can number positions by 32 bits, and few outputs read an input."""
        largest = max((self.large + 1) * self.step + abs(self.shift), (self.small + 1) * self.den)
        return largest < 2**31 and self.readers <= MOST_READERS

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The weight of each input for each output, (large, small)."""
        o, i = (torch.arange(n, device=device) for n in (self.large, self.small))
        s = (o * self.step + self.shift).clamp(0, (self.small - 1) * self.den)
        return (self.den - (s[:, None] - i * self.den).abs()).clamp(min=0).to(dtype) / self.den


def axis_of(small: int, large: int, factor: float | None, corners: bool) -> Axis:
    """The axis as PyTorch defines it: a factor that the user gives counts only if corners are not aligned."""
    if corners and 1 in (small, large):
        step, shift, den = 1, 0, 1
    elif corners:
        step, shift, den = small - 1, 0, large - 1
    else:
        r = Fraction(small, large) if factor is None else Fraction(1 / factor).limit_denominator(DENOMINATOR)
        step, shift, den = 2 * r.numerator, r.numerator - r.denominator, 2 * r.denominator
    if small == large and (step, shift) == (den, 0):
        return Axis(small, large)
    common = gcd(step, shift, den)
    step, shift, den = step // common, shift // common, den // common
    # With one input all outputs read it.  The readers of another input lie between its neighbours.
    readers = large if small == 1 else min(large, ceil(Fraction(2 * den, step)))
    return Axis(small, large, step, shift, den, values=2, readers=max(2, readers))


class Linear(NamedTuple):
    """An interpolation to the spatial size ``size``."""

    size: tuple[int, ...]
    factors: tuple[float, ...] | None
    corners: bool

    def axes(self, small: Sequence[int]) -> tuple[Axis, ...]:
        """The axes a, b and w of an interpolation from the spatial size ``small``."""
        return _axes(tuple(small), self)


@functools.lru_cache(1024)
def _axes(small: tuple[int, ...], linear: Linear) -> tuple[Axis, ...]:
    factors = linear.factors or (None,) * len(small)
    found = [axis_of(*sizes, linear.corners) for sizes in zip(small, linear.size, factors, strict=True)]
    return (*(Axis(1, 1) for _ in range(3 - len(small))), *found)


def serves(t: Tensor, small: Sequence[int], linear: Linear) -> bool:
    """Whether the kernels serve an interpolation of ``t``, or the gradient ``t`` of one."""
    dims = t.dim() - 2
    # A question about the symbolic sizes of a tensor without values would become a guard.
    if type(t) not in (Tensor, torch.nn.Parameter) or t.numel() == 0 or min(*small, *linear.size) < 1:
        return False
    if dims not in MODES or len(linear.size) != dims or t.dtype not in ACTIVATION_DTYPES:
        return False
    if any(factor <= 0 for factor in linear.factors or ()):
        return False
    axes = linear.axes(small)
    # The offsets of positions, and of the values of a line, are 32 bits wide.
    largest = max(max(prod(axis[k] for axis in axes), axes[2][k] * _widest(t)) for k in (0, 1))
    return largest < 2**31 and all(axis.fits for axis in axes) and _backend.use_triton(t, "upsample")


def _widest(t: Tensor) -> int:
    """The largest distance of two positions in memory."""
    return max(t.shape[1], t.stride(-1), 1)


def suggested(t: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without values in the memory format that PyTorch's kernels choose for ``t``."""
    return torch.empty(shape, dtype=t.dtype, device=t.device, memory_format=_torch.suggest_memory_format(t))


def pitch_of(t: Tensor) -> int | None:
    """The distance of two positions in memory, if channels are adjacent as in channels_last or in slices of channels.

    None if they are not.
    """
    pitch: int | None = None
    count = 1
    for d in (*range(t.dim() - 1, 1, -1), 0):
        if t.shape[d] > 1:
            if pitch is None:
                pitch = t.stride(d) // count
            if t.stride(d) != pitch * count:
                return None
        count *= t.shape[d]
    if t.shape[1] > 1 and t.stride(1) != 1:
        return None
    return t.shape[1] if pitch is None else pitch


def _readable(t: Tensor, result: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """``t`` in the format of the result, and the pitches of both, or None for planes."""
    if result.is_contiguous():
        return t.contiguous(), None
    pitch = pitch_of(result)
    assert pitch is not None, "the result is neither contiguous nor a slice of channels in channels_last"
    own = pitch_of(t)
    if own is None or own < t.shape[1]:
        t, own = t.contiguous(memory_format=FORMATS[t.dim()]), t.shape[1]
    return t, (own, pitch)


def forward(x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    """The interpolation of ``x``, which the kernels serve (``serves``).

    It is written into ``out`` if that is given, which may be a slice of the channels of a tensor in channels_last.
    """
    from ..kernels.upsample import upsample_fwd

    y = suggested(x, (*x.shape[:2], *linear.size)) if out is None else out
    axes = linear.axes(x.shape[2:])
    x, pitches = _readable(x, y)
    with _backend.launching(x):
        upsample_fwd(x, y, axes, pitches)
    return y


def backward(dy: Tensor, small: Sequence[int], linear: Linear) -> Tensor:
    """The gradient of a tensor of the spatial size ``small`` from ``dy``, which the kernels serve."""
    from ..kernels.upsample import upsample_bwd

    dx = suggested(dy, (*dy.shape[:2], *small))
    axes = linear.axes(small)
    dy, pitches = _readable(dy, dx)
    with _backend.launching(dy):
        upsample_bwd(dy, dx, axes, pitches)
    return dx


def reference_forward(x: Tensor, linear: Linear) -> Tensor:
    """The same as ``forward``, as products with the matrices of the axes."""
    for d, axis in enumerate(linear.axes(x.shape[2:])[5 - x.dim() :], 2):
        x = (x.movedim(d, -1) @ axis.matrix(x.dtype, x.device).T).movedim(-1, d)
    return x


def reference_backward(dy: Tensor, small: Sequence[int], linear: Linear) -> Tensor:
    """The same as ``backward``, as products with the matrices of the axes."""
    for d, axis in enumerate(linear.axes(small)[5 - dy.dim() :], 2):
        dy = (dy.movedim(d, -1) @ axis.matrix(dy.dtype, dy.device)).movedim(-1, d)
    return dy


class UpsampleFunction(torch.autograd.Function):
    """The interpolation in eager mode."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: Linear) -> Tensor:
        ctx.small, ctx.linear = tuple(x.shape[2:]), linear
        ctx.set_materialize_grads(False)
        return forward(x, linear)

    @staticmethod
    def backward(ctx, dy):
        return (None if dy is None else UpsampleBackward.apply(dy, ctx.small, ctx.linear)), None


class UpsampleBackward(torch.autograd.Function):
    """The gradient of the interpolation; its own gradient is the interpolation."""

    @staticmethod
    def forward(ctx, dy: Tensor, small: tuple[int, ...], linear: Linear) -> Tensor:
        ctx.linear = linear
        ctx.set_materialize_grads(False)
        if is_batch(dy):
            return one_by_one(lambda dy: (backward(dy, small, linear),), dy)[0]
        return backward(dy, small, linear)

    @staticmethod
    def backward(ctx, ddx):
        return (None if ddx is None else UpsampleFunction.apply(ddx, ctx.linear)), None, None
