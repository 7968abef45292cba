"""Max-pools and interpolations of a captured graph.

With the codegen "aten", an interpolation becomes an op that the tracer does not take apart (``ops/upsample.py``),
and a max-pool becomes the op of this package, which keeps a byte for each result in place of int64 positions and of its
input.

For Inductor, PyTorch's tracer writes an interpolation as index and multiplication ops.  The gradient of these adds the
values of a result one by one, each by an atomic operation.  Here the gradient is one call.  Where the Triton kernels of
this package serve a linear interpolation, forward is one call too.
"""

from collections.abc import Callable
from inspect import getcallargs
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import Argument
from torch.nn import functional as F

from ... import _torch
from ...ops import upsample
from ...ops.check import HALF
from ...ops.max_pool import pool as pools
from ..graph import captured_value_of


class _Interpolation(torch.autograd.Function):
    """An interpolation that the compiler may take apart in forward, and whose gradient is one call."""

    @staticmethod
    def forward(ctx, x: Tensor, *how: Any) -> Tensor:
        large = upsample.forward(x, *how)
        ctx.how = list(large.shape[2:]), list(x.shape), *how[1:]
        return large

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        large, small, *_ = ctx.how
        # PyTorch traces the kernels of most modes with numbers alone.  The op takes symbols, and calls the kernel.
        numbers = all(isinstance(n, int) for n in (*large, *small))
        function: Any = upsample.backward if numbers else upsample.interpolate_backward_op
        return function(dy, *ctx.how), None, None, None, None


def _interpolate(*args: Any, **kwargs: Any) -> Tensor:
    """``F.interpolate`` for Inductor; its gradient is one call where that is as exact as the compiler's own."""
    call = upsample.parse(*args, **kwargs)
    if call is None:
        return F.interpolate(*args, **kwargs)
    x, _, _, mode, _ = call
    casts = x.is_cpu and torch.is_autocast_enabled("cpu")
    if x.is_floating_point() and not casts and upsample.is_served(x.device, mode, x.dim() - 2):
        return upsample.interpolate_op(*call)
    # PyTorch's interpolation on a CPU adds in half precision.
    if not (torch.is_grad_enabled() and x.requires_grad) or casts or (x.is_cpu and x.dtype in HALF):
        return F.interpolate(*args, **kwargs)
    return _Interpolation.apply(*call)


# Its arguments as types of an op: what may be one number or several is a list of numbers.
enlarge_op = _torch.composite_op(
    "fusedseg::enlarge",
    "(Tensor input, SymInt[]? size, float[]? scale_factor, str mode, bool? align_corners, "
    "bool? recompute_scale_factor, bool antialias) -> Tensor",
    _interpolate,
)


def _arguments_of(node: fx.Node) -> tuple[Argument, ...] | None:
    """The arguments of an interpolation of a captured graph as those of the op; None if it has no place for them."""
    stock: Any = F.interpolate
    given = getcallargs(stock, *node.args, **node.kwargs)
    value, size, factors = captured_value_of(node), given["size"], given["scale_factor"]
    if value is None or isinstance(factors, fx.Node):
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


def rewrite_for_inductor(module: fx.GraphModule) -> None:
    """Gives the interpolations in a graph of Dynamo one call as their gradient."""
    for node in module.graph.nodes:
        arguments = _arguments_of(node) if node.op == "call_function" and node.target is F.interpolate else None
        if arguments is not None:
            node.target, node.args, node.kwargs = enlarge_op, arguments, {}
    module.recompile()


def _max_pool(dims: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock pool ``stock``, computed by the op of this package where its result and its gradient are the same."""

    def max_pool(input: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:  # noqa: A002
        trained = torch.is_grad_enabled() and input.requires_grad
        served = trained and not _torch.depends_on_data(input)
        found = pools.of_stock(dims, input, args, kwargs) if served else None
        if found is None:
            return stock(input, *args, **kwargs)
        x, pool = found
        return pools.max_pool_op(pools.as_autocast(x), *pool, True)[0]

    return max_pool


POOLS = (2, F.max_pool2d), (3, F.max_pool3d), (2, torch.max_pool2d), (3, torch.max_pool3d)
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.interpolate: upsample.interpolate,
    **{stock: _max_pool(dims, stock) for dims, stock in POOLS},
}


def rewrite_for_aten(module: fx.GraphModule) -> None:
    """Gives the interpolations and max-pools in a graph of Dynamo the ops of this package."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    module.recompile()
