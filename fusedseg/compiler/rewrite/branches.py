"""Ops with branches as pointwise chains of simpler ones: comparisons, choices and linear ops.

Forward answers the comparisons.  A chain is the compiler's own decomposition, or the ``pieces`` of the op's row in
``op_table.py``.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ... import _torch
from ..graph import calls_view, is_op, is_tensor, items_of, op_of, row_of, splice, value_of
from ..op_table import OF_OP, SLOPE


def _is_elementwise(node: fx.Node) -> bool:
    return is_op(node) and (torch.Tag.pointwise in op_of(node).tags or calls_view(node) or not node.all_input_nodes)


def whole_activations() -> dict[Any, Any]:
    """Inductor's table of decompositions without those of activations that may read packed values."""
    whole = {f"aten.{name}.default" for name, row in OF_OP.items() if row.reads == SLOPE}
    return {op: function for op, function in _torch.compiler_parts().decompositions().items() if str(op) not in whole}


def write_activations(graph: fx.Graph) -> None:
    """Writes such activations as Inductor would have."""
    for node in [node for node in graph.nodes if row_of(node).reads == SLOPE]:
        write_pointwise_chain(graph, node, _torch.compiler_parts().decompositions().get(node.target))


def pointwise_chain_of(graph: fx.Graph, node: fx.Node, function: Any = None) -> list[fx.Node] | None:
    """The results of a node computed by a pointwise chain of simpler nodes right before it; None if none is known."""
    function = function or row_of(node).pieces or _torch.decomposition(node.target)
    sources = node.all_input_nodes
    values = [value_of(source) for source in sources]
    mode = next((v.fake_mode for v in values if isinstance(v, _torch.FakeTensor)), None)
    if function is None or mode is None or not all(isinstance(v, Tensor) for v in values):
        return None

    def run(*tensors: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), dict(zip(sources, tensors, strict=True)).__getitem__)
        return function(*args, **kwargs)

    # Inductor has no code for what it decomposes.
    table = _torch.compiler_parts().decompositions()
    with mode, _torch.python_dispatcher():
        traced = make_fx(run, table, tracing_mode="real")(*values)
    if not all(inner.op in ("placeholder", "output") or _is_elementwise(inner) for inner in traced.graph.nodes):
        return None
    return splice(graph, traced.graph, sources, node)


def write_pointwise_chain(graph: fx.Graph, node: fx.Node, function: Any = None) -> bool:
    """Writes an op as a pointwise chain, if there is one; forward can answer the predicates of that of backward."""
    chain = pointwise_chain_of(graph, node, function)
    if chain is None:
        return False
    if len(chain) == 1 and is_tensor(node):
        node.replace_all_uses_with(chain[0])
    else:
        for place, item in items_of(node).items():
            item.replace_all_uses_with(chain[place])
            graph.erase_node(item)
    graph.erase_node(node)
    return True
