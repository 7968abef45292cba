"""Norms in the code of "aten": their running statistics, and those whose input is packed.

Running statistics are written where they are, in place of a copy that is copied back.

A batch norm whose input is packed is divided into its statistics, the packing, which reads them, and its output.  So
the output can be written over the input (``in_place.py``), which would otherwise live until it is packed.  It is done
where Triton kernels compute both; elsewhere the output would have other last bits.
"""

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ... import _backend, _torch
from ...ops.conv import norm_conv
from ...ops.low_bit.graph import round_op
from ...ops.norm import graph as norms
from ..graph import calls_view, has_same_form, items_of, node_at, outputs_of, roots_of, value_of
from ..rewrite.fused_convolutions import take_statistics

aten = torch.ops.aten
# Norms that return their running statistics, moved, as the results 3 and 4: the place of the first among the arguments,
# and the form that moves them where they are.
MOVING: dict[Any, tuple[int, Any]] = {
    _torch.functional_batch_norm: (3, _torch.writing_batch_norm),
    norms.statistics: (1, norms.statistics_moving),
    norm_conv.norm_conv_op: (norm_conv.RUNNING_MEAN, norm_conv.norm_conv_moving),
}


def _moving(node: fx.Node) -> tuple[Any, Any, Any] | None:
    """The running mean and variance of a node that calls a norm, and the form that moves them; None for other nodes."""
    function = node.target
    if isinstance(function, norms.Forward):
        norm = norms.NormCall.of(node)
        assert norm is not None
        return norm.running_mean, norm.running_var, replace(function, moving=True)
    if function not in MOVING:
        return None
    first, form = MOVING[function]
    return node.args[first], node.args[first + 1], form


def write_statistics(graph: fx.Graph) -> int:
    """Norms move their running statistics where they are, and counters are increased there."""
    taken = _take_apart(graph)
    outputs = {node for node in outputs_of(graph) if isinstance(node, fx.Node)}
    copies = {node.args[0]: node for node in graph.nodes if node.target is aten.copy_.default}
    count = 0
    for node in list(graph.nodes):
        moving = _moving(node)
        if moving is not None:
            count += _norm(graph, node, moving, copies, outputs)
        elif node.target is aten.add.Tensor and node.args[0] in copies:
            buffer = node.args[0]
            copy = copies[buffer]
            alone = set(node.users) == {copy} and not node.kwargs and set(buffer.users) == {node, copy}
            value, more = value_of(buffer), value_of(node)
            scalars = isinstance(value, Tensor) and value.dim() == more.dim() == 0 and value.dtype == more.dtype
            if alone and buffer.op == "placeholder" and scalars:
                graph.erase_node(copy)
                node.target = aten.add_.Tensor
                count += 1
    for buffer, added in taken:
        with graph.inserting_before(graph.output_node()):
            late = graph.call_function(aten.add_.Tensor, (buffer, *added.args[1:]), dict(added.kwargs))
        late.meta["val"] = value_of(buffer)
        graph.erase_node(added)
    return count


def _take_apart(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """What ``capture/dead_bias.py`` adds to a new running mean is to be added where the mean is, after all else.

    The norm's own new mean is copied to the buffer in place of the sum.  Returns the buffers and the sums, which nobody
    reads any more.
    """
    copies, roots, taken = graph.find_nodes(op="call_function", target=aten.copy_.default), roots_of(graph), []
    changed = {copy.args[0] for copy in copies}
    for copy in copies:
        buffer, added = copy.args
        if not isinstance(added, fx.Node) or added.target is not aten.add.Tensor or set(added.users) != {copy}:
            continue
        new, more = added.args
        if not isinstance(new, fx.Node) or new.target is not operator.getitem or set(new.users) != {added}:
            continue
        # At the end of the graph another buffer may have its next value already.
        still = isinstance(more, fx.Node) and roots[more] not in changed
        if still and all(has_same_form(value_of(t), value_of(buffer)) for t in (new, added)):
            copy.update_arg(1, new)
            added.update_arg(0, more)
            taken.append((buffer, added))
    return taken


def _norm(
    graph: fx.Graph, node: fx.Node, moving: tuple[Any, Any, Any], copies: dict[Any, fx.Node], outputs: set[fx.Node]
) -> bool:
    """The norm itself writes its running statistics, if their new values are copied there and not read otherwise."""
    items, (mean, var, form) = items_of(node), moving
    pairs = [(mean, 3), (var, 4)]
    for buffer, place in pairs:
        new, copy = items.get(place), copies.get(buffer)
        if new is None or copy is None or copy.args[1] is not new or set(new.users) != {copy} or new in outputs:
            return False
        if buffer.op != "placeholder" or set(buffer.users) != {node, copy}:
            return False
    for buffer, place in pairs:
        graph.erase_node(copies[buffer])
        graph.erase_node(items[place])
    node.target = form
    return True


def divide(graph: fx.Graph) -> int:
    """Divides these norms of a forward graph, and returns their number."""
    found = [(node, norm) for node in graph.nodes if (norm := norms.NormCall.of(node)) and _is_packed(node, norm)]
    for node, norm in found:
        _divide(graph, node, norm)
    return len(found)


def _is_packed(node: fx.Node, norm: norms.NormCall) -> bool:
    x = norm.x
    while calls_view(x):
        x = node_at(x, 0)
    finds = norm.norm.own and not norm.of_samples and norm.mean is None
    packs = any(user.target is round_op for user in x.users)
    return finds and packs and {0, 1, 2} <= set(items_of(node)) and _backend.takes_triton(value_of(x).device)


def _divide(graph: fx.Graph, node: fx.Node, norm: norms.NormCall) -> None:
    with graph.inserting_before(node):
        given = (norm.x, norm.running_mean, norm.running_var, *norms.flat(norm.norm))
        statistics = graph.call_function(norms.statistics, given)
    statistics.meta["val"] = value_of(node)
    take_statistics(graph, statistics, node, norm)
