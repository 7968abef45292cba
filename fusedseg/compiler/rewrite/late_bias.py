"""Biases of convolutions before a concatenation, as sums of their own.

A transposed convolution of a U-Net has a bias, which PyTorch adds in a pass of its own over the result.  Only a
concatenation reads it.  Where a kernel of this package forms that (``ops/concat.py``), it adds the bias on its way:

    cat([conv(x, w, b), skip])    ->    cat([conv(x, w) + b, skip])

For the codegen "aten"; ``codegen/concatenation.py`` joins the sum and the concatenation.
"""

import torch
from torch import fx

from ... import _backend
from ...ops.layout import is_rows
from ..graph import LATE, call, has_symbols, name_of, node_at, nodes_at, value_of

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Writes such sums, and returns their number."""
    found = [node for node in graph.nodes if name_of(node) == "convolution" and _is_added_late(node)]
    for node in found:
        x, bias, after = node_at(node, 0), node_at(node, 2), node.next
        node.args = (x, node.args[1], None, *node.args[3:])
        channels = value_of(node).shape[1]
        vector = call(graph, aten.view.default, bias, [1, channels, *(1,) * (value_of(node).dim() - 2)], before=after)
        total = call(graph, aten.add.Tensor, node, vector, before=after)
        total.meta[LATE] = True
        node.replace_all_uses_with(total, lambda user, total=total: user is not total)
    return len(found)


def is_bias(node: object) -> bool:
    """Whether a node is a vector in the place of the channels of an image."""
    if not isinstance(node, fx.Node) or name_of(node) != "view":
        return False
    value, source = value_of(node), value_of(node_at(node, 0))
    return bool(
        source.dim() == 1 and value.dim() > 2 and tuple(value.shape) == (1, len(source), *(1,) * (value.dim() - 2))
    )


def _is_added_late(node: fx.Node) -> bool:
    """Whether a convolution has a bias, and concatenations of images in channels_last alone read its result."""
    value = value_of(node)
    if not isinstance(node.args[2], fx.Node) or has_symbols(value) or not node.users or not is_rows(value):
        return False
    if value_of(node.args[2]).dtype != value.dtype or not _backend.takes_triton(value.device):
        return False
    return all(_joins_channels(user) for user in node.users)


def _joins_channels(node: fx.Node) -> bool:
    if name_of(node) != "cat" or node.args[1:] not in ((1,), (1 - value_of(node).dim(),)):
        return False
    sources = nodes_at(node, 0)
    return is_rows(value_of(node)) and len(set(sources)) == len(sources)
