"""A norm and the sum after it as one op, where the norm is computed from statistics that are known.

    norm(x) + y        three reads and two writes of a tensor become two reads and one write

Without the option "bits" norms are captured with their residuals (``capture/stock_norms.py``).  With it they are
captured apart, because what backward asks about the sum must be found in the joint graph.  Once it is decided what is
packed, the norms that backward recomputes get their residuals here, and those of forward in its code.

It is done where Triton kernels compute norms; elsewhere results would have other last bits.
"""

import torch
from torch import fx

from ... import _backend
from ...activation import TABLE
from ...ops.norm.graph import NormCall
from ..graph import arguments_of, has_same_form, is_tensor, items_of, node_at, value_of

aten = torch.ops.aten


def fuse_residuals(graph: fx.Graph) -> int:
    """Puts residuals into these norms, and returns their number."""
    return sum(_join(graph, node) for node in graph.nodes if node.target is aten.add.Tensor)


def _join(graph: fx.Graph, added: fx.Node) -> bool:
    """The norm of one of the two terms gets the other one, and goes where the sum is."""
    given = arguments_of(added)
    terms = [given["self"], given["other"]]
    if given["alpha"] != 1 or not all(is_tensor(term) for term in terms):
        return False
    for y, residual in (terms, terms[::-1]):
        norm = _norm_that_may_join(y, residual, added)
        if norm is not None:
            made = node_at(y, 0)
            made.args = norm._replace(residual=residual).arguments
            added.prepend(made)
            added.prepend(y)
            added.replace_all_uses_with(y)
            graph.erase_node(added)
            return True
    return False


def _norm_that_may_join(y: fx.Node, residual: fx.Node, added: fx.Node) -> NormCall | None:
    """The norm without an activation that makes ``y`` for the sum alone, if the residual has the form of both."""
    norm = NormCall.of(y.args[0]) if y.args else None
    if residual is y or norm is None or items_of(node_at(y, 0)) != {0: y}:
        # A sum of a result with itself, or with its detached form; or no norm whose output alone is read.
        return None
    free = norm.residual is None and norm.mean is not None
    if not free or not TABLE[norm.norm.act.name].identity or set(y.users) != {added}:
        return None
    value = value_of(y)
    alike = has_same_form(value, value_of(residual)) and has_same_form(value, value_of(added))
    return norm if alike and _backend.takes_triton(value.device) else None
