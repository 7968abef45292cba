"""Biases of convolutions before a concatenation, which its kernel adds.

A transposed convolution of a U-Net has a bias, which PyTorch adds in a pass of its own over the result.  Only a
concatenation reads it.  Where a kernel of this package forms that (``ops/concat.py``), it adds the bias on its way:

    cat([conv(x, w, b), skip])    ->    concat_biased([conv(x, w), skip], [b, None])

For the codegen "aten".
"""

from torch import fx

from ... import _backend
from ...ops.concat import concat_biased_op, pitches_of
from ...ops.layout import is_rows
from ..graph import has_symbols, name_of, node_at, nodes_at, value_of


def defer_biases(graph: fx.Graph) -> int:
    """Gives concatenations the biases of their sources, and returns the number of these convolutions."""
    biases: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if name_of(node) == "convolution" and _is_added_late(node):
            biases[node] = node_at(node, 2)
            node.update_arg(2, None)
    for joined in {user for node in biases for user in node.users}:
        sources = nodes_at(joined, 0)
        joined.target = concat_biased_op
        joined.args = (sources, [biases.get(source) for source in sources])
    return len(biases)


def joins_channels(node: fx.Node) -> bool:
    """Whether a node concatenates the channels of images."""
    return name_of(node) == "cat" and node.args[1:] in ((1,), (1 - value_of(node).dim(),))


def _is_added_late(node: fx.Node) -> bool:
    """Whether a convolution has a bias, and concatenations of images in channels_last alone read its result."""
    value = value_of(node)
    if not isinstance(node.args[2], fx.Node) or has_symbols(value) or not node.users or not is_rows(value):
        return False
    if value_of(node.args[2]).dtype != value.dtype or not _backend.takes_triton(value.device):
        return False
    return all(_takes_biases(user) for user in node.users)


def _takes_biases(node: fx.Node) -> bool:
    """Whether the kernel forms a concatenation."""
    if not joins_channels(node) or not is_rows(value_of(node)):
        return False
    sources = nodes_at(node, 0)
    values = [value_of(source) for source in sources]
    return len(set(sources)) == len(sources) and not has_symbols(*values) and pitches_of(values) is not None
