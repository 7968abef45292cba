"""Backward of a convolution of a concatenation, source by source: the concatenation is not needed in backward.

A convolution is linear in its input channels.  So the gradient of each source, and its part of the weight's gradient,
come from the source and the matching slice of the weight.  Sums over output channels keep their order; each part of the
weight's gradient is the same sum as before.
"""

import operator
from typing import Any

import torch
from torch import fx

from .joint import call, items_of, name_of, value_of

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Splits every such backward, and returns their number."""
    return sum(_split(graph, node) for node in list(graph.nodes) if name_of(node) == "convolution_backward")


def _split(graph: fx.Graph, node: fx.Node) -> bool:
    given: Any = node.args
    dy, x, weight, *geometry = given
    transposed, groups, mask = geometry[4], geometry[6], geometry[7]
    if name_of(x) != "cat" or transposed or groups != 1 or not all(mask[:2]):
        return False
    channels = (x.args[1] if len(x.args) > 1 else 0) % value_of(x).dim()
    sources: Any = x.args[0]
    if channels != 1 or len(set(sources)) < len(sources):
        return False
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
    return True


def _give_slices(graph: fx.Graph, dx: fx.Node, parts: list[fx.Node], sources: Any, before: fx.Node) -> None:
    """The readers of a slice of the gradient of the concatenation get the gradient of the source."""
    bounds, begin = {}, 0
    for part, source in zip(parts, sources, strict=True):
        bounds[begin, begin + value_of(source).shape[1]] = part
        begin += value_of(source).shape[1]
    for user in list(dx.users):
        given: Any = user.args
        if name_of(user) != "slice" or given[1] != 1 or len(given) > 4:
            continue
        own = bounds.get((given[2], min(given[3], begin)))
        if own is not None:
            user.replace_all_uses_with(own)
            graph.erase_node(user)
    if dx.users:
        dx.replace_all_uses_with(call(graph, aten.cat.default, parts, 1, before=before))
