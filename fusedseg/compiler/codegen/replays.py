"""Ops of this package that launch again what they have launched before (``ops/replay.py``), for the codegen "aten".

Only ops whose launches depend on sizes and strides alone are replayed: their numbers are in the graph, or are the same
in each call.  Packing draws random numbers, and convolutions choose by time; both are called as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ... import _backend
from ...ops import concat, upsample
from ...ops.max_pool import op as pools
from ...ops.norm import graph as norms
from ...ops.replay import Replay, direct_stream
from ..graph import has_symbols, is_tensor, value_of
from ..settings import optional

# The functions of ops that take tensors first, and then constants.
TENSORS_FIRST: dict[Any, Callable[..., Any]] = {
    torch.ops.fusedseg.interpolate.default: upsample.forward,
    torch.ops.fusedseg.interpolate_backward.default: upsample.backward,
    torch.ops.fusedseg.max_pool.default: pools.functional,
    torch.ops.fusedseg.max_pool_backward.default: pools.backward,
    concat.dense: concat.dense,
}


@optional("replays")
def rewrite(graph: fx.Graph) -> int:
    """Writes replays, and returns their number."""
    # A number on the CPU may come first among the arguments, such as the seed of a dropout.
    given_to = [node for node in graph.find_nodes(op="placeholder") if is_tensor(node)]
    first = next((node for node in given_to if _backend.takes_triton(value_of(node).device)), None)
    if first is None:
        return 0
    device = value_of(first).device
    found = [(node, call) for node in graph.nodes if (call := _call_of(node)) is not None and _is_fixed(node)]
    found = [(node, call) for node, call in found if value_of(call[1][0]).device == device]
    if not found:
        return 0
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        stream = graph.call_function(direct_stream, (device.index, first))
    for node, (function, given) in found:
        node.target = Replay(function, device)
        node.args = (stream, *given)
    return len(found)


def _call_of(node: fx.Node) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """The call of a node as a function of tensors alone, and the tensors; None for nodes that are not replayed."""
    function = node.target
    if isinstance(function, (norms.Forward, norms.Backward)):
        return function, node.args
    if node.kwargs:
        return None
    given: Any = node.args
    if function is torch.ops.aten.cat.default and len(given) == 2:
        sources, dim = given
        return _joining(dim, len(sources)), tuple(sources)
    if function is torch.ops.fusedseg.concat_biased.default:
        sources, biases = given
        return _joining(1, len(sources)), (*sources, *biases)
    if function in TENSORS_FIRST:
        count = sum(isinstance(arg, fx.Node) for arg in node.args)
        return _bound(TENSORS_FIRST[function], node.args[count:]), node.args[:count]
    return None


def _joining(dim: int, sources: int) -> Callable[..., Any]:
    """A concatenation of the first ``sources`` tensors, with the others as their biases, if there are any."""

    def joined(*tensors: Any) -> Any:
        return concat.concat(tensors[:sources], dim, tensors[sources:])

    return joined


def _bound(function: Callable[..., Any], constants: tuple[Any, ...]) -> Callable[..., Any]:
    def bound(*tensors: Any) -> Any:
        return function(*tensors, *constants)

    bound.__name__ = function.__name__
    return bound


def _is_fixed(node: fx.Node) -> bool:
    """Whether all sizes and numbers of a call are known."""
    return all(is_tensor(source) and not has_symbols(value_of(source)) for source in node.all_input_nodes)
