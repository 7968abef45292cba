"""Backward of a convolution of a concatenation or of an enlarged map, piece by piece; where last bits may differ.

A convolution is linear in its input channels, so with W = [Wa, Wb]

    conv([a, b], W) = conv(a, Wa) + conv(b, Wb):    da and dWa need a alone, db and dWb need b alone

Backward needs no concatenation, and its gradient is never formed: each source gets its own.  Of two such
convolutions, as in a residual block, the gradients are added source by source.  Last bits may differ: some kernels add
in another order for fewer channels.

A source that is an interpolation is divided further if it is large: a range of channels is enlarged, and its gradient
is brought back to the small size before the next range.
"""

import operator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx

from ...ops.conv.convolutions import SLAB_BYTES
from ...ops.upsample import interpolate_backward_op, interpolate_op
from ..graph import call, is_tensor, items_of, name_of, nbytes_of, node_at, nodes_at, number_of, op_of, value_of
from .late_bias import joins_channels

aten = torch.ops.aten
# An enlarged map is divided into at most this many ranges of channels.
MOST_RANGES = 4


def split_backward(graph: fx.Graph) -> int:
    """Splits every such backward, and returns their number."""
    found = [node for node in graph.nodes if name_of(node) == "convolution_backward"]
    joined = {node for node in found if name_of(node.args[1]) == "cat" and _is_plain(node)}
    for node in reversed(list(graph.nodes)):
        if node.target is aten.add.Tensor and any(_call(term) in joined for term in node.args):
            _add_slices(graph, node)
    return sum(_split(graph, node) for node in found if _is_plain(node))


def _is_plain(node: fx.Node) -> bool:
    """Whether a convolution is neither transposed nor in groups, and gives both gradients."""
    given: tuple = node.args
    transposed, groups, mask = given[7], given[9], given[10]
    return not transposed and groups == 1 and all(mask[:2])


def _call(node: fx.Node) -> Any:
    """The call of which a node picks the first result."""
    first = isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == 0
    return node.args[0] if first else None


def _add_slices(graph: fx.Graph, node: fx.Node) -> None:
    """Adds slices, if slices alone are read of a sum."""
    if node.kwargs or not all(map(is_tensor, node.args)) or not all(map(_is_slice, node.users)):
        return
    terms = node_at(node, 0), node_at(node, 1)
    if value_of(terms[0]).shape != value_of(terms[1]).shape:
        return
    for user in list(node.users):
        slices = [call(graph, aten.slice.Tensor, term, *user.args[1:], before=user) for term in terms]
        user.replace_all_uses_with(call(graph, aten.add.Tensor, *slices, before=user))
        graph.erase_node(user)
    graph.erase_node(node)


def _is_slice(node: fx.Node) -> bool:
    """Whether a node is a slice of the channels."""
    return name_of(node) == "slice" and node.args[1:2] == (1,) and len(node.args) == 4


class ConvolutionSource(NamedTuple):
    """An input of a convolution, or one of those that are concatenated to it.

    begin: its first channel.
    width: the number of its channels.
    gradient: the node of its gradient, if one node alone picks it.
    ranges: the ranges of channels, from 0, in which it is enlarged; none if it is not divided further.
    """

    node: fx.Node
    begin: int
    width: int
    gradient: fx.Node | None
    ranges: list[tuple[int, int]]


