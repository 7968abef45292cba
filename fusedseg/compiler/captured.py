"""Changes of the graph that Dynamo captures, before AOTAutograd traces it into aten ops.

Here a call of a function is one node still.  With the codegen "aten", an interpolation becomes an op that the tracer
does not take apart (``ops/interpolate.py``), and a max-pool becomes the op of this package, which keeps a byte for each
result in place of int64 positions and of its input.  Norms are found here too (``norms.py``), for both codegens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ..ops.interpolate import interpolate
from ..ops.max_pool import op as pools
from . import convolve_first, dead_bias, enlarged, layouts, norms
from .joint import node_at
from .settings import Settings


def _max_pool(dims: int, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The stock pool ``stock``, computed by the op of this package where its result and its gradient are the same."""

    def max_pool(input: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor, Tensor]:  # noqa: A002
        trained = torch.is_grad_enabled() and input.requires_grad
        found = pools.of_stock(dims, input, args, kwargs) if trained else None
        if found is None:
            return stock(input, *args, **kwargs)
        x, pool = found
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
    """Writes the concatenation of a ``JoinConv`` into the graph, in place of a checkpoint of it.

    What is kept is decided by the backend.
    """
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


def rewrite(module: fx.GraphModule, settings: Settings) -> fx.GraphModule:
    """Rewrites a captured graph for the codegen of the settings."""
    fuses = settings.codegen == "inductor"
    # Before other passes replace the norms.
    dead_bias.rewrite(module, settings)
    if settings.memory_format is not None:
        layouts.rewrite(module, settings.memory_format)
    unfold(module)
    convolve_first.rewrite(module, everywhere=fuses)
    norms.rewrite(module.graph, norms.wanted_by(settings))
    if fuses:
        enlarged.rewrite(module)
        return module
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
    module.recompile()
    return module
