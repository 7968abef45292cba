"""``F.interpolate`` as one op, for graphs that are run by aten kernels.

PyTorch's tracer writes an interpolation as index and product ops, which round in another order than the kernel.  This
op stays one node, and both directions run the kernels of eager mode.  A backend that generates code of its own leaves
``F.interpolate`` as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch

aten = torch.ops.aten
Sizes = int | Sequence[int] | None
Factors = float | Sequence[float] | None
# The arguments of the op after x.
How = tuple[list[int] | None, list[float] | None, str, bool | None]
# (mode, spatial dimensions) -> the kernel of backward, and whether it takes ``align_corners``.
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


def forward(x: Tensor, size: list[int] | None, factors: list[float] | None, mode: str, corners: bool | None) -> Tensor:
    return F.interpolate(x, size, factors, mode, corners)


def backward(
    dy: Tensor,
    size: Sequence[int],
    small: Sequence[int],
    factors: Sequence[float] | None,
    mode: str,
    corners: bool | None,
) -> Tensor:
    """The gradient of a tensor of the shape ``small`` from ``dy``, the gradient of its enlargement to ``size``."""
    kernel, takes_corners = BACKWARD[mode, len(size)]
    flags = (bool(corners),) if takes_corners else ()
    return kernel(dy, size, small, *flags, *([None] * len(size) if factors is None else factors))


def _like(t: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor without values in the memory format that the kernels choose for ``t``."""
    return torch.empty(shape, dtype=t.dtype, device=t.device, memory_format=_torch.suggest_memory_format(t))


def _enlarged(x: Tensor, size: Sequence[int] | None, factors: Sequence[float] | None) -> list[Any]:
    """The spatial size of the result, as aten computes it."""
    if size is not None:
        return list(size)
    assert factors is not None
    return [torch.sym_int(n * s) for n, s in zip(x.shape[2:], factors, strict=True)]


_ARGUMENTS = "SymInt[]? size, float[]? factors, str mode, bool? corners"
interpolate_op = torch.library.custom_op(
    "fusedseg::interpolate", forward, mutates_args=(), schema=f"(Tensor x, {_ARGUMENTS}) -> Tensor"
)
interpolate_backward_op = torch.library.custom_op(
    "fusedseg::interpolate_backward",
    backward,
    mutates_args=(),
    schema="(Tensor dy, SymInt[] size, SymInt[] small, float[]? factors, str mode, bool? corners) -> Tensor",
)


@interpolate_op.register_fake
def _(x, size, factors, mode, corners):
    return _like(x, [*x.shape[:2], *_enlarged(x, size, factors)])


@interpolate_backward_op.register_fake
def _(dy, size, small, factors, mode, corners):
    return _like(dy, small)


def _setup_context(ctx, inputs, output) -> None:
    x, _, ctx.factors, ctx.mode, ctx.corners = inputs
    ctx.small, ctx.size = x.shape, output.shape[2:]


def _gradient(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
    dx = interpolate_backward_op(dy, ctx.size, ctx.small, ctx.factors, ctx.mode, ctx.corners)
    return dx, None, None, None, None


interpolate_op.register_autograd(_gradient, setup_context=_setup_context)


class Enlarging(NamedTuple):
    """The arguments of the op."""

    x: Tensor
    size: object
    factors: list[float] | None
    mode: str
    corners: bool | None


def parse(
    input: Tensor,  # noqa: A002
    size: Sizes = None,
    scale_factor: Factors = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Enlarging | None:
    """The arguments of ``F.interpolate`` as those of the op; None where its kernels have no backward that we know."""
    x, dims = input, input.dim() - 2
    if antialias or (mode, dims) not in BACKWARD or (size is None) == (scale_factor is None):
        return None
    if not x.is_cpu and torch.are_deterministic_algorithms_enabled():
        # The stock function chooses another form then.
        return None
    sizes = [size] * dims if isinstance(size, int | torch.SymInt) else size
    factors = [scale_factor] * dims if isinstance(scale_factor, int | float | torch.SymFloat) else scale_factor
    if any(isinstance(factor, torch.SymFloat) for factor in factors or ()):
        # The op takes numbers alone.
        return None
    if factors is not None and recompute_scale_factor:
        sizes, factors = _enlarged(x, None, factors), None
    return Enlarging(x, sizes, None if factors is None else [float(f) for f in factors], mode, align_corners)


def interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` as the op where ``parse`` knows the call, otherwise as it is."""
    call = parse(*args, **kwargs)
    return F.interpolate(*args, **kwargs) if call is None else interpolate_op(*call)
