"""Sums of two gradients that the gradient of a norm reads as two tensors, for the codegen "aten".

The output of a norm that a skip or a shortcut reads too has two gradients.  Their sum is three passes over memory, and
both launches of the norm's gradient read it.  Instead the kernels read both gradients (``kernels/norm_act_bwd.py``),
one of which may be a slice of the channels of the gradient of a concatenation.

No more memory is alive at once: the gradient of the norm's input is written over one of the two, that of a residual
over the other one, and what stands between the sum and the norm fits beside both (``plan/liveness.py``).
"""

import operator
from dataclasses import replace

import torch
from torch import fx

from ... import _backend
from ...ops.layout import layout_of, pitch_of
from ...ops.norm.graph import Backward, GradientCall
from ..graph import calls_view, has_same_form, has_symbols, is_tensor, items_of, nbytes_of, nodes_from, value_of
from ..plan.liveness import Liveness
from .in_place import Memory

aten = torch.ops.aten


def fuse_sums(graph: fx.Graph, liveness: Liveness) -> int:
    """Gives such norms both gradients, and returns how many.

    It comes right before ``in_place.py``, which writes results over the gradients that are free.
    """
    memory = Memory(graph)
    norms = [(node, GradientCall.of(node)) for node in graph.nodes if isinstance(node.target, Backward)]
    found = [(node, norm) for node, norm in norms if norm is not None and norm.also is None]
    return sum(_join(graph, node, norm, memory, liveness) for node, norm in found)


def _join(graph: fx.Graph, node: fx.Node, norm: GradientCall, memory: Memory, liveness: Liveness) -> bool:
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
        over_also = function.of_residual and alike and memory.is_free(node, also)
        lives = roots[also].op == "placeholder" or last[roots[also]] > memory.places[node]
        if function.of_residual and not over_also and not lives:
            continue
        if not _may_live(dz, also, (total, node), memory, liveness):
            continue
        node.target = replace(function, over_also=over_also)
        node.args = norm._replace(dz=dz, also=also).tensors
        graph.erase_node(total)
        end = max(last[roots[also]], memory.places[node])
        last[roots[dz]] = last[roots[also]] = end
        return True
    return False


def _is_sum(total: fx.Node, reader: fx.Node) -> bool:
    """Whether a node is a sum of two tensors that another node alone reads."""
    if total.target is not aten.add.Tensor or total.kwargs or set(total.users) != {reader}:
        return False
    tensors = all(is_tensor(t) for t in total.args) and total.args[0] is not total.args[1]
    return tensors and reader.args.count(total) == 1


def _may_live(dz: fx.Node, also: fx.Node, places: tuple[fx.Node, fx.Node], memory: Memory, liveness: Liveness) -> bool:
    """Whether both gradients may live from the sum to the norm, the ``places``, in place of the sum."""
    total, norm = places
    roots = {memory.roots[dz], memory.roots[also]}
    between = [n for n in nodes_from(total.next, norm) if n.target is not operator.getitem and not calls_view(n)]
    # What reads the memory of a gradient may also write over it.
    if any(memory.roots[source] in roots for n in between for source in n.all_input_nodes):
        return False
    longer = sum(nbytes_of(root) for root in roots if memory.last[root] < memory.places[norm]) - nbytes_of(total)
    return not between or liveness.takes((liveness.place_of[total] + 1, liveness.place_of[norm] - 1, longer))


def _is_read(also: fx.Node, x: fx.Node) -> bool:
    """Whether the kernels read a second gradient as it lies in memory."""
    value, of = value_of(also), value_of(x)
    if value.dtype != of.dtype or value.shape != of.shape or value.device != of.device:
        return False
    layout = layout_of(of)
    return value.stride() == of.stride() or (layout is not None and layout.rows and pitch_of(value) is not None)
