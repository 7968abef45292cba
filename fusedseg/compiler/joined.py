"""Concatenations that are written source by source, for the codegen "aten".

A concatenation of a skip and an enlarged map needs both of them and the result at once.  Here the result is allocated
first.  The skip is copied into it and let go, and the map is enlarged into it, some channels at a time.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ..ops import interpolate
from ..ops.conv.slabs import SLAB_BYTES
from .joint import name_of, nbytes_of, value_of

aten = torch.ops.aten


def put(whole: Tensor, source: Tensor, begin: int) -> Tensor:
    """Copies a source to its channels."""
    whole[:, begin : begin + source.shape[1]].copy_(source)
    return whole


def put_enlarged(whole: Tensor, x: Tensor, begin: int, *how: Any) -> Tensor:
    """Enlarges ``x`` into its channels."""
    C = x.shape[1]
    nbytes = whole.numel() // whole.shape[1] * C * whole.element_size()
    step = -(-C // max(1, nbytes // SLAB_BYTES))
    for k in range(0, C, step):
        put(whole, interpolate.forward(x[:, k : k + step], *how), begin + k)
    return whole


def rewrite(graph: fx.Graph) -> int:
    """Writes such concatenations like this, and returns their number."""
    return sum(_write(graph, node) for node in list(graph.nodes) if name_of(node) == "cat")


def _write(graph: fx.Graph, node: fx.Node) -> bool:
    sources: Any = node.args[0]
    value = value_of(node)
    enlarged = [_is_large_map(source, node) for source in sources]
    symbolic = any(not isinstance(n, int) for n in value.shape)
    if (
        not any(enlarged)
        or symbolic
        or len(set(sources)) < len(sources)
        or node.args[1:] not in ((1,), (1 - value.dim(),))
    ):
        return False
    if not value.is_contiguous() or any(value_of(source).dtype != value.dtype for source in sources):
        return False
    with graph.inserting_before(node):
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        whole = graph.call_function(aten.empty.memory_format, (list(value.shape),), options)
        whole.meta["val"] = value
        begins = [sum(value_of(source).shape[1] for source in sources[:place]) for place in range(len(sources))]
        # The maps come last, when the other sources are gone.
        for map_of, source, begin in sorted(zip(enlarged, sources, begins, strict=True), key=lambda row: row[0]):
            given = (whole, source.args[0], begin, *source.args[1:]) if map_of else (whole, source, begin)
            whole = graph.call_function(put_enlarged if map_of else put, given)
            whole.meta["val"] = value
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    for map_of, source in zip(enlarged, sources, strict=True):
        if map_of:
            graph.erase_node(source)
    return True


def _is_large_map(source: fx.Node, reader: fx.Node) -> bool:
    made = source.target is interpolate.interpolate_op._opoverload
    return made and set(source.users) == {reader} and nbytes_of(source) >= SLAB_BYTES
