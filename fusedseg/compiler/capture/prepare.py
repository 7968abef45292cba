"""The passes over a captured graph, before AOTAutograd traces it into aten ops: a call of a function is one node."""

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ... import _torch
from .. import passes
from ..graph import captured_value_of, node_at
from ..settings import Settings
from . import stock_norms

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


def prepare(module: fx.GraphModule, settings: Settings, for_gpu: bool = False) -> fx.GraphModule:
    """Prepares a captured graph for the codegen of the settings.

    for_gpu: whether its norms are those of a GPU on every device, because its bytes are only counted.
    """
    values = [value for node in module.graph.nodes if (value := captured_value_of(node)) is not None]
    if any(map(_torch.is_functorch_wrapped_tensor, values)):
        # A transform of torch.func differentiates or maps each call.  The ops that are put in here are no part of that.
        return module
    passes.run(passes.Stage.CAPTURE, passes.CAPTURED, module, settings, norms=stock_norms.wanted_by(settings, for_gpu))
    return module
