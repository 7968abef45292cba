"""The gradient of an interpolation, and of a 1x1 convolution of an interpolated tensor; for Inductor alone.

PyTorch's tracer writes an interpolation as index and product ops.  The gradient of these adds the values of a result
one by one, each by an atomic operation.  Here the gradient is the kernel of eager mode.

A 1x1 convolution W and an interpolation U commute, because the weights of an interpolation sum to one:

    y = W U x + b:    g = U^T dy,  dx = W^T g,  dW = g x^T,  db = sum(g)

So backward neither interpolates x again nor convolves at the large size.  Last bits differ, which the codegen "aten"
does not allow.  Forward stays as it is.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..ops import interpolate

# The arguments of a convolution after its bias, and their values where it looks at one position.
UNIT: dict[str, object] = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
NAMES = tuple(UNIT)
HALF = (torch.float16, torch.bfloat16)


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
    trained = call is not None and torch.is_grad_enabled() and call.x.requires_grad
    if call is None or not trained or _adds_in_half(call.x):
        return F.interpolate(*args, **kwargs)
    return _Interpolation.apply(*call)


def _adds_in_half(x: Tensor) -> bool:
    """Whether PyTorch's interpolation of ``x`` adds in half precision."""
    return x.is_cpu and (x.dtype in HALF or torch.is_autocast_enabled("cpu"))


class _Convolution(torch.autograd.Function):
    """The 1x1 convolution of ``large``, which is the small ``x``, interpolated; ``large`` gets no gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, large: Tensor, weight: Tensor, bias: Tensor | None, how: tuple) -> Tensor:
        # A network may write over x later.  The copy is not made: ``simplify`` drops it.
        ctx.save_for_backward(x.clone(), weight)
        ctx.how = how
        return torch.convolution(large, weight, bias, *_pointwise(x.dim() - 2))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        factors, mode, corners = ctx.how
        small = [x.shape[0], dy.shape[1], *x.shape[2:]]
        g = interpolate.backward(dy, list(dy.shape[2:]), small, factors, mode, corners)
        needs = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        geometry = _pointwise(x.dim() - 2)
        dx, dw, db = torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[0]], *geometry, needs)
        return dx, None, dw, db, None


def _pointwise(dims: int) -> tuple[Any, ...]:
    return [1] * dims, [0] * dims, [1] * dims, False, [0] * dims, 1


def _convolve(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock convolution ``stock`` of a tensor that ``F.interpolate`` has made, with the short way of backward."""

    def convolve(
        made: tuple[tuple, dict[str, Any]],
        input: Tensor,  # noqa: A002
        weight: Tensor,
        bias: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        call = interpolate.parse(*made[0], **made[1])
        named = dict(zip(NAMES, args, strict=False)) | kwargs
        if call is None or not _is_shorter(call.x, input, weight, named):
            return stock(input, weight, bias, *args, **kwargs)
        tensors = [call.x, input.detach(), weight, bias]
        device = call.x.device.type
        if torch.is_autocast_enabled(device):
            # The stock function does the same.
            tensors = [None if t is None else t.to(torch.get_autocast_dtype(device)) for t in tensors]
        return _Convolution.apply(*tensors, (call.factors, call.mode, call.corners))

    return convolve


def _is_shorter(x: Tensor, large: Tensor, weight: Tensor, named: dict[str, object]) -> bool:
    if not torch.is_grad_enabled() or not x.requires_grad or x.dim() != weight.dim():
        return False
    if _adds_in_half(x):
        return False
    if any(not isinstance(n, int) for n in (*x.shape, *large.shape)) or x.shape[2:].numel() >= large.shape[2:].numel():
        # A question about symbolic sizes would become a guard.
        return False
    if any(value not in (UNIT[name], (UNIT[name],) * (x.dim() - 2)) for name, value in named.items()):
        return False
    # The transposed interpolation is applied to the channels of dy in place of those of x.
    return weight.shape[2:].numel() == 1 and weight.shape[1] == x.shape[1] and weight.shape[0] <= weight.shape[1]


FUNCTIONS = {stock: _convolve(stock) for stock in (torch.conv1d, torch.conv2d, torch.conv3d)}


def rewrite(module: fx.GraphModule) -> int:
    """Gives the interpolations and these convolutions in a graph of Dynamo their short backward.

    Returns the number of convolutions that may take it.
    """
    count = 0
    calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr")]
    # Nothing runs between both, which could write over the small tensor.
    for made, node in pairwise(calls):
        if made.target is F.interpolate and node.target in FUNCTIONS and node.args and node.args[0] is made:
            node.args = ((made.args, made.kwargs), *node.args)
            node.target = FUNCTIONS[node.target]
            count += 1
    for node in calls:
        if node.target is F.interpolate:
            node.target = _interpolate
    module.recompile()
    return count
