"""Backward of a convolution of a concatenation, source by source: the concatenation is not needed in backward.

A convolution is linear in its input channels.  So the gradient of each source, and its part of the weight's gradient,
come from the source and the matching slice of the weight.  Of two such convolutions, as in a residual block, the
gradients are added source by source.  Last bits may differ: some kernels add in another order for fewer channels.
"""

import operator
from typing import Any

import torch
from torch import fx

from .joint import call, is_tensor, items_of, name_of, value_of

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Splits every such backward, and returns their number."""
    found = [node for node in graph.nodes if _is_of_sources(node)]
    for node in reversed(list(graph.nodes)):
        if node.target is aten.add.Tensor and any(_call(term) in found for term in node.args):
            _add_slices(graph, node)
    for node in found:
        _split(graph, node)
    return len(found)


def _call(node: Any) -> Any:
    """The call of which a node picks the first result."""
    first = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0
    return node.args[0] if first else None


def _is_of_sources(node: fx.Node) -> bool:
    if name_of(node) != "convolution_backward":
        return False
    given: Any = node.args
    _, x, _, *geometry = given
    transposed, groups, mask = geometry[4], geometry[6], geometry[7]
    if name_of(x) != "cat" or transposed or groups != 1 or not all(mask[:2]):
        return False
    channels = (x.args[1] if len(x.args) > 1 else 0) % value_of(x).dim()
    return channels == 1 and len(set(x.args[0])) == len(x.args[0])


def _add_slices(graph: fx.Graph, node: fx.Node) -> None:
    """Adds slices, if slices alone are read of a sum."""
    terms: Any = node.args
    if node.kwargs or not all(map(is_tensor, terms)) or not all(map(_is_slice, node.users)):
        return
    if value_of(terms[0]).shape != value_of(terms[1]).shape:
        return
    for user in list(node.users):
        slices = [call(graph, aten.slice.Tensor, term, *user.args[1:], before=user) for term in terms]
        user.replace_all_uses_with(call(graph, aten.add.Tensor, *slices, before=user))
        graph.erase_node(user)
    graph.erase_node(node)


def _is_slice(node: fx.Node) -> bool:
    """Whether a node is a slice of the channels."""
    given: Any = node.args
    return name_of(node) == "slice" and given[1] == 1 and len(given) == 4


def _split(graph: fx.Graph, node: fx.Node) -> None:
    given: Any = node.args
    dy, x, weight, *geometry = given
    mask, sources = geometry[7], x.args[0]
    items = items_of(node)
    parts, begin = [], 0
    for place, source in enumerate(sources):
        width = value_of(source).shape[1]
        piece = call(graph, aten.slice.Tensor, weight, 1, begin, begin + width, before=node)
        flags = [True, True, bool(mask[2]) and place == 0]
        parts.append(call(graph, node.target, dy, source, piece, *geometry[:7], flags, before=node))
        begin += width

    def item(part: fx.Node, place: int) -> fx.Node:
        return call(graph, operator.getitem, part, place, before=node)

    if 0 in items:
        _give_slices(graph, items[0], [item(part, 0) for part in parts], sources, node)
    if 1 in items:
        whole = call(graph, aten.cat.default, [item(part, 1) for part in parts], 1, before=node)
        items[1].replace_all_uses_with(whole)
    if 2 in items:
        items[2].replace_all_uses_with(item(parts[0], 2))
    for old in (*items.values(), node):
        graph.erase_node(old)


def _give_slices(graph: fx.Graph, dx: fx.Node, parts: list[fx.Node], sources: Any, before: fx.Node) -> None:
    """The readers of a slice of the gradient of the concatenation get the gradient of the source."""
    bounds, begin = {}, 0
    for part, source in zip(parts, sources, strict=True):
        bounds[begin, begin + value_of(source).shape[1]] = part
        begin += value_of(source).shape[1]
    for user in filter(_is_slice, list(dx.users)):
        given: Any = user.args
        own = bounds.get((given[2], min(given[3], begin)))
        if own is not None:
            user.replace_all_uses_with(own)
            graph.erase_node(user)
    if dx.users:
        dx.replace_all_uses_with(call(graph, aten.cat.default, parts, 1, before=before))
