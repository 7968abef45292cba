"""Activations that go into the norm before them, for the codegen "aten".

    act(norm(x))                                 one pass over x in place of two
    norm_backward(act_backward(dz, ...), x)      the norm's kernels compute the gate from x

Without the option "bits" norms are captured with their activations (``capture/norms.py``).  With it they are captured
apart, because what backward asks about the sign of a result must be found in the joint graph.  Once it is decided what
is packed, nothing keeps them apart any longer: the sign of a packed input's norm is exact (``ops/low_bit/graph.py``).

It is done where Triton kernels compute norms; elsewhere results would have other last bits.
"""

from typing import Any

import torch
from torch import fx

from ... import _backend
from ...activation import TABLE, Activation
from ...ops.low_bit.graph import unpack_op
from ...ops.norm.graph import norm_act, norm_act_backward
from .. import op_table
from ..graph import arguments_of, has_same_form, items_of, name_of, node_at, value_of

aten = torch.ops.aten
# Where the name and the parameter of the activation stand among the arguments of the two ops.
FORWARD, BACKWARD = slice(8, 10), slice(7, 9)
# The activations whose result has the sign of its argument, by the name of the op, and of the op of the gradient.
ACTIVATIONS = {row.name: row for row in op_table.ROWS if row.keeps_sign}
GRADIENTS = {row.backward: row for row in ACTIVATIONS.values()}


def rewrite(graph: fx.Graph) -> int:
    """Joins these pairs, and returns their number."""
    # First backward, because a gate may be all that reads the result of a norm beside its activation.
    backward = [_join_gradient(graph, node) for node in graph.nodes if node.target is norm_act_backward]
    if any(backward):
        # Without their gates, some norms that backward recomputes have no reader left.
        graph.eliminate_dead_code()
    forward = [_join(graph, node) for node in graph.nodes if node.target is norm_act]
    return sum(backward) + sum(forward)


def _activation_of(node: fx.Node, table: dict[str, op_table.OpRow]) -> Activation | None:
    """The activation of one of these tables that a node computes, or whose gradient it computes."""
    row = table.get(name_of(node))
    if row is None:
        return None
    given = arguments_of(node)
    if any(given.get(name, value) != value for name, value in row.fixed):
        return None
    if not row.parameter:
        return Activation(row.name, 0.0)
    param = given[row.parameter]
    # A result tells the sign of its argument only if the slope is positive.
    return Activation(row.name, float(param)) if isinstance(param, (int, float)) and param > 0 else None


def asks_for_sign(node: fx.Node) -> bool:
    """Whether a node asks on which side of 0 a value is."""
    return node.target in (aten.le.Scalar, aten.gt.Scalar) and bool(node.args[1] == 0)


def _may_join(norm: fx.Node, x: fx.Node, act: slice) -> bool:
    """Whether a norm with the input ``x`` has no activation, and a kernel."""
    return TABLE[str(norm.args[act.start])].identity and _backend.takes_triton(value_of(x).device)


def _put(norm: fx.Node, act: Activation, place: slice) -> None:
    norm.args = (*norm.args[: place.start], *act, *norm.args[place.stop :])


def _join(graph: fx.Graph, norm: fx.Node) -> bool:
    y = items_of(norm).get(0)
    if y is None or not _may_join(norm, node_at(norm, 0), FORWARD):
        return False
    # The result of such an activation has the sign of its argument.
    others = [user for user in y.users if not asks_for_sign(user)]
    node = others[0] if len(others) == 1 else norm
    act = _activation_of(node, ACTIVATIONS)
    if act is None or not has_same_form(value_of(y), value_of(node)):
        return False
    _put(norm, act, FORWARD)
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return True


def _join_gradient(graph: fx.Graph, norm: fx.Node) -> bool:
    g: Any = norm.args[0]
    act = _activation_of(g, GRADIENTS)
    if act is None or len(g.users) != 1 or not _may_join(norm, node_at(norm, 1), BACKWARD):
        return False
    dz = node_at(g, 0)
    if value_of(dz).dtype != value_of(g).dtype or not _computes_again(_argument_of(node_at(g, 1), act), norm):
        return False
    _put(norm, act, BACKWARD)
    norm.replace_input_with(g, dz)
    graph.erase_node(g)
    return True


def _argument_of(node: fx.Node, act: Activation) -> fx.Node:
    """The argument of an activation, if ``node`` is its result, or else the node itself."""
    return node_at(node, 0) if _activation_of(node, ACTIVATIONS) == act else node


def _computes_again(y: fx.Node, backward: fx.Node) -> bool:
    """Whether a node is the result of the norm of which ``backward`` is the gradient."""
    forward = y.args[0] if y.args else None
    if not isinstance(forward, fx.Node) or forward.target is not norm_act or items_of(forward).get(0) is not y:
        return False
    x, weight, bias, residual, *others = forward.args[:8]
    given = arguments_of(forward)
    statistics = others[2:] if given["own"] else others[:2]
    mine, theirs = (x, weight, bias, residual, *statistics), backward.args[1:7]
    return forward.args[8:] == backward.args[7:-2] and all(map(_are_equal, mine, theirs))


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two arguments have the same value: the same node, or a value that is unpacked twice."""
    if a is b:
        return True
    both = isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return both and a.target is b.target is unpack_op._opoverload and a.args == b.args
