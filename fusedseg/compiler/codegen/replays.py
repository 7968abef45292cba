"""Ops of this package that launch again what they have launched before (``ops/replay.py``), for the codegen "aten".

Only ops whose launches depend on sizes and strides alone are replayed: their numbers are in the graph, or are the same
in each call.  Packing draws random numbers, and convolutions choose by time; both are called as they are.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import fx

from ... import _backend, _torch
from ...ops.norm import graph as norms
from ...ops.registry import DIRECT, REPLAYED
from ...ops.replay import Replay, direct_stream
from ..graph import has_symbols, is_tensor, value_of

# Stands for a tensor among constant arguments.
TENSOR = object()


def replay_launches(graph: fx.Graph) -> int:
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
    if node.kwargs or function not in REPLAYED:
        return None
    nodes = tuple(leaf for leaf in _torch.tree_leaves(node.args) if isinstance(leaf, fx.Node))
    constants = _torch.tree_map(lambda leaf: TENSOR if isinstance(leaf, fx.Node) else leaf, node.args)
    run = DIRECT[function]

    @functools.wraps(run)
    def of_tensors(*tensors: Any) -> Any:
        given = iter(tensors)
        return run(*_torch.tree_map(lambda leaf: next(given) if leaf is TENSOR else leaf, constants))

    return of_tensors, nodes


def _is_fixed(node: fx.Node) -> bool:
    """Whether all sizes and numbers of a call are known."""
    return all(is_tensor(source) and not has_symbols(value_of(source)) for source in node.all_input_nodes)
