"""A norm and the sum after it as one op, where the norm is computed from statistics that are known.

    norm(x) + y        three reads and two writes of a tensor become two reads and one write

Without the option "bits" norms are captured with their residuals (``capture/norms.py``).  With it they are captured
apart, because what backward asks about the sum must be found in the joint graph.  Once it is decided what is packed,
the norms that backward recomputes get their residuals here, and those of forward in its code.

It is done where Triton kernels compute norms; elsewhere results would have other last bits.
"""

from typing import Any

import torch
from torch import fx

from ... import _backend
from ...activation import TABLE
from ...ops.norm.graph import norm_act
from ..graph import arguments_of, has_same_form, is_tensor, items_of, node_at, value_of

aten = torch.ops.aten


def rewrite(graph: fx.Graph) -> int:
    """Puts residuals into these norms, and returns their number."""
    return sum(_join(graph, node) for node in graph.nodes if node.target is aten.add.Tensor)


def _join(graph: fx.Graph, added: fx.Node) -> bool:
    """The norm of one of the two terms gets the other one, and goes where the sum is."""
    given = arguments_of(added)
    terms = [given["self"], given["other"]]
    if given["alpha"] != 1 or not all(is_tensor(term) for term in terms):
        return False
    for y, residual in (terms, terms[::-1]):
        if _may_join(y, residual, added):
            norm = node_at(y, 0)
            norm.update_arg(3, residual)
            added.prepend(norm)
            added.prepend(y)
            added.replace_all_uses_with(y)
            graph.erase_node(added)
            return True
    return False


def _may_join(y: fx.Node, residual: fx.Node, added: fx.Node) -> bool:
    """Whether a norm without an activation makes ``y`` for the sum alone, and the residual has the form of both."""
    norm: Any = y.args[0] if y.args else None
    if residual is y:
        # A sum of a result with itself, or with its detached form.
        return False
    if not isinstance(norm, fx.Node) or norm.target is not norm_act or items_of(norm) != {0: y}:
        return False
    norm_given = arguments_of(norm)
    free = norm_given["residual"] is None and norm_given["mean"] is not None
    if not free or not TABLE[norm_given["activation"]].identity or set(y.users) != {added}:
        return False
    value = value_of(y)
    alike = has_same_form(value, value_of(residual)) and has_same_form(value, value_of(added))
    return alike and _backend.takes_triton(value.device)
