"""Calls that take the host less time and compute the same, for the codegen "aten".

norms
    become objects that know already what they compute, so that a call takes tensors alone.
convolutions
    that no kernel of this package can compute become calls of PyTorch's function.
casts
    become calls of ``Tensor.to``, which reads its arguments in half of the time of the op.
zeros
    that a graph only returns, as the gradients of dead biases, are filled by one kernel.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops.conv import conv3d
from ...ops.norm import graph as norms
from ...ops.together import Zeros
from ..graph import has_symbols, node_at, value_of
from . import convolution_backward
from .casts import casts_alone, put_together

aten = torch.ops.aten


def shorten_calls(graph: fx.Graph) -> None:
    """Writes calls of norms and casts."""
    for node in graph.nodes:
        made = norms.prepared(node)
        if made is not None:
            node.target, node.args = made
        elif casts_alone(node):
            node.target, node.kwargs = Tensor.to, {"dtype": value_of(node).dtype}


def write_zeros(graph: fx.Graph) -> int:
    """Writes one call for vectors of zeros, and returns the number of such calls."""
    alike: dict[Any, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.zeros.default):
        value = value_of(node)
        plain = value.dim() == 1 and not has_symbols(value) and value.device.type in _torch.EMPTY_STRIDED
        if plain and set(node.users) == {graph.output_node()}:
            alike.setdefault((value.dtype, value.device), []).append(node)
    several = [nodes for nodes in alike.values() if len(nodes) > 1]
    for nodes in several:
        put_together(graph, nodes, graph.output_node(), Zeros)
    return len(several)


def write_convolutions(graph: fx.Graph) -> int:
    """Writes such convolutions and their gradients, and returns their number."""
    found = [node for node in graph.nodes if node.target in CONVOLUTIONS and _is_the_vendors(node)]
    for node in found:
        function, *_ = CONVOLUTIONS[node.target]
        if function is node.target:
            node.kwargs = {"vendors": True}
        node.target = function
    return len(found)


# The function to call for a convolution that is the vendor's, and the places of its input, weight and stride.
# A function that serves both kinds is told so by ``vendors=True``.
CONVOLUTIONS: dict[Any, tuple[Any, int, int, int]] = {
    aten.convolution.default: (torch.convolution, 0, 1, 3),
    aten.convolution_backward.default: (convolution_backward.GRADIENTS, 1, 2, 4),
    convolution_backward.convolution_backward: (convolution_backward.convolution_backward, 0, 2, 4),
}


def _is_the_vendors(node: fx.Node) -> bool:
    """Whether shapes and dtypes of a convolution leave no choice; the sizes of x may be symbols."""
    _, of_x, of_weight, of_stride = CONVOLUTIONS[node.target]
    source: Any = node.args[of_x]
    x = value_of(source[0] if isinstance(source, (list, tuple)) else source)
    weight = value_of(node_at(node, of_weight))
    given: Any = node.args[of_stride : of_stride + len(conv3d.Arguments._fields)]
    of_call = conv3d.Arguments(*given)
    return not has_symbols(weight) and not of_call.fit(weight, None if has_symbols(x) else x)
