"""Norms inside of convolutions, for the codegen "aten" with the option ``fused_convolutions``.

    conv -> norm -> act -> conv        3 passes over memory between the convolutions become none

In forward a convolution finds the statistics of its result for the norm behind it, and computes the norm and the
activation before it as it loads its image, if nothing else reads their result (``ops/conv/norm_conv.py``).  In
backward the gradients of such a convolution and of the norm before it are one op, which computes the norm's output
again for the gradient of the weight alone.  A norm with a residual, or whose output a skip reads too, is an op of its
own that knows its statistics.

It is done where Triton kernels compute norms, because elsewhere norms are PyTorch's.
"""

import operator
from typing import Any

from torch import fx

from ... import _backend
from ...activation import IDENTITY, Activation
from ...ops.conv import conv3d, norm_conv
from ...ops.conv.geometry import Geometry
from ...ops.norm.graph import GradientCall, NormCall, norm_op
from ..graph import call, has_symbols, is_gradient, is_tensor, items_of, name_of, node_at, value_of

# The place of stride among the arguments of a convolution, and of its gradient.
STRIDE, STRIDE_OF_GRADIENT = 3, 4


def fuse_norms(graph: fx.Graph) -> int:
    """Writes such convolutions, and returns their number."""
    of_backward = any(map(is_gradient, graph.find_nodes(op="placeholder")))
    name, join = ("convolution_backward", _join_gradients) if of_backward else ("convolution", _join)
    return sum(join(graph, node) for node in list(graph.nodes) if name_of(node) == name)


def _geometry(node: fx.Node, place: int, weight: object) -> Geometry | None:
    """The geometry of a convolution that the kernels compute; None for others."""
    arguments: Any = node.args[place : place + 6]
    given = conv3d.Arguments(*arguments)
    if given.transposed or given.groups != 1 or not is_tensor(weight):
        return None
    return Geometry(tuple(given.stride), tuple(given.padding), tuple(given.dilation), 1)


def _fits(x: fx.Node, weight: fx.Node, act: Activation) -> bool:
    """Whether the kernels may serve an image, a weight and an activation before the convolution."""
    value, of_weight = value_of(x), value_of(weight)
    if has_symbols(value, of_weight) or not _backend.takes_triton(value.device):
        return False
    return norm_conv.fits(value, of_weight, act)


def _norm_before(image: fx.Node, reader: fx.Node, weight: fx.Node) -> NormCall | None:
    """The norm with known statistics whose output an image is, if it has one reader alone, and the kernels fit."""
    norm = NormCall.of(image.args[0]) if image.target is operator.getitem and image.args[1] == 0 else None
    if norm is None or norm.mean is None or set(image.users) != {reader} or reader.all_input_nodes.count(image) != 1:
        return None
    if norm.residual is not None or norm.norm.over.is_grouped:
        return None
    return norm if _fits(norm.x, weight, norm.norm.act) else None


def _of_both(norm: NormCall | None, image: fx.Node, weight: fx.Node, geometry: Geometry) -> norm_conv.NormConv:
    """A convolution of an image with the norm before it, if there is one."""
    if norm is None:
        alone = norm_conv.norm_of("identity", 0.0, False)
        return norm_conv.NormConv(image, None, None, None, None, weight, alone, geometry)
    return norm_conv.NormConv(norm.x, norm.weight, norm.bias, norm.mean, norm.rstd, weight, norm.norm, geometry)


def _norm_behind(y: fx.Node) -> tuple[fx.Node, NormCall] | None:
    """The first norm that finds the statistics of a tensor, of a batch or of instances without running statistics."""
    for node in y.users:
        norm = NormCall.of(node) if node.target is norm_op else None
        if norm is None or norm.x is not y or norm.mean is not None or not norm.norm.own:
            continue
        if not norm.norm.over.is_grouped and not (norm.of_samples and norm.running_mean is not None):
            return node, norm
    return None


def _join(graph: fx.Graph, node: fx.Node) -> bool:
    """Writes a convolution of forward with the norms beside it."""
    image, weight = node_at(node, 0), node_at(node, 1)
    geometry = _geometry(node, STRIDE, weight)
    if geometry is None or not _fits(image, weight, IDENTITY):
        return False
    before, behind = _norm_before(image, node, weight), _norm_behind(node)
    if before is None and behind is None:
        return False
    of = _of_both(before, image, weight, geometry)._replace(conv_bias=node.args[2])
    if behind is not None:
        _, norm = behind
        of = of._replace(running_mean=norm.running_mean, running_var=norm.running_var, after=norm.norm)
    joined = call(graph, norm_conv.norm_conv_op, *of.arguments, before=node)
    y = _item(graph, joined, 0, node)
    if behind is not None:
        take_statistics(graph, joined, *behind)
    node.replace_all_uses_with(y)
    y.meta = node.meta
    graph.erase_node(node)
    if before is not None:
        made = node_at(image, 0)
        graph.erase_node(image)
        graph.erase_node(made)
    return True


def _item(graph: fx.Graph, node: fx.Node, place: int, before: fx.Node) -> fx.Node:
    return call(graph, operator.getitem, node, place, before=before)


def take_statistics(graph: fx.Graph, found: fx.Node, made: fx.Node, norm: NormCall) -> None:
    """A norm takes its statistics from the results 1 to 4 of another node, and comes right before its first reader.

    ``found`` stands before ``made``, the node of the norm.
    """
    items = items_of(made)
    for place in set(items) - {0}:
        items[place].args = (found, place)
    for place in {1, 2} - set(items):
        items[place] = _item(graph, found, place, made)
    known = norm._replace(running_mean=None, running_var=None, mean=items[1], rstd=items[2])
    made.args = known.arguments
    if 0 in items and items[0].users:
        order = {node: place for place, node in enumerate(graph.nodes)}
        first = min(items[0].users, key=order.__getitem__)
        first.prepend(made)
        first.prepend(items[0])


def _join_gradients(graph: fx.Graph, node: fx.Node) -> bool:
    """Writes the gradients of a convolution and of the norm before it as one op."""
    image, weight, dz = node_at(node, 1), node_at(node, 2), items_of(node).get(0)
    wanted: Any = node.args[-1]
    of_x, of_weight, of_bias = wanted
    if not of_x or dz is None or len(dz.users) != 1:
        return False
    (made,) = dz.users
    of, geometry = GradientCall.of(made), _geometry(node, STRIDE_OF_GRADIENT, weight)
    norm = _norm_before(image, node, weight)
    if of is None or geometry is None or norm is None or of.dz is not dz or of.also is not None or of.of_residual:
        return False
    same = of.x is norm.x and (of.mean, of.second) == (norm.mean, norm.rstd) and of.norm.over == norm.norm.over
    if not same or not of.norm.own or of.norm.act != norm.norm.act or (of.weight, of.bias) != (norm.weight, norm.bias):
        return False
    both = _of_both(norm, image, weight, geometry)._replace(dy=node.args[0], wanted=(of.affine, of_weight, of_bias))
    joined = call(graph, norm_conv.norm_conv_backward_op, *both.arguments, before=node)
    # The results of the norm's gradient come first, and those of the weight and the bias behind them.
    for source, first in ((made, 0), (node, 2)):
        for place, item in items_of(source).items():
            if item is not dz:
                result = _item(graph, joined, place + first, node)
                result.meta = item.meta
                item.replace_all_uses_with(result)
                graph.erase_node(item)
    for gone in (made, dz, node, image, node_at(image, 0)):
        graph.erase_node(gone)
    return True
