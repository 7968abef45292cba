"""``F.interpolate`` as one op, whose linear modes have Triton kernels (``kernels/upsample.py``).

The kernels gather in both directions, so that both are deterministic, and each is the transpose of the other.
PyTorch's kernels compute all other modes, and serve the tensors that ours do not.  Only the sizes are kept for
backward.

For graphs it is one op.  PyTorch's tracer writes an interpolation as index and product ops, which round in another
order than the kernel.  This op stays one node.
"""

import functools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import ceil, gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _backend, _torch
from . import unfused
from .at_size import Compared, Rounded, U, channel_ranges, checked, growth, wide
from .check import ACTIVATION_DTYPES
from .double_backward import refuse_batches
from .layout import FORMATS, pitch_of
from .registry import Result, family, graph_op
from .self_test.cases import SHAPE, TOLERANCE, image, stock

aten = torch.ops.aten
OP = "fusedseg.upsample"
FAMILY = "upsample"
Sizes = int | Sequence[int] | None
Factors = float | Sequence[float] | None
# The arguments of the op after x.
How = tuple[list[int] | None, list[float] | None, str, bool | None]
# The linear mode of ``torch.nn.functional.interpolate``, by the number of spatial dimensions.
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
# (mode, spatial dimensions) -> PyTorch's kernel of backward, and whether it takes ``align_corners``.
BACKWARD: dict[tuple[str, int], tuple[Any, bool]] = {
    ("nearest", 1): (aten.upsample_nearest1d_backward.default, False),
    ("nearest", 2): (aten.upsample_nearest2d_backward.default, False),
    ("nearest", 3): (aten.upsample_nearest3d_backward.default, False),
    ("nearest-exact", 1): (_torch.nearest_exact_backward[1], False),
    ("nearest-exact", 2): (_torch.nearest_exact_backward[2], False),
    ("nearest-exact", 3): (_torch.nearest_exact_backward[3], False),
    ("linear", 1): (aten.upsample_linear1d_backward.default, True),
    ("bilinear", 2): (aten.upsample_bilinear2d_backward.default, True),
    ("bicubic", 2): (aten.upsample_bicubic2d_backward.default, True),
    ("trilinear", 3): (aten.upsample_trilinear3d_backward.default, True),
}
# An input that more outputs read along an axis is left to aten, because one thread would read them one by one.
MOST_READERS = 64
# A factor is a fraction with at most this denominator.  It is off by 1e-9 at most.
DENOMINATOR = 2**15


