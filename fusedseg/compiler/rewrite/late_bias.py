"""Biases of convolutions before a concatenation, as sums of their own.

A transposed convolution of a U-Net has a bias, which PyTorch adds in a pass of its own over the result.  Only a
concatenation reads it.  Where a kernel of this package forms that (``ops/concat.py``), it adds the bias on its way:

    cat([conv(x, w, b), skip])    ->    cat([conv(x, w) + b, skip])

For the codegen "aten"; ``codegen/concatenation.py`` joins the sum and the concatenation.
"""

import torch
from torch import fx

from ... import _backend
from ...ops.concat import are_rows
from ...ops.layout import is_rows
from ..graph import LATE, call, has_symbols, name_of, node_at, nodes_at, value_of
from .simplify import LABELS

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Writes such sums, one for each concatenation that reads a convolution, and returns the number of convolutions.

    It comes behind ``split_convolutions.py``: backward may read the sum there, which must be in memory then.
    """
    found = [node for node in graph.nodes if name_of(node) == "convolution" and _is_added_late(node)]
    for node in found:
        x, bias = node_at(node, 0), node_at(node, 2)
        node.args = (x, node.args[1], None, *node.args[3:])
        value = value_of(node)
        sizes = [1, value.shape[1], *(1,) * (value.dim() - 2)]
        for reader in list(node.users):
            vector = call(graph, aten.view.default, bias, sizes, before=reader)
            total = call(graph, aten.add.Tensor, node, vector, before=reader)
            total.meta[LATE] = True
            for made in (vector, total):
                made.meta |= {name: reader.meta[name] for name in LABELS if name in reader.meta}
            reader.replace_input_with(node, total)
    return len(found)


def joins_channels(node: fx.Node) -> bool:
    """Whether a node concatenates the channels of images."""
    return name_of(node) == "cat" and node.args[1:] in ((1,), (1 - value_of(node).dim(),))


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
    return all(_takes_biases(user) for user in node.users)


def _takes_biases(node: fx.Node) -> bool:
    """Whether the kernel forms a concatenation.  A sum has memory of its own everywhere else."""
    if not joins_channels(node) or not is_rows(value_of(node)):
        return False
    sources = nodes_at(node, 0)
    values = [value_of(source) for source in sources]
    return len(set(sources)) == len(sources) and not has_symbols(*values) and are_rows(values)
