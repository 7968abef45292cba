"""Changes of the graph that Dynamo captures, before AOTAutograd traces it into aten ops.

Here a call of a function is one node still.  With the codegen "aten", an interpolation becomes an op that the tracer
does not take apart (``ops/interpolate.py``), and a max-pool becomes the op of this package, which keeps a byte for each
result in place of int64 positions and of its input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..ops.interpolate import interpolate
from ..ops.layout import layout_of, suggests_channels_last
from ..ops.max_pool import op as pools
from ..ops.norm import op as norms
from .joint import node_at

NAMES = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")


def _max_pool(dims: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock pool ``stock``, computed by the op of this package where its result and its gradient are the same."""

    def max_pool(input: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:  # noqa: A002
        named: dict[str, Any] = {**dict(zip(NAMES, args, strict=False)), **kwargs}
        x = input
        trained = torch.is_grad_enabled() and x.requires_grad
        if not trained or named.pop("return_indices", False) or x.dim() != dims + 2 or layout_of(x) is None:
            return stock(input, *args, **kwargs)
        try:
            pool = pools.parse_pool(
                "max_pool", dims, **{"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False} | named
            )
            pools.check("max_pool", x, pool)
        except (TypeError, ValueError):
            # A byte cannot number the positions of this window, or the stock function must raise its own error.
            return stock(input, *args, **kwargs)
        if not x.is_contiguous() and not suggests_channels_last(x):
            x = x.contiguous()
        if x.is_cpu and dims == 3 and x.dtype in pools.HALF and torch.is_autocast_enabled("cpu"):
            # Autocast does the same for the stock function on a CPU.
            x = x.float()
        return pools.max_pool_op(x, *pool, True)[0]

    return max_pool


POOLS = (2, F.max_pool2d), (3, F.max_pool3d), (2, torch.max_pool2d), (3, torch.max_pool3d)
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.interpolate: interpolate,
    **{stock: _max_pool(dims, stock) for dims, stock in POOLS},
}

JOINING = (F.interpolate, torch.cat)


def unfold(module: fx.GraphModule) -> None:
    """Writes modules of this package as stock functions: what they keep elsewhere is decided by the backend here.

    A norm that keeps its output has stock functions, and the concatenation of a ``JoinConv`` is in the graph itself, in
    place of a checkpoint of it.
    """
    for node in module.graph.nodes:
        if node.target is norms.norm_op._opoverload:
            node.target = norms.as_stock
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
        wrapped = module.get_submodule(str(node_at(node, 0).target))
        assert isinstance(wrapped, fx.GraphModule)
        body = wrapped.graph
        calls = [inner for inner in body.nodes if isinstance(inner.meta.get("example_value"), Tensor)]
        if any(inner.op == "call_function" and inner.target not in JOINING for inner in calls):
            continue
        env = dict(zip(body.find_nodes(op="placeholder"), node.args[1:], strict=True))
        with module.graph.inserting_before(node):
            results: Any = module.graph.graph_copy(body, env)
        for item in list(node.users):
            item.replace_all_uses_with(results[item.args[1]])
            module.graph.erase_node(item)
        module.graph.erase_node(node)
    module.recompile()


def rewrite(module: fx.GraphModule) -> fx.GraphModule:
    """Puts these functions into a captured graph, in place of the stock ones; for the codegen "aten" alone."""
    unfold(module)
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    module.recompile()
    return module
