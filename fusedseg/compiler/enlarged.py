"""The interpolations of a graph for Inductor.

PyTorch's tracer writes an interpolation as index and product ops.  The gradient of these adds the values of a result
one by one, each by an atomic operation.  Here the gradient is one call.  Where the Triton kernels of this package serve
a linear interpolation, forward is one call too.
"""

from inspect import getcallargs
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.nn import functional as F

from .. import _torch
from ..ops import interpolate
from ..ops.check import HALF


class _Interpolation(torch.autograd.Function):
    """An interpolation that the compiler may take apart in forward, and whose gradient is one call."""

    @staticmethod
    def forward(
        ctx, x: Tensor, size: list[int] | None, factors: list[float] | None, mode: str, corners: bool | None
    ) -> Tensor:
        large = interpolate.forward(x, size, factors, mode, corners)
        ctx.how = list(large.shape[2:]), list(x.shape), factors, mode, corners
        return large

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return interpolate.backward(dy, *ctx.how), None, None, None, None


def _interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` with this gradient, where it is as exact as that of the compiler."""
    call = interpolate.parse(*args, **kwargs)
    if call is not None and _is_served(call):
        return interpolate.interpolate_op(*call)
    trained = call is not None and torch.is_grad_enabled() and call.x.requires_grad
    if call is None or not trained or _adds_in_half(call.x):
        return F.interpolate(*args, **kwargs)
    return _Interpolation.apply(*call)


def _is_served(call: interpolate.Enlarging) -> bool:
    x = call.x
    if not x.is_floating_point() or (x.is_cpu and torch.is_autocast_enabled("cpu")):
        return False
    return interpolate.is_served(x.device, call.mode, x.dim() - 2)


def _adds_in_half(x: Tensor) -> bool:
    """Whether PyTorch's interpolation of ``x`` adds in half precision."""
    return x.is_cpu and (x.dtype in HALF or torch.is_autocast_enabled("cpu"))


# Its arguments as types of an op: what may be one number or several is a list of numbers.
enlarge_op = _torch.composite_op(
    "fusedseg::enlarge",
    "(Tensor input, SymInt[]? size, float[]? scale_factor, str mode, bool? align_corners, "
    "bool? recompute_scale_factor, bool antialias) -> Tensor",
    _interpolate,
)


def _arguments_of(node: fx.Node) -> tuple[Argument, ...] | None:
    """The arguments of an interpolation of a captured graph as those of the op; None if it has no place for them."""
    given = getcallargs(F.interpolate, *node.args, **node.kwargs)
    value, size, factors = node.meta.get("example_value"), given["size"], given["scale_factor"]
    if not isinstance(value, Tensor) or isinstance(factors, fx.Node):
        return None
    dims = value.dim() - 2
    if isinstance(size, (int, fx.Node)):
        size = [size] * dims
    if factors is not None:
        factors = [factors] * dims if isinstance(factors, (int, float)) else list(factors)
        if not all(isinstance(factor, (int, float)) for factor in factors):
            return None
        factors = list(map(float, factors))
    flags = (given[name] for name in ("mode", "align_corners", "recompute_scale_factor", "antialias"))
    return given["input"], size, factors, *flags


def rewrite(module: fx.GraphModule) -> None:
    """Gives the interpolations in a graph of Dynamo these calls."""
    for node in module.graph.nodes:
        arguments = _arguments_of(node) if node.op == "call_function" and node.target is F.interpolate else None
        if arguments is not None:
            node.target, node.args, node.kwargs = enlarge_op, arguments, {}
    module.recompile()