def _ranges(source: fx.Node, width: int, gradient: fx.Node | None) -> list[tuple[int, int]]:
    """The ranges of a source that is enlarged right before, and whose gradient goes to the small size."""
    readers = [] if gradient is None else [user.target for user in gradient.users]
    if source.target is not interpolate_op or readers != [interpolate_backward_op]:
        return []
    count = min(MOST_RANGES, nbytes_of(source) // SLAB_BYTES)
    step = -(-width // max(count, 1))
    return [(k, min(k + step, width)) for k in range(0, width, step)] if count > 1 else []


def _sources(x: fx.Node, dx: fx.Node | None) -> list[ConvolutionSource]:
    """The sources of a convolution of ``x`` whose gradient is ``dx``; none if their channels are not known."""
    if name_of(x) != "cat":
        width = number_of(value_of(x).shape[1])
        return [] if width is None else [ConvolutionSource(x, 0, width, dx, _ranges(x, width, dx))]
    nodes = nodes_at(x, 0)
    if any(value_of(node).dim() != value_of(x).dim() for node in nodes):
        # A concatenation takes an empty vector too, with which a loop may begin.
        return []
    widths = [width for node in nodes if (width := number_of(value_of(node).shape[1])) is not None]
    if not joins_channels(x) or len(widths) < len(nodes) or len(set(nodes)) < len(nodes):
        return []
    if any(value_of(node).dtype != value_of(x).dtype for node in nodes):
        # A concatenation casts its sources to one dtype; a convolution of a mask alone has no kernel.
        return []
    ends = list(accumulate(widths))
    slices = {} if dx is None else _slices_of_channels(dx, ends[-1])
    gradients = [slices.get((end - width, end)) for width, end in zip(widths, ends, strict=True)]
    # Where somebody reads the gradient of the concatenation otherwise, no source is divided further.
    divisible = dx is not None and set(dx.users) == {gradient for gradient in gradients if gradient is not None}
    return [
        ConvolutionSource(node, end - width, width, gradient, _ranges(node, width, gradient) if divisible else [])
        for node, width, end, gradient in zip(nodes, widths, ends, gradients, strict=True)
    ]


def _slices_of_channels(dx: fx.Node, width: int) -> dict[tuple[int, int], fx.Node | None]:
    """The readers of ``dx`` that slice its channels, by first and last channel; None where two have the same ones."""
    found: dict[tuple[int, int], fx.Node | None] = {}
    for user in dx.users:
        given: tuple = user.args
        if name_of(user) != "slice" or given[1] != 1 or len(given) > 4:
            continue
        first, last = map(number_of, given[2:])
        if first is not None and last is not None:
            channels = first, min(last, width)
            found[channels] = None if channels in found else user
    return found


def _split(graph: fx.Graph, node: fx.Node) -> bool:
    given: tuple = node.args
    dy, x, weight, *geometry = given
    mask, items = geometry[7], items_of(node)
    sources = _sources(x, items.get(0))
    if len(sources) < 2 and not any(source.ranges for source in sources):
        return False
    # The calls with their first channels, and for each source its gradient, or those of its ranges at the small size.
    calls: list[tuple[int, fx.Node]] = []
    gradients: dict[fx.Node, list[fx.Node]] = {}

    def item(part: fx.Node, place: int) -> fx.Node:
        return call(graph, operator.getitem, part, place, before=node)

    def convolve(of: fx.Node, begin: int, end: int) -> fx.Node:
        piece = call(graph, aten.slice.Tensor, weight, 1, begin, end, before=node)
        flags = [True, True, bool(mask[2]) and not calls]
        made = call(graph, op_of(node), dy, of, piece, *geometry[:7], flags, before=node)
        calls.append((begin, made))
        # Right here, so that the bytes count from here on.
        return item(made, 0)

    # First what needs the most memory on the way, and leaves the least; then the largest, which may be recomputed.
    for source in sorted(sources, key=lambda source: (not source.ranges, -nbytes_of(source.node))):
        if not source.ranges:
            gradients[source.node] = [convolve(source.node, source.begin, source.begin + source.width)]
        for begin, end in source.ranges:
            small, *how = source.node.args
            of = call(graph, aten.slice.Tensor, small, 1, begin, end, before=node)
            of = call(graph, interpolate_op, of, *how, before=node)
            large = convolve(of, source.begin + begin, source.begin + end)
            (reader,) = source.gradient.users  # type: ignore[union-attr]
            _, size, shape, *how = reader.args
            shape = [shape[0], end - begin, *shape[2:]]  # type: ignore[index,misc]
            gradient = call(graph, interpolate_backward_op, large, size, shape, *how, before=node)
            gradients.setdefault(source.node, []).append(gradient)
    _give_gradients(graph, node, sources, gradients, items.get(0))
    if 1 in items:
        in_order = [made for _, made in sorted(calls, key=operator.itemgetter(0))]
        whole = call(graph, aten.cat.default, [item(made, 1) for made in in_order], 1, before=node)
        items[1].replace_all_uses_with(whole)
    if 2 in items:
        items[2].replace_all_uses_with(item(calls[0][1], 2))
    for old in (*items.values(), node):
        if not old.users:
            graph.erase_node(old)
    return True


def _give_gradients(
    graph: fx.Graph,
    node: fx.Node,
    sources: list[ConvolutionSource],
    gradients: dict[fx.Node, list[fx.Node]],
    dx: fx.Node | None,
) -> None:
    """The readers of the gradient of a source get it from its parts."""
    whole: list[fx.Node] = []
    for source in sources:
        old, own = source.gradient, gradients[source.node]
        if source.ranges:
            made = call(graph, aten.cat.default, own, 1, before=node)
            (old,) = source.gradient.users  # type: ignore[union-attr]
        else:
            (made,) = own
            whole.append(made)
        if old is not None:
            old.replace_all_uses_with(made)
            graph.erase_node(old)
            if source.gradient not in (old, dx):
                graph.erase_node(source.gradient)  # type: ignore[arg-type]
    if dx is not None and dx.users:
        dx.replace_all_uses_with(call(graph, aten.cat.default, whole, 1, before=node))
