"""The interpolations of a graph for Inductor.

PyTorch's tracer writes an interpolation as index and product ops.  The gradient of these adds the values of a result
one by one, each by an atomic operation.  Here the gradient is one call.  Where the Triton kernels of this package serve
a linear interpolation, forward is one call too.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..ops import upsample
from ..ops.check import HALF


class _Interpolation(torch.autograd.Function):
    """An interpolation that the compiler may take apart in forward, and whose gradient is one call."""

    @staticmethod
    def forward(
        ctx, x: Tensor, size: list[int] | None, factors: list[float] | None, mode: str, corners: bool | None
    ) -> Tensor:
        large = upsample.forward(x, size, factors, mode, corners)
        ctx.how = list(large.shape[2:]), list(x.shape), factors, mode, corners
        return large

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        return upsample.backward(dy, *ctx.how), None, None, None, None


def _interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` with this gradient, where it is as exact as that of the compiler."""
    call = upsample.parse(*args, **kwargs)
    if call is not None and _is_served(call):
        return upsample.interpolate_op(*call)
    trained = call is not None and torch.is_grad_enabled() and call.x.requires_grad
    if call is None or not trained or _adds_in_half(call.x):
        return F.interpolate(*args, **kwargs)
    return _Interpolation.apply(*call)


def _is_served(call: upsample.Enlarging) -> bool:
    x = call.x
    if not x.is_floating_point() or (x.is_cpu and torch.is_autocast_enabled("cpu")):
        return False
    return upsample.is_served(x.device, call.mode, x.dim() - 2)


def _adds_in_half(x: Tensor) -> bool:
    """Whether PyTorch's interpolation of ``x`` adds in half precision."""
    return x.is_cpu and (x.dtype in HALF or torch.is_autocast_enabled("cpu"))


def rewrite(module: fx.GraphModule) -> None:
    """Gives the interpolations in a graph of Dynamo these calls."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is F.interpolate:
            node.target = _interpolate
    module.recompile()
