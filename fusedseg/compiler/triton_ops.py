"""Puts the calls of ``norm_calls.py`` in the place of chains of a graph, where the Triton ops serve its device.

The pass runs on forward and on backward after they have been divided, so what is kept is the same with and without it.
Norms without an activation stay PyTorch's.  Which device is served follows from the graph and from
``fusedseg.backend``.
"""

import operator
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..ops.low_bit.graph import round_op
from .chains import (
    GRADIENTS,
    OF_FORWARD,
    VIEWS,
    Chain,
    Gradient,
    Norm,
    activation_of,
    chain_of,
    content_of,
    gradient_of,
    statistics_of,
)
from .joint import arguments_of, is_op, items_of, name_of, node_at, value_of, writes
from .norm_calls import Backward, Forward, Rebuild, Statistics

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Puts the calls into a forward or backward graph, and returns how many."""
    place, statistics = {node: i for i, node in enumerate(graph.nodes)}, statistics_of(graph)
    count = 0
    for node in list(graph.nodes):
        found = gradient_of(node) if name_of(node) in GRADIENTS else None
        if found is not None and all(of is None or place[of] < place[found.slope] for of in found.sources):
            _write_gradient(graph, found)
            count += 1
    _sweep(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    count += sum(_forward(graph, node, statistics, place) for node in list(graph.nodes) if node.target in OF_FORWARD)
    _sweep(graph)
    return count


def _write_gradient(graph: fx.Graph, found: Gradient) -> None:
    """The gradients of a norm and of the activation after it become one call."""
    node, view, slope, chain = found[:4]
    given, norm = arguments_of(node), chain.norm
    affine = given["affine"] if "affine" in given else any(given["output_mask"][1:])
    run = Backward(norm.spec._replace(act=found.act, momentum=0.0), affine)
    with graph.inserting_before(slope):
        dz, residual = (_viewed(graph, t, chain) for t in (arguments_of(slope)["grad_output"], chain.residual))
        made = graph.call_function(run, (dz, norm.x, norm.weight, norm.bias, residual, found.mean, found.second))
        made.meta["val"] = (*value_of(node), None if residual is None else value_of(norm.x))
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(4)]
        for result, value in zip(results, made.meta["val"], strict=True):
            result.meta["val"] = value
        whole = _back(graph, results[3], chain)
        whole.meta["val"] = value_of(slope)
    for i, item in items_of(node).items():
        item.replace_all_uses_with(results[i])
        graph.erase_node(item)
    graph.erase_node(node)
    if view is not None and not view.users:
        graph.erase_node(view)
    slope.replace_all_uses_with(whole)


def _viewed(graph: fx.Graph, t: fx.Node | None, chain: Chain) -> fx.Node | None:
    """A tensor of the activation's shape in the shape of the norm's input."""
    if t is None or chain.view is None:
        return t
    made = graph.call_function(aten.reshape.default, (t, chain.norm.x.args[1]))
    made.meta["val"] = value_of(chain.norm.x)
    return made


def _back(graph: fx.Graph, t: fx.Node, chain: Chain) -> fx.Node:
    """A tensor of the shape of the norm's input in the shape of the activation."""
    return t if chain.view is None else graph.call_function(aten.view.default, (t, chain.view.args[1]))


def _forward(graph: fx.Graph, node: fx.Node, statistics: dict[Any, Any], place: dict[fx.Node, int]) -> bool:
    """A norm and the activation after it become one call."""
    act, chain = activation_of(node), chain_of(node.args[0])
    if act is None or chain is None or any(len(inner.users) != 1 for inner in chain.inner):
        return False
    norm = _with_statistics(chain.norm, statistics, place)
    parted = _is_packed(norm)
    if parted:
        norm = _parted(graph, norm)
    others = [item for i, item in items_of(norm.node).items() if i > 0]
    # The statistics of the norm may be read before the activation, whose residual is known by then or not.
    early = chain.residual is None or place[chain.residual] < place[norm.node]
    if not early and any(user.op != "output" for item in others for user in item.users):
        return False
    first, spec = norm.node if early and not parted else node, norm.spec._replace(act=act)
    with graph.inserting_before(first):
        residual = _viewed(graph, chain.residual, chain)
        moves = norm.node.target is not _torch.functional_batch_norm
        run = Rebuild(spec) if norm.rebuilt else Forward(spec, writes_running=moves)
        made = graph.call_function(run, (norm.x, norm.weight, norm.bias, residual, norm.mean, norm.second))
        made.meta["val"] = value_of(norm.node)
        z = made if norm.rebuilt else graph.call_function(operator.getitem, (made, 0))
        z.meta["val"] = value_of(norm.x)
        for item in others:
            moved = graph.call_function(operator.getitem, (made, item.args[1]))
            moved.meta = dict(item.meta)
            place[moved] = place[first]
            item.replace_all_uses_with(moved)
    with graph.inserting_before(node):
        whole = _back(graph, z, chain)
        whole.meta["val"] = value_of(node)
    place[whole] = place[node] if chain.view is not None else place[first]
    node.replace_all_uses_with(whole)
    for old in dict.fromkeys((node, *chain.inner, *others, norm.node)):
        graph.erase_node(old)
    return True


def _is_packed(norm: Norm) -> bool:
    """Whether the input of a batch norm is packed, so that the output may be written over it only then."""
    x = node_at(norm.x, 0) if name_of(norm.x) in VIEWS else norm.x
    packs = any(user.target is round_op._opoverload for user in x.users)
    own = norm.spec.own and norm.spec.kind == "batch" and not norm.rebuilt
    return packs and own and {1, 2} <= set(items_of(norm.node))


def _parted(graph: fx.Graph, norm: Norm) -> Norm:
    """The norm with its statistics computed by themselves, since the rounding of its input reads them."""
    moves = norm.node.target is not _torch.functional_batch_norm
    items = items_of(norm.node)
    with graph.inserting_before(norm.node):
        made = graph.call_function(Statistics(norm.spec, moves), (norm.x, norm.mean, norm.second))
        made.meta["val"] = value_of(norm.node)
    for i in set(items) - {0}:
        items[i].args = (made, i)
    return norm._replace(mean=items[1], second=items[2], rebuilt=True)


def _with_statistics(norm: Norm, statistics: dict[Any, Any], place: dict[fx.Node, int]) -> Norm:
    """A group norm that runs again in backward, with the statistics of forward."""
    known = statistics.get(content_of([norm.x, norm.weight])) if norm.spec.kind == "group" else None
    if known is None or set(items_of(norm.node)) != {0} or any(place[of] >= place[norm.node] for of in known):
        return norm
    return norm._replace(mean=known[0], second=known[1], rebuilt=True)


def _sweep(graph: fx.Graph) -> None:
    """Erases what nobody reads any more."""
    for node in reversed(list(graph.nodes)):
        pure = node.target is operator.getitem or (is_op(node) and not writes(node))
        if node.op == "call_function" and pure and not node.users:
            graph.erase_node(node)
