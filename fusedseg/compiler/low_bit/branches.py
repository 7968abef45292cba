"""How an op of a graph reads a value that was rounded, and ops with branches as pointwise chains of simpler ones.

    linear     a value that is right on average gives a result that is right on average
    smooth     the derivative varies slowly: values in at least 8 bits
    exact      all others: comparisons, and ops that nothing is known about

A result of an op that must read exact values is computed in forward, and is kept; that of a comparison takes one bit a
value.  An op with a branch, such as an activation with a kink, is written as comparisons, choices and linear ops first:
by the compiler's own decomposition, or by the ``pieces`` of its row in ``op_table.py``.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from ... import _torch
from ..graph import calls_view, is_op, is_tensor, items_of, name_of, op_of, row_of, splice, value_of
from ..op_table import EXACT, LINEAR, PRODUCT, SMOOTH


def is_multiplication(node: fx.Node) -> bool:
    """Whether a node multiplies: its result is right on average if its factors do not come from the same rounding."""
    row = row_of(node)
    return row.kind == PRODUCT or row.name == "div"


def kind_of(node: fx.Node, reads: Callable[[Any], bool]) -> str:
    """How a node reads its inputs; ``reads`` tells which of them are rounded."""
    if not is_op(node):
        return LINEAR  # one of several results
    name = name_of(node)
    if name == "div":
        if reads(node.args[1]):
            return EXACT if may_divide_by_zero(node) else SMOOTH
        return LINEAR if "rounding_mode" not in node.kwargs else EXACT
    if name == "pow":
        return SMOOTH if node.args[1] in (1, 2, 3) else EXACT
    if name == "where" and reads(node.args[0]):
        return EXACT
    row = row_of(node)
    kind = EXACT if row.kinks else row.kind
    if calls_view(node) or kind == PRODUCT:
        return LINEAR
    return kind


def may_divide_by_zero(node: fx.Node) -> bool:
    """Whether a node divides by a tensor that may be 0, or that becomes 0 if it is rounded.

    The divisors of a softmax and of functions such as ``softsign`` are far from 0, if they follow rounded values too.
    """
    if name_of(node) != "div" or not is_tensor(node.args[1]):
        return False
    divisor = node.args[1]
    if name_of(divisor) == "sum":
        return not _is_exp_below_largest(divisor.args[0])
    if name_of(divisor) != "add" or name_of(divisor.args[0]) not in ("abs", "exp"):
        return True
    least = divisor.args[1]
    return not isinstance(least, (int, float)) or least < 1


def _is_exp_below_largest(node: object) -> bool:
    """Whether a node is exp(x - max(x)), as in a softmax, so that its sum is at least 1.

    Without the maximum, some sums are far smaller than others, and are rounded to 0 beside them.
    """
    if not is_op(node) or name_of(node) != "exp" or name_of(node.args[0]) != "sub":
        return False
    largest = node.args[0].args[1]  # type: ignore[union-attr]
    while isinstance(largest, fx.Node) and (largest.target is operator.getitem or calls_view(largest)):
        largest = largest.args[0]
    return name_of(largest) in ("amax", "max")


def is_predicate(node: fx.Node) -> bool:
    """Whether the result of a node is true or false for each element."""
    value = value_of(node)
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _is_elementwise(node: fx.Node) -> bool:
    if not is_op(node):
        return False
    return torch.Tag.pointwise in op_of(node).tags or calls_view(node) or not node.all_input_nodes


def pointwise_chain_of(graph: fx.Graph, node: fx.Node) -> list[fx.Node] | None:
    """The results of a node computed by a pointwise chain of simpler nodes right before it; None if none is known."""
    function = row_of(node).pieces or _torch.decomposition(node.target)
    sources = node.all_input_nodes
    values = [value_of(source) for source in sources]
    mode = next((v.fake_mode for v in values if isinstance(v, _torch.FakeTensor)), None)
    if function is None or mode is None or not all(isinstance(v, Tensor) for v in values):
        return None
    places = dict(zip(sources, range(len(sources)), strict=True))

    def run(*tensors: Tensor) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: tensors[places[source]])
        return function(*args, **kwargs)

    with mode, _torch.python_dispatcher():
        traced = make_fx(run, tracing_mode="real")(*values)
    if not all(inner.op in ("placeholder", "output") or _is_elementwise(inner) for inner in traced.graph.nodes):
        return None
    return splice(graph, traced.graph, sources, node)


def write_pointwise_chain(graph: fx.Graph, node: fx.Node) -> bool:
    """Writes an op of backward as a pointwise chain, if there is one; forward can answer the predicates of that."""
    chain = pointwise_chain_of(graph, node)
    if chain is None:
        return False
    if len(chain) == 1 and is_tensor(node):
        node.replace_all_uses_with(chain[0])
    else:
        for place, item in items_of(node).items():
            item.replace_all_uses_with(chain[place])
            graph.erase_node(item)
    graph.erase_node(node)
    return True
