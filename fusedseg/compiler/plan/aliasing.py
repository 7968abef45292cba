"""In which memory a result may be written: over an input that nobody reads again.

The codegen "aten" writes results so (``codegen/in_place.py``), and the schedule counts their bytes so.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from ... import _torch
from ...ops.norm import graph as norms
from .. import op_table
from ..graph import has_own_memory, has_symbols, is_alike, items_of, name_of, node_at, row_of, value_of

aten = torch.ops.aten
_PACKETS = [getattr(aten, row.backward) for row in op_table.ROWS if row.backward]
# The gradients of activations that can be told where to write.
GRADIENTS = {op.default: op.grad_input for op in _PACKETS if "grad_input" in op.overloads()}


def _softmax_over(op: Any) -> Callable[..., Tensor]:
    """A softmax, or its gradient, that is written over its first argument.

    Kernels reduce a row before they write to it, and then write each value where they read it.  But they write a
    contiguous result, and a trace may say that a tensor is contiguous which is not.
    """
    (into,) = (argument.name for argument in op.out._schema.arguments if argument.is_out)

    def over(x: Tensor, *given: Any) -> Any:
        return op.out(x, *given, **{into: x}) if x.is_contiguous() else op.default(x, *given)

    return over


def _overload(op: str, overload: str) -> Any:
    packet = getattr(aten, op)
    return getattr(packet, overload)


# The op -> its form that writes the result over the first argument.
OVERWRITING: dict[Any, Any] = {
    **{
        _overload(op, row.in_place): _overload(f"{op}_", row.in_place)
        for op, row in op_table.OF_OP.items()
        if row.in_place
    },
    aten.where.self: aten.where.self_out,
    **{op.default: _softmax_over(op) for op in _torch.softmax_ops},
    **GRADIENTS,
}


def overwriting(node: fx.Node) -> Any:
    """The form of a node's function that writes the result over the first argument, or None.

    Before ``codegen/shorter.py`` has run, a norm is still an op, and its form takes other arguments than the op.
    """
    prepared = norms.prepared(node)
    function = node.target if prepared is None else prepared[0]
    if isinstance(function, norms.Backward):
        return replace(function, over=True)
    if isinstance(function, norms.Forward):
        # A norm that writes over its input keeps no mean.
        return replace(function, over=True) if set(items_of(node)) == {0} else None
    return OVERWRITING.get(function)


def may_overwrite(node: fx.Node) -> list[fx.Node]:
    """The arguments over which the result may be written if nobody reads them later."""
    if node.op != "call_function" or overwriting(node) is None:
        return []
    # A sum or a product has the same bits with its arguments exchanged.  The gradient of an activation may be written
    # over what it reads of the activation too.
    exchanged = row_of(node).commutative and len(node.args) == 2 and not node.kwargs
    result = first_result(node)
    given = (
        node.args[1:] if node.target is aten.where.self else node.args[: 1 + (exchanged or node.target in GRADIENTS)]
    )
    if result is None:
        # Nobody reads the first result.
        return []
    alike = [x for x in given if isinstance(x, fx.Node) and is_alike(value_of(x), value_of(result))]
    found = [x for x in alike if has_own_memory(x)]
    if result is node:
        return found
    # A norm of several passes reads its residual after it has written to x.
    return [x for x in found if node.args.count(x) == 1]


def first_result(node: fx.Node) -> Any:
    """The node of the first result of a call."""
    return items_of(node).get(0) if isinstance(value_of(node), tuple) else node


def spent_input(node: fx.Node) -> fx.Node | None:
    """The input of a convolution, if its gradient may be in its memory: the gradient of the weight is the last reader.

    ``codegen/convolution_backward.py`` computes both gradients one after the other then.
    """
    if name_of(node) != "convolution_backward":
        return None
    dy, x, w = (node_at(node, place) for place in range(3))
    transposed, mask = node.args[7], node.args[10]
    assert isinstance(mask, (list, tuple))
    apart = not transposed and x not in (dy, w) and mask[0] and (mask[1] or mask[2])
    if not apart or has_symbols(value_of(dy), value_of(x)):
        return None
    # ``shape_only`` may find no memory for a larger input.
    return x if value_of(dy).numel() >= value_of(x).numel() else None


def gives_memory(node: fx.Node, by_inductor: bool) -> list[fx.Node]:
    """The inputs in whose place a result may be, if nobody reads them later."""
    x = None if by_inductor else spent_input(node)
    return may_overwrite(node) if x is None else [x]