class LinearAxis(NamedTuple):
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

    def first(self, o: int) -> int:
        """The first input that output ``o`` reads."""
        return min(max(o * self.step + self.shift, 0) // self.den, self.small - 1)

    def inputs(self, start: int, stop: int) -> slice:
        """The inputs that the outputs from ``start`` to ``stop`` read."""
        return slice(self.first(start), min(self.first(stop - 1) + 2, self.small))

    def matrix(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The weight of each input for each output, (large, small)."""
        o, i = (torch.arange(n, device=device) for n in (self.large, self.small))
        s = (o * self.step + self.shift).clamp(0, (self.small - 1) * self.den)
        return (self.den - (s[:, None] - i * self.den).abs()).clamp(min=0).to(dtype) / self.den


def axis_of(small: int, large: int, factor: float | None, corners: bool) -> LinearAxis:
    """The axis as PyTorch defines it: a factor that the user gives counts only if corners are not aligned."""
    if corners and 1 in (small, large):
        step, shift, den = 1, 0, 1
    elif corners:
        step, shift, den = small - 1, 0, large - 1
    else:
        r = Fraction(small, large) if factor is None else Fraction(1 / factor).limit_denominator(DENOMINATOR)
        step, shift, den = 2 * r.numerator, r.numerator - r.denominator, 2 * r.denominator
    if small == large and (step, shift) == (den, 0):
        return LinearAxis(small, large)
    common = gcd(step, shift, den)
    step, shift, den = step // common, shift // common, den // common
    # With one input all outputs read it.  The readers of another input lie between its neighbours.
    readers = large if small == 1 else min(large, ceil(Fraction(2 * den, step)))
    return LinearAxis(small, large, step, shift, den, values=2, readers=max(2, readers))


class Linear(NamedTuple):
    """An interpolation to the spatial size ``size``."""

    size: tuple[int, ...]
    factors: tuple[float, ...] | None
    corners: bool

    def axes(self, small: Sequence[int]) -> tuple[LinearAxis, ...]:
        """The axes a, b and w of an interpolation from the spatial size ``small``."""
        return _axes(tuple(small), self)


@functools.lru_cache(1024)
def _axes(small: tuple[int, ...], linear: Linear) -> tuple[LinearAxis, ...]:
    factors = linear.factors or (None,) * len(small)
    found = [axis_of(*sizes, linear.corners) for sizes in zip(small, linear.size, factors, strict=True)]
    return (*(LinearAxis(1, 1) for _ in range(3 - len(small))), *found)


def serves(t: Tensor, small: Sequence[int], linear: Linear) -> bool:
    """Whether the kernels serve an interpolation of ``t``, or the gradient ``t`` of one."""
    dims = t.dim() - 2
    # A question about the symbolic sizes of a tensor without values would become a guard.
    if type(t) not in (Tensor, torch.nn.Parameter) and not _torch.is_listed(t):
        return False
    if t.numel() == 0 or min(*small, *linear.size) < 1:
        return False
    if dims not in MODES or len(linear.size) != dims or t.dtype not in ACTIVATION_DTYPES:
        return False
    if any(factor <= 0 for factor in linear.factors or ()):
        return False
    # This comes before the axes, which are cached: Dynamo traces this code for compiled autograd, and warns of a cache.
    if not _backend.use_triton(t, FAMILY):
        return False
    axes = linear.axes(small)
    # The offsets of positions, and of the values of a line, are 32 bits wide.
    widest = max(t.shape[1], t.stride(-1), 1)
    largest = max(max(prod(axis[k] for axis in axes), axes[2][k] * widest) for k in (0, 1))
    return largest < 2**31 and all(axis.fits for axis in axes)


def suggested(t: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without values in the memory format that PyTorch's kernels choose for ``t``."""
    return torch.empty(shape, dtype=t.dtype, device=t.device, memory_format=_torch.suggest_memory_format(t))


def _readable(t: Tensor, result: Tensor) -> tuple[Tensor, tuple[int, int] | None]:
    """``t`` in the format of the result, and the distances of positions in memory of both; None if contiguous."""
    if result.is_contiguous():
        return t.contiguous(), None
    pitch = pitch_of(t)
    if pitch is None:
        t, pitch = t.contiguous(memory_format=FORMATS[t.dim()]), t.shape[1]
    return t, (pitch, result.shape[1])


def _interpolated(t: Tensor, axes: Sequence[LinearAxis], transposed: bool) -> Tensor:
    """The interpolation of (N, C, a, b, w), or its transpose, by a product with the weights of each axis."""
    for dim, axis in enumerate(axes, 2):
        if axis.values > 1:
            weights = axis.matrix(t.dtype, t.device)
            t = torch.tensordot(t, weights, ([dim], [0 if transposed else 1])).movedim(-1, dim)
    return t


def _results(given: Tensor, found: Tensor, axes: tuple[LinearAxis, ...], transposed: bool) -> Iterator[Compared]:
    """Weights are not negative, so that the interpolation of absolute values bounds the sums."""
    readers = prod(axis.readers for axis in axes) if transposed else 2**3
    sizes = [axis.large if transposed else axis.small for axis in axes]
    for a, b in channel_ranges(max(given, found, key=Tensor.numel)):
        t = wide(given, a, b).view(len(given), b - a, *sizes)
        terms = _interpolated(t.abs(), axes, transposed)
        exact = Rounded(_interpolated(t, axes, transposed), (growth(readers) + 32 * U) * terms)
        yield exact.stored(found.dtype).near("dx" if transposed else "y", found[:, a:b])


@checked(
    FAMILY,
    lambda found, now, before: _results(before[0], found, before[1].axes(before[0].shape[2:]), transposed=False),
)
def linear_forward(x: Tensor, linear: Linear) -> Tensor:
    """The interpolation of ``x``, which the kernels serve (``serves``)."""
    from ..kernels.upsample import upsample_fwd

    y = suggested(x, (*x.shape[:2], *linear.size))
    axes = linear.axes(x.shape[2:])
    x, pitches = _readable(x, y)
    with _backend.launching(x):
        upsample_fwd(x, y, axes, pitches)
    return y


@checked(
    FAMILY,
    lambda found, now, before: _results(before[0], found, before[2].axes(before[1]), transposed=True),
)
def linear_backward(dy: Tensor, small: Sequence[int], linear: Linear) -> Tensor:
    """The gradient of a tensor of the spatial size ``small`` from ``dy``, which the kernels serve."""
    from ..kernels.upsample import upsample_bwd

    dx = suggested(dy, (*dy.shape[:2], *small))
    axes = linear.axes(small)
    dy, pitches = _readable(dy, dx)
    with _backend.launching(dy):
        upsample_bwd(dy, dx, axes, pitches)
    return dx


class LinearFunction(torch.autograd.Function):
    """A linear interpolation by the kernels in eager mode, or its transpose, which is its gradient."""

    @staticmethod
    def forward(ctx, t: Tensor, small: Sequence[int], linear: Linear, transposed: bool) -> Tensor:
        ctx.given = small, linear, not transposed
        ctx.set_materialize_grads(False)
        refuse_batches(OP, t)
        return linear_backward(t, small, linear) if transposed else linear_forward(t, linear)

    @staticmethod
    def backward(ctx, dt):
        return None if dt is None else LinearFunction.apply(dt, *ctx.given), None, None, None


def forward(x: Tensor, size: list[int] | None, factors: list[float] | None, mode: str, corners: bool | None) -> Tensor:
    linear = _linear(x, x.shape[2:], size, factors, mode, corners)
    return F.interpolate(x, size, factors, mode, corners) if linear is None else linear_forward(x, linear)


def backward(
    dy: Tensor,
    size: Sequence[int],
    small: Sequence[int],
    factors: Sequence[float] | None,
    mode: str,
    corners: bool | None,
) -> Tensor:
    """The gradient of a tensor of the shape ``small`` from ``dy``, the gradient of its enlargement to ``size``."""
    linear = _linear(dy, small[2:], size, factors, mode, corners)
    if linear is not None:
        return linear_backward(dy, small[2:], linear)
    kernel, takes_corners = BACKWARD[mode, len(size)]
    flags = (bool(corners),) if takes_corners else ()
    return kernel(dy, size, small, *flags, *([None] * len(size) if factors is None else factors))


def _linear(
    t: Tensor,
    small: Sequence[int],
    size: Sequence[int] | None,
    factors: Sequence[float] | None,
    mode: str,
    corners: bool | None,
) -> Linear | None:
    """The interpolation, if Triton kernels compute it for ``t``: its input, or the gradient of its result."""
    if mode != MODES.get(len(small)) or (t.is_cpu and torch.is_autocast_enabled("cpu")):
        # On a CPU autocast interpolates in fp32.
        return None
    large = _enlarged(small, size, factors)
    linear = Linear(tuple(large), None if factors is None else tuple(factors), bool(corners))
    return linear if serves(t, small, linear) else None


def is_served(device: torch.device, mode: str, dims: int) -> bool:
    """Whether Triton kernels compute such interpolations of most tensors on a device, as far as a graph tells."""
    return mode == MODES.get(dims) and _backend.takes_triton(device)


def eager(
    x: Tensor, size: Sequence[int] | None, factors: Sequence[float] | None, mode: str, corners: bool | None
) -> Tensor:
    """The interpolation with its gradient; a program that is traced gets the stock function."""
    if not torch.compiler.is_compiling() and not unfused.wanted() and not _torch.are_functorch_transforms_active():
        linear = _linear(x, x.shape[2:], size, factors, mode, corners)
        if linear is not None:
            return LinearFunction.apply(x, x.shape[2:], linear, False)
    return F.interpolate(x, size, factors, mode, corners)


def _enlarged(small: Sequence[int], size: Sequence[int] | None, factors: Sequence[float] | None) -> list[Any]:
    """The spatial size of the result, as aten computes it."""
    if size is not None:
        return list(size)
    assert factors is not None
    return [torch.sym_int(n * s) for n, s in zip(small, factors, strict=True)]


def _fake(x, size, factors, mode, corners):
    return suggested(x, [*x.shape[:2], *_enlarged(x.shape[2:], size, factors)])


def _setup_context(ctx, inputs, output) -> None:
    x, _, ctx.factors, ctx.mode, ctx.corners = inputs
    ctx.small, ctx.size = x.shape, output.shape[2:]


def _gradient(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = interpolate_backward_op(dy, ctx.size, ctx.small, ctx.factors, ctx.mode, ctx.corners)
    return dx, None, None, None, None


interpolate_op = graph_op(
    "interpolate(Tensor x, SymInt[]? size, float[]? factors, str mode, bool? corners) -> Tensor",
    forward,
    _fake,
    gradient=(_gradient, _setup_context),
    row={"reads": "interpolates", "layout": "keeps"},
    served=True,
)
interpolate_backward_op = graph_op(
    "interpolate_backward(Tensor dy, SymInt[] size, SymInt[] small, float[]? factors, str mode, bool? corners)"
    " -> Tensor",
    backward,
    fake=lambda dy, size, small, factors, mode, corners: suggested(dy, small),
    row={"reads": "interpolates", "cheap": False, "layout": "keeps"},
    served=True,
)


def parse(
    input: Tensor,  # noqa: A002
    size: Sizes = None,
    scale_factor: Factors = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Tensor, Any, list[float] | None, str, bool | None] | None:
    """The arguments of the op for a call of ``F.interpolate``; None if we know no backward of the call."""
    x, dims = input, input.dim() - 2
    if antialias or (mode, dims) not in BACKWARD or (size is None) == (scale_factor is None):
        return None
    deterministic = x.is_cpu or is_served(x.device, mode, dims)
    if not deterministic and torch.are_deterministic_algorithms_enabled():
        # The stock function chooses another form then.
        return None
    sizes = [size] * dims if isinstance(size, int | torch.SymInt) else size
    factors = [scale_factor] * dims if isinstance(scale_factor, int | float | torch.SymFloat) else scale_factor
    if any(isinstance(factor, torch.SymFloat) for factor in factors or ()):
        # The op takes numbers alone.
        return None
    if factors is not None and recompute_scale_factor:
        sizes, factors = _enlarged(x.shape[2:], None, factors), None
    return x, sizes, None if factors is None else [float(f) for f in factors], mode, align_corners


def interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` as the op where ``parse`` knows the call, otherwise as it is."""
    call = parse(*args, **kwargs)
    return F.interpolate(*args, **kwargs) if call is None else interpolate_op(*call)


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    for fmt, size, corners in (("contiguous", (32, 32), False), ("channels_last", (32, 32), False),
                               ("channels_last", (21, 35), True)):  # fmt: skip
        linear = Linear(size, None, corners)
        x = image(SHAPE, dtype, device, fmt, 0)
        dy = image((*SHAPE[:2], *size), dtype, device, fmt, 1)
        y, dx = linear_forward(x, linear), linear_backward(dy, SHAPE[2:], linear)
        of, tolerance = f"({fmt}, {size[0]}x{size[1]})", TOLERANCE[dtype]
        y64, dx64 = stock(partial(F.interpolate, size=size, mode="bilinear", align_corners=corners), x, dy=dy)
        yield Result(f"y {of}", y, y64, tolerance)
        yield Result(f"dx {of}", dx, dx64, tolerance)
