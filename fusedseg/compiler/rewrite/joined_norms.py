"""Residuals and activations that go into the norm before them.

    norm(x) + y                                  two reads and one write of a tensor in place of three and two
    act(norm(x))                                 one pass over x in place of two
    norm_backward(act_backward(dz, ...), x)      the norm's kernels compute the gate from x

Without the option "bits" norms are captured with both (``capture/stock_norms.py``).  With it they are captured apart,
because what backward asks about the sign of a result must be found in the joint graph.  Once it is decided what is
packed, nothing keeps them apart any longer: the sign of a packed input's norm is exact (``ops/low_bit/graph.py``).

Residuals go into norms with known statistics alone: into those that backward recomputes in the joint graph, and into
those of forward in its code.  Activations go in in the code of both.

It is done where Triton kernels compute norms; elsewhere results would have other last bits.
"""

from typing import Any

import torch
from torch import fx

from ... import _backend
from ...activation import TABLE, Activation
from ...ops.low_bit.graph import unpack_op
from ...ops.norm.graph import GradientCall, NormCall
from .. import op_table
from ..graph import arguments_of, has_same_form, is_tensor, items_of, name_of, node_at, value_of

aten = torch.ops.aten
# The activations whose result has the sign of its argument, by the name of the op, and of the op of the gradient.
ACTIVATIONS = {row.name: row for row in op_table.ROWS if row.keeps_sign}
GRADIENTS = {row.backward: row for row in ACTIVATIONS.values()}


def fuse_residuals(graph: fx.Graph) -> int:
    """Puts residuals into these norms, and returns their number."""
    return sum(_join_residual(graph, node) for node in graph.nodes if node.target is aten.add.Tensor)


def _join_residual(graph: fx.Graph, added: fx.Node) -> bool:
    """The norm of one of the two terms gets the other one, and goes where the sum is."""
    given = arguments_of(added)
    terms = [given["self"], given["other"]]
    if given["alpha"] != 1 or not all(is_tensor(term) for term in terms):
        return False
    for y, residual in (terms, terms[::-1]):
        norm = _norm_of_residual(y, residual, added)
        if norm is not None:
            made = node_at(y, 0)
            made.args = norm._replace(residual=residual).arguments
            added.prepend(made)
            added.prepend(y)
            added.replace_all_uses_with(y)
            graph.erase_node(added)
            return True
    return False


def _norm_of_residual(y: fx.Node, residual: fx.Node, added: fx.Node) -> NormCall | None:
    """The norm without an activation that makes ``y`` for the sum alone, if the residual has the form of both."""
    norm = NormCall.of(y.args[0]) if y.args else None
    if residual is y or norm is None or items_of(node_at(y, 0)) != {0: y}:
        # A sum of a result with itself, or with its detached form; or no norm whose output alone is read.
        return None
    if norm.residual is not None or norm.mean is None or not _may_join(norm) or set(y.users) != {added}:
        return None
    value = value_of(y)
    return norm if has_same_form(value, value_of(residual)) and has_same_form(value, value_of(added)) else None


def fuse_activations(graph: fx.Graph) -> int:
    """Puts activations into norms, and returns their number."""
    # First backward, because a gate may be all that reads the result of a norm beside its activation.
    backward = [_join_gradient(graph, node, norm) for node in graph.nodes if (norm := GradientCall.of(node))]
    if any(backward):
        # Without their gates, some norms that backward recomputes have no reader left.
        graph.eliminate_dead_code()
    forward = [_join_activation(graph, node, call) for node in graph.nodes if (call := NormCall.of(node))]
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


def _may_join(norm: NormCall | GradientCall) -> bool:
    """Whether a norm has no activation, and a kernel."""
    return TABLE[norm.norm.act.name].identity and _backend.takes_triton(value_of(norm.x).device)


def _join_activation(graph: fx.Graph, norm: fx.Node, given: NormCall) -> bool:
    y = items_of(norm).get(0)
    if y is None or not _may_join(given):
        return False
    # The result of such an activation has the sign of its argument.
    others = [user for user in y.users if not asks_for_sign(user)]
    node = others[0] if len(others) == 1 else norm
    act = _activation_of(node, ACTIVATIONS)
    if act is None or not has_same_form(value_of(y), value_of(node)):
        return False
    norm.args = given.with_act(act).arguments
    node.replace_all_uses_with(y)
    graph.erase_node(node)
    return True


def _join_gradient(graph: fx.Graph, norm: fx.Node, given: GradientCall) -> bool:
    g = given.dz
    act = _activation_of(g, GRADIENTS)
    if act is None or len(g.users) != 1 or not _may_join(given):
        return False
    dz = node_at(g, 0)
    y = node_at(g, 1)
    if _activation_of(y, ACTIVATIONS) == act:
        # It is the result of the activation.
        y = node_at(y, 0)
    if value_of(dz).dtype != value_of(g).dtype or not _computes_again(y, given):
        return False
    norm.args = given.with_act(act).arguments
    norm.replace_input_with(g, dz)
    graph.erase_node(g)
    return True


def _computes_again(y: fx.Node, backward: GradientCall) -> bool:
    """Whether a node is the result of the norm of which ``backward`` is the gradient."""
    source: Any = y.args[0] if y.args else None
    forward = NormCall.of(source)
    if forward is None or items_of(source).get(0) is not y or forward.norm != backward.norm:
        return False
    return all(map(_are_equal, forward.reads, backward.reads))


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two arguments have the same value: the same node, or a value that is unpacked twice."""
    if a is b:
        return True
    both = isinstance(a, fx.Node) and isinstance(b, fx.Node)
    return both and a.target is b.target is unpack_op and a.args == b.args
