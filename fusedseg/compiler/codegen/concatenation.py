"""Concatenations and their gradients, for the codegen "aten".

A concatenation of a skip and an enlarged map needs both of them and the result at once.  Here the result is allocated
first.  The skip is copied into it and let go, and the map is enlarged into it, some channels at a time.

The gradients of the sources are slices of the channels of one gradient.  In channels_last they lie in its memory with
gaps.  Elementwise ops read them there.  Some ops need memory without gaps, and would copy a slice themselves, by
PyTorch's kernel, which takes its values one by one.  So they get a copy by the kernel of ``ops/concat.py``.
"""

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ... import _backend
from ...ops import upsample
from ...ops.concat import dense
from ...ops.conv.convolutions import SLAB_BYTES
from ...ops.layout import FORMATS, pitch_of, suggests_channels_last
from ..graph import has_symbols, is_tensor, name_of, nbytes_of, nodes_at, row_of, value_of
from ..rewrite.late_bias import joins_channels

aten = torch.ops.aten
INTERPOLATE = upsample.interpolate_op


def put(whole: Tensor, source: Tensor, begin: int) -> Tensor:
    """Copies a source to its channels."""
    whole[:, begin : begin + source.shape[1]].copy_(source)
    return whole


def put_enlarged(whole: Tensor, x: Tensor, begin: int, how: upsample.How) -> Tensor:
    """Enlarges ``x`` into its channels."""
    C = x.shape[1]
    nbytes = whole.numel() // whole.shape[1] * C * whole.element_size()
    step = -(-C // max(1, nbytes // SLAB_BYTES))
    for k in range(0, C, step):
        put(whole, upsample.forward(x[:, k : k + step], *how), begin + k)
    return whole


def concatenate_in_place(graph: fx.Graph) -> int:
    """Writes such concatenations like this, and returns their number."""
    return sum(_write(graph, node) for node in list(graph.nodes) if name_of(node) == "cat")


def _write(graph: fx.Graph, node: fx.Node) -> bool:
    sources = nodes_at(node, 0)
    value = value_of(node)
    enlarged = [_is_large_map(source, node) for source in sources]
    if not any(enlarged) or has_symbols(value) or not value.is_contiguous() or not joins_channels(node):
        return False
    if len(set(sources)) < len(sources) or any(value_of(source).dtype != value.dtype for source in sources):
        return False
    with graph.inserting_before(node):
        whole = _allocated(graph, value)
        begins = [sum(value_of(source).shape[1] for source in sources[:place]) for place in range(len(sources))]
        # The maps come last, because the other sources are gone by then.
        for map_of, source, begin in sorted(zip(enlarged, sources, begins, strict=True), key=lambda row: row[0]):
            given = (whole, source.args[0], begin, source.args[1:]) if map_of else (whole, source, begin)
            whole = graph.call_function(put_enlarged if map_of else put, given)
            whole.meta["val"] = value
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    for map_of, source in zip(enlarged, sources, strict=True):
        if map_of:
            graph.erase_node(source)
    return True


def _allocated(graph: fx.Graph, value: Tensor) -> fx.Node:
    """Memory for a result."""
    options: dict[str, Argument] = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    made = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
    made.meta["val"] = value
    return made


def _is_large_map(source: object, reader: fx.Node) -> bool:
    if not isinstance(source, fx.Node) or source.target is not INTERPOLATE:
        return False
    return set(source.users) == {reader} and nbytes_of(source) >= SLAB_BYTES


def make_dense(graph: fx.Graph) -> int:
    """Gives these ops their copies, and returns how many."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        source = node.args[0] if row_of(node).dense else None
        if not isinstance(source, fx.Node) or not _is_gradient_of_a_source(source):
            continue
        if source not in copies:
            value = value_of(source)
            with graph.inserting_before(node):
                copies[source] = graph.call_function(dense, (source,))
            copies[source].meta["val"] = torch.empty_like(value, memory_format=FORMATS[value.dim()])
        node.update_arg(0, copies[source])
    return len(copies)


def _is_gradient_of_a_source(node: fx.Node) -> bool:
    """Whether a node is a slice of the channels of an image in channels_last, on a device of the kernel."""
    if name_of(node) != "slice" or node.args[1:2] != (1,) or not is_tensor(node):
        return False
    value = value_of(node)
    if value.dim() not in FORMATS or has_symbols(value) or not _backend.takes_triton(value.device):
        return False
    return pitch_of(value) not in (None, value.shape[1]) and suggests_channels_last(value)
