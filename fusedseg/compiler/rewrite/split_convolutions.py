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
    divisible: whether nobody reads the gradient of the concatenation otherwise.
    """

    node: fx.Node
    begin: int
    width: int
    gradient: fx.Node | None
    divisible: bool

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges of channels, from 0, if it is enlarged right before, and its gradient goes to the small size."""
        if self.gradient is None or not self.divisible or self.node.target is not interpolate_op:
            return []
        if [user.target for user in self.gradient.users] != [interpolate_backward_op]:
            return []
        count = min(MOST_RANGES, nbytes_of(self.node) // SLAB_BYTES)
        step = -(-self.width // max(count, 1))
        return [(k, min(k + step, self.width)) for k in range(0, self.width, step)] if count > 1 else []


def _sources(x: fx.Node, dx: fx.Node | None) -> list[ConvolutionSource]:
    """The sources of a convolution of ``x`` whose gradient is ``dx``; none if their channels are not known."""
    if name_of(x) != "cat":
        width = number_of(value_of(x).shape[1])
        return [] if width is None else [ConvolutionSource(x, 0, width, dx, True)]
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
    divisible = dx is not None and set(dx.users) == {gradient for gradient in gradients if gradient is not None}
    return [
        ConvolutionSource(node, end - width, width, gradient, divisible)
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


class Part(NamedTuple):
    """The backward of a convolution of some channels: of ``source`` from ``begin`` on, or of a range of them.

    gradient: the gradient of the source, or of a range of its channels before it was enlarged.
    """

    source: ConvolutionSource
    begin: int
    node: fx.Node
    gradient: fx.Node


def _split(graph: fx.Graph, node: fx.Node) -> bool:
    given: tuple = node.args
    dy, x, weight, *geometry = given
    mask, items = geometry[7], items_of(node)
    sources = _sources(x, items.get(0))
    if len(sources) < 2 and not any(source.ranges() for source in sources):
        return False
    parts: list[Part] = []

    def item(part: fx.Node, place: int) -> fx.Node:
        return call(graph, operator.getitem, part, place, before=node)

    def convolve(source: ConvolutionSource, begin: int, end: int, of: fx.Node, small: fx.Node | None = None) -> None:
        piece = call(graph, aten.slice.Tensor, weight, 1, source.begin + begin, source.begin + end, before=node)
        flags = [True, True, bool(mask[2]) and not parts]
        made = call(graph, op_of(node), dy, of, piece, *geometry[:7], flags, before=node)
        # Right here, so that the bytes count from here on.
        gradient = item(made, 0)
        if small is not None:
            _, size, shape, *how = small.args
            shape = [shape[0], end - begin, *shape[2:]]  # type: ignore[index,misc]
            gradient = call(graph, interpolate_backward_op, gradient, size, shape, *how, before=node)
        parts.append(Part(source, source.begin + begin, made, gradient))

    # First what needs the most memory on the way, and leaves the least; then the largest, which may be recomputed.
    for source in sorted(sources, key=lambda source: (not source.ranges(), -nbytes_of(source.node))):
        if not source.ranges():
            convolve(source, 0, source.width, source.node)
        for begin, end in source.ranges():
            x, *how = source.node.args
            of = call(graph, aten.slice.Tensor, x, 1, begin, end, before=node)
            of = call(graph, interpolate_op, of, *how, before=node)
            convolve(source, begin, end, of, next(iter(source.gradient.users)))  # type: ignore[union-attr]
    _give_gradients(graph, node, sources, parts, items)
    if 1 in items:
        in_order = sorted(parts, key=lambda part: part.begin)
        whole = call(graph, aten.cat.default, [item(part.node, 1) for part in in_order], 1, before=node)
        items[1].replace_all_uses_with(whole)
    if 2 in items:
        items[2].replace_all_uses_with(item(parts[0].node, 2))
    for old in (*items.values(), node):
        if not old.users:
            graph.erase_node(old)
    return True


def _give_gradients(
    graph: fx.Graph, node: fx.Node, sources: list[ConvolutionSource], parts: list[Part], items: dict[int, fx.Node]
) -> None:
    """The readers of the gradient of a source get it from its parts."""
    whole: list[fx.Node] = []
    for source in sources:
        own = [part for part in parts if part.source is source]
        if source.ranges():
            made = call(graph, aten.cat.default, [part.gradient for part in own], 1, before=node)
            old = next(iter(source.gradient.users))  # type: ignore[union-attr]
        else:
            made = own[0].gradient
            old = source.gradient
            whole.append(made)
        if old is not None:
            old.replace_all_uses_with(made)
            graph.erase_node(old)
            if source.gradient not in (old, items.get(0)):
                graph.erase_node(source.gradient)  # type: ignore[arg-type]
    dx = items.get(0)
    if dx is not None and dx.users:
        dx.replace_all_uses_with(call(graph, aten.cat.default, whole, 1, before=node))
