"""Packing and unpacking as arithmetic in the graph, in place of calls of ops, for the options "bits" and Inductor.

Inductor fuses this arithmetic with what is before and after it.  It lays out 2D tensors as channels_last, against what
the values of a graph say, so they are packed in that order; a group has values of one channel in both orders.

Calls with symbolic sizes stay.  So do all calls on a GPU, where the ops run this package's Triton kernels: Inductor's
code for the arithmetic did not compile within two minutes on an H100.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ... import _torch
from ...ops.low_bit import graph as ops
from ...ops.low_bit import traced
from ...ops.low_bit.graph import unpack_op
from ..graph import arguments_of, items_of, node_at, splice, value_of
from ..plan.keep import KEEP, LABEL

_parts = _torch.compiler_parts()


def spliced(graph: fx.Graph, function: Callable[..., Any], *sources: fx.Node, before: fx.Node) -> list[fx.Node]:
    """Writes what a function of tensors computes before a node, and returns its results."""
    values = [value_of(source) for source in sources]
    with values[0].fake_mode, _torch.python_dispatcher():
        inner = make_fx(function, decomposition_table=_parts.decompositions(), tracing_mode="real")(*values).graph
    return splice(graph, inner, sources, before)


class _Fusing:
    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph
        # On a CPU this holds for each graph with a convolution; on a GPU it depends on their channels.
        self.channels_last = _parts.GraphLowering.decide_layout_opt(module, is_inference=False)
        self.packed: dict[Any, Any] = {}

    def form(self, value: Tensor) -> traced.MemoryOrder:
        stride = value.stride()
        if self.channels_last and value.dim() == 4:
            stride = torch.empty(value.shape, device="meta", memory_format=torch.channels_last).stride()
        return traced.MemoryOrder.of(value.shape, stride)

    def pack(self, node: fx.Node) -> None:
        """Packs in forward; the results are kept in place of those of the call."""
        given = arguments_of(node)
        source = node_at(node, 0)
        value = value_of(source)
        symbolic = any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        if value.device.type != "cpu" or symbolic or given.get("kink") is not None:
            return
        form = self.form(value)
        if node.target is ops.round_op._opoverload:
            bits, place, first = given["bits"], given["place"], items_of(node)[0]

            def run(x: Tensor, key: Tensor) -> Any:
                return traced.pack(x, traced.key_of(key, place), bits, form)

            made = spliced(self.graph, run, source, given["key"], before=node)
        elif given.get("bits", 1) == 1:
            first = node
            made = spliced(self.graph, lambda t: traced.pack_mask(t, form), source, before=node)
        else:
            return
        for one in made:
            one.meta[LABEL] = KEEP
        self.packed[first] = made, form

    def unpack(self, node: fx.Node) -> None:
        """Unpacks in backward; all nodes run there."""
        if node.args[0] not in self.packed:
            return
        (made, form), value, last = self.packed[node.args[0]], value_of(node), node.prev
        given = arguments_of(node)

        def run(*packed: Tensor) -> Tensor:
            if node.target is unpack_op._opoverload:
                return traced.unpack(packed[0], packed[1:], given["bits"], form)
            return traced.unpack_mask(packed[0], form).to(value.dtype)

        (result,) = spliced(self.graph, run, *made, before=node)
        while last.next is not node:
            last = last.next
            last.meta[LABEL] = node.meta[LABEL]
        node.replace_all_uses_with(result)


def rewrite(module: fx.GraphModule) -> None:
    """Writes the arithmetic; the calls have no readers any more."""
    fusing = _Fusing(module)
    for node in list(module.graph.nodes):
        if node.target in (ops.round_op._opoverload, ops.bits_pack._opoverload):
            fusing.pack(node)
        elif node.target in (unpack_op._opoverload, ops.bits_unpack._opoverload):
            fusing.unpack(node)
