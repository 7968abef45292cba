"""A batch norm whose input is packed: its statistics, then the packing, which reads them, and then its output.

So the output can be written over the input (``reinplace.py``), which would otherwise live until it is packed.  It is
done where Triton kernels compute both; elsewhere the output would have other last bits.  For the codegen "aten".
"""

import operator

from torch import fx

from .. import _backend
from ..ops.low_bit.graph import round_op
from ..ops.norm import graph as norms
from .joint import arguments_of, calls_view, items_of, node_at, value_of


def rewrite(graph: fx.Graph) -> int:
    """Divides these norms of a forward graph, and returns their number."""
    found = [node for node in graph.nodes if node.target is norms.norm_act and _is_packed(node)]
    for node in found:
        _divide(graph, node)
    return len(found)


def _is_packed(node: fx.Node) -> bool:
    given, x = arguments_of(node), node_at(node, 0)
    while calls_view(x):
        x = node_at(x, 0)
    finds = given["own"] and given["kind"] == "batch" and given["mean"] is None
    packs = any(user.target is round_op._opoverload for user in x.users)
    return finds and packs and {0, 1, 2} <= set(items_of(node)) and _backend.takes_triton(value_of(x).device)


def _divide(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, residual, *running = node.args[:6]
    spec, items = node.args[8:], items_of(node)
    with graph.inserting_before(node):
        statistics = graph.call_function(norms.statistics, (x, *running, *spec))
        statistics.meta["val"] = value_of(node)
    for place in set(items) - {0}:
        items[place].args = (statistics, place)
    order = {one: place for place, one in enumerate(graph.nodes)}
    with graph.inserting_before(min(items[0].users, key=order.__getitem__)):
        given = (x, weight, bias, residual, None, None, items[1], items[2], *spec)
        again = graph.call_function(norms.norm_act, given)
        again.meta["val"] = value_of(node)
        z = graph.call_function(operator.getitem, (again, 0))
        z.meta = dict(items[0].meta)
    items[0].replace_all_uses_with(z)
    graph.erase_node(items[0])
    graph.erase_node(node)
