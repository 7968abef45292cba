"""Sums of two gradients that the gradient of a norm reads as two tensors, for the codegen "aten".

The output of a norm that a skip or a shortcut reads too has two gradients.  Their sum is three passes over memory, and
both launches of the norm's gradient read it.  Instead the kernels read both gradients (``kernels/norm_act_bwd.py``),
one of which may be a slice of the channels of the gradient of a concatenation.

No more memory is alive at once: the gradient of the norm's input is written over one of the two, that of a residual
over the other one, and nothing is allocated between the sum and the norm.
"""

import operator
from dataclasses import replace

import torch
from torch import fx

from ... import _backend
from ...ops.layout import layout_of, pitch_of
from ...ops.norm.graph import Backward, GradientCall
from ..graph import calls_view, has_same_form, has_symbols, is_tensor, items_of, nodes_from, value_of
from ..settings import optional
from .in_place import Memory

aten = torch.ops.aten


@optional("sums")
def rewrite(graph: fx.Graph) -> int:
    """Gives such norms both gradients, and returns how many.

    It comes right before ``in_place.py``, which writes results over the gradients that are free.
    """
    memory = Memory(graph)
    norms = [(node, GradientCall.of(node)) for node in graph.nodes if isinstance(node.target, Backward)]
    return sum(_join(graph, node, norm, memory) for node, norm in norms if norm is not None and norm.also is None)


def _join(graph: fx.Graph, node: fx.Node, norm: GradientCall, memory: Memory) -> bool:
    total, x = norm.dz, norm.x
    roots, last = memory.roots, memory.last
    if not _is_sum(total, node) or has_symbols(value_of(x)) or not _backend.takes_triton(value_of(x).device):
        return False
    function = node.target
    assert isinstance(function, Backward)
    if 0 not in items_of(node):
        # The kernel has no memory for the gradient of the norm's input, which nobody reads, but that of the sum.
        return False
    for dz, also in (total.args, total.args[::-1]):
        assert isinstance(dz, fx.Node)
        assert isinstance(also, fx.Node)
        if not has_same_form(value_of(dz), value_of(x)) or not memory.is_free(node, dz):
            continue
        if roots[also] is roots[dz] or not _is_read(also, x):
            continue
        alike = has_same_form(value_of(also), value_of(x))
        spare = function.of_residual and alike and memory.is_free(node, also)
        lives = roots[also].op == "placeholder" or last[roots[also]] > memory.places[node]
        if function.of_residual and not spare and not lives:
            continue
        node.target = replace(function, spare=spare)
        node.args = norm._replace(dz=dz, also=also).tensors
        graph.erase_node(total)
        end = max(last[roots[also]], memory.places[node])
        last[roots[dz]] = last[roots[also]] = end
        return True
    return False


def _is_sum(total: fx.Node, reader: fx.Node) -> bool:
    """Whether a node is a sum of two tensors that another node alone reads, with no allocation in between."""
    if total.target is not aten.add.Tensor or total.kwargs or set(total.users) != {reader}:
        return False
    if reader.args.count(total) > 1 or not all(is_tensor(t) for t in total.args) or total.args[0] is total.args[1]:
        return False
    return all(node.target is operator.getitem or calls_view(node) for node in nodes_from(total.next, reader))


def _is_read(also: fx.Node, x: fx.Node) -> bool:
    """Whether the kernels read a second gradient as it lies in memory."""
    value, of = value_of(also), value_of(x)
    if value.dtype != of.dtype or value.shape != of.shape or value.device != of.device:
        return False
    layout = layout_of(of)
    return value.stride() == of.stride() or (layout is not None and layout.rows and pitch_of(value) is not None)
