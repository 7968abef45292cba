"""``F.interpolate``: by the Triton kernels of ``upsample.py`` where they serve a tensor, otherwise by PyTorch's.

For graphs it is one op.  PyTorch's tracer writes an interpolation as index and product ops, which round in another
order than the kernel.  This op stays one node.  Only the sizes are kept for backward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _backend, _torch
from . import unfused, upsample

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
    linear = _linear(x, x.shape[2:], size, factors, mode, corners)
    return F.interpolate(x, size, factors, mode, corners) if linear is None else upsample.forward(x, linear)


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
        return upsample.backward(dy, small[2:], linear)
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
) -> upsample.Linear | None:
    """The interpolation of ``t``, or of which ``t`` is a gradient, if the Triton kernels compute it; otherwise None."""
    if mode != upsample.MODES.get(len(small)) or (t.is_cpu and torch.is_autocast_enabled("cpu")):
        # On a CPU autocast interpolates in fp32.
        return None
    large = _enlarged(small, size, factors)
    linear = upsample.Linear(tuple(large), None if factors is None else tuple(factors), bool(corners))
    return linear if upsample.serves(t, small, linear) else None


def is_served(device: torch.device, mode: str, dims: int) -> bool:
    """Whether Triton kernels compute such interpolations of most tensors on a device, as far as a graph tells."""
    return mode == upsample.MODES.get(dims) and _backend.takes_triton(device)


def eager(
    x: Tensor, size: Sequence[int] | None, factors: Sequence[float] | None, mode: str, corners: bool | None
) -> Tensor:
    """The interpolation with its gradient; a program that is traced gets the stock function."""
    if not torch.compiler.is_compiling() and not unfused.wanted() and not _torch.are_functorch_transforms_active():
        linear = _linear(x, x.shape[2:], size, factors, mode, corners)
        if linear is not None:
            return upsample.UpsampleFunction.apply(x, linear)
    return F.interpolate(x, size, factors, mode, corners)


def _enlarged(small: Sequence[int], size: Sequence[int] | None, factors: Sequence[float] | None) -> list[Any]:
    """The spatial size of the result, as aten computes it."""
    if size is not None:
        return list(size)
    assert factors is not None
    return [torch.sym_int(n * s) for n, s in zip(small, factors, strict=True)]


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
    return upsample.suggested(x, [*x.shape[:2], *_enlarged(x.shape[2:], size, factors)])


@interpolate_backward_op.register_fake
def _(dy, size, small, factors, mode, corners):
    return upsample.suggested(dy, small)


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
    return Enlarging(x, sizes, None if factors is None else [float(f) for f in factors], mode, align_corners)


def interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` as the op where ``parse`` knows the call, otherwise as it is."""
    call = parse(*args, **kwargs)
    return F.interpolate(*args, **kwargs) if call is None else interpolate_op(*call)
