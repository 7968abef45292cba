"""Writing results over inputs that nobody reads again, for the codegen "aten".

A functional graph computes relu(x) into new memory while x is alive; eager mode writes over x.  Here an elementwise op
becomes its in-place form if its first argument, or one term of a sum, is dead after it, is no argument of the graph,
and has the dtype, shape and strides of the result.  The gradient of an activation is written over the gradient that it
reads.  So are a softmax and its gradient, which would be the third tensor of its size at the peak of an attention.
Running statistics are written where they are, in place of a copy that is copied back.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .. import _torch, rules
from ..ops.norm import graph as norms
from .joint import calls_view, has_same_form, is_alike, is_op, items_of, outputs_of, roots_of, value_of

aten = torch.ops.aten
COMMUTATIVE, OTHER = (aten.add.Tensor, aten.mul.Tensor), (aten.sub.Tensor, aten.div.Tensor)
_ACTIVATIONS = [row for row in rules.ROWS if row.backward]
_GRADIENTS = [getattr(aten, row.backward) for row in _ACTIVATIONS]
# How these forms, and that of a choice by a mask, name the tensor that they write to.
INTO = {"grad_input": "grad_input", "self_out": "out"}


def _softmax_over(op: Any) -> Callable[..., Tensor]:
    """A softmax, or its gradient, that is written over its first argument.

    Kernels reduce a row before they write to it, and then write each value where they read it.  But they write a
    contiguous result, and a trace may say that a tensor is contiguous which is not.
    """
    (into,) = (argument.name for argument in op.out._schema.arguments if argument.is_out)

    def over(x: Tensor, *given: Any) -> Any:
        return op.out(x, *given, **{into: x}) if x.is_contiguous() else op.default(x, *given)

    return over


# The op -> its form that writes the result over the first argument.
OVERWRITING: dict[Any, Any] = {
    **{
        getattr(aten, op).default: getattr(aten, f"{op}_").default
        for op in (row.ops[0] for row in _ACTIVATIONS)
        if hasattr(aten, f"{op}_")
    },
    **{op: getattr(aten, f"{op._opname}_").Tensor for op in (*COMMUTATIVE, *OTHER)},
    aten.where.self: aten.where.self_out,
    **{op.default: _softmax_over(op) for op in _torch.softmax_ops},
    # Not each of the gradients can be told where to write.
    **{op.default: op.grad_input for op in _GRADIENTS if "grad_input" in op.overloads()},
    **norms.OVER,
}


# Norms that return their running statistics, moved, as the results 3 and 4: the place of the first among the arguments,
# and the form that moves them where they are.
MOVING: dict[Any, tuple[int, Any]] = {
    _torch.functional_batch_norm: (3, _torch.writing_batch_norm),
    **norms.MOVING,
}


def _last_reads(graph: fx.Graph, roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """For each memory the place of the last node that reads it."""
    last: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            last[roots[source]] = place
    return last


def may_overwrite(node: fx.Node) -> list[fx.Node]:
    """The arguments over which the result may be written if nobody reads them later."""
    if node.op != "call_function" or _overwriting(node) is None:
        return []
    # A sum or a product has the same bits with its arguments exchanged.
    exchanged = node.target in COMMUTATIVE and len(node.args) == 2 and not node.kwargs
    result = _result(node)
    given = node.args[1:] if node.target is aten.where.self else node.args[: 1 + exchanged]
    if result is None:
        # Nobody reads the first result.
        return []
    return [x for x in given if isinstance(x, fx.Node) and is_alike(value_of(x), value_of(result))]


def _result(node: fx.Node) -> Any:
    """The node of the first result of a call."""
    return items_of(node).get(0) if isinstance(value_of(node), tuple) else node


def results(graph: fx.Graph) -> int:
    """Makes ops write their results over their arguments, and returns how many do."""
    roots = roots_of(graph)
    last = _last_reads(graph, roots)
    # For each result the node that writes it, and what it is written over.
    written: dict[fx.Node | None, tuple[fx.Node, fx.Node]] = {}
    for place, node in enumerate(graph.nodes):
        x = next((x for x in may_overwrite(node) if _is_free(node, x, place, roots, last)), None)
        if x is None:
            continue
        result, root = _result(node), roots[x]
        node.target = _overwriting(node)
        into = INTO.get(node.target._overloadname) if is_op(node) else None
        if into is not None:
            node.kwargs = {**node.kwargs, into: x}
        elif x is not node.args[0]:
            node.args = (x, node.args[0])
        # The result lies in the memory of x, so that memory is read as long as the result is.
        for other, of in roots.items():
            if of is result:
                roots[other] = root
        last[root] = max(place, last.get(result, place))
        written[result] = node, x
    _return_no_views(graph, written)
    return len(written)


def _return_no_views(graph: fx.Graph, written: dict[fx.Node | None, tuple[fx.Node, fx.Node]]) -> None:
    """No output of a graph is a view because it was written over one, as over the output of an instance norm.

    A program may change an output in place, and PyTorch refuses that for a view which a function has returned.
    """
    for output in outputs_of(graph):
        if not isinstance(output, fx.Node) or output not in written:
            continue
        node, x = written[output]
        while x in written:
            node, x = written[x]
        if calls_view(x):
            with graph.inserting_before(node):
                node.replace_input_with(x, graph.call_function(without_views, (x,)))


def without_views(x: Tensor) -> Tensor:
    """The same memory as a tensor that is no view to autograd."""
    return x.data


def _is_free(node: fx.Node, x: fx.Node, place: int, roots: dict[fx.Node, fx.Node], last: dict[fx.Node, int]) -> bool:
    """Whether the result of the node at ``place`` may be written over its argument ``x``."""
    root, others = roots[x], [source for source in node.all_input_nodes if source is not x]
    if root.op != "call_function" or last[root] > place or any(roots[other] is root for other in others):
        return False
    return _is_whole(value_of(root), value_of(x))


def _is_whole(root: object, x: Tensor) -> bool:
    """Whether a view covers the memory that it lies in; ``root`` may have several results."""
    return not isinstance(root, Tensor) or str(root.numel()) == str(x.numel())


def _overwriting(node: fx.Node) -> Any:
    """The form of a node's function that writes the result over the first argument, or None."""
    if node.target in (norms.norm_act, norms.forward_moving) and set(items_of(node)) != {0}:
        # A norm that writes over its input keeps no mean.
        return None
    return OVERWRITING.get(node.target)


def statistics(graph: fx.Graph) -> int:
    """Norms move their running statistics where they are, and counters are increased there."""
    taken = _take_apart(graph)
    outputs = {node for node in outputs_of(graph) if isinstance(node, fx.Node)}
    copies = {node.args[0]: node for node in graph.nodes if node.target is aten.copy_.default}
    count = 0
    for node in list(graph.nodes):
        if node.target in MOVING:
            count += _norm(graph, node, copies, outputs)
        elif node.target is aten.add.Tensor and node.args[0] in copies:
            buffer = node.args[0]
            copy = copies[buffer]
            alone = set(node.users) == {copy} and not node.kwargs and set(buffer.users) == {node, copy}
            if alone and buffer.op == "placeholder" and _is_counter(value_of(buffer), value_of(node)):
                graph.erase_node(copy)
                node.target = aten.add_.Tensor
                count += 1
    for buffer, added in taken:
        _add_at_the_end(graph, buffer, added)
    return count


def _take_apart(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """What ``dead_bias.move_mean`` adds to a new running mean is to be added where the mean is, after all else.

    The norm's own new mean is copied to the buffer in place of the sum.  Returns the buffers and the sums, which nobody
    reads any more.
    """
    copies, roots, taken = graph.find_nodes(op="call_function", target=aten.copy_.default), roots_of(graph), []
    changed = {copy.args[0] for copy in copies}
    for copy in copies:
        buffer, added = copy.args
        if not isinstance(added, fx.Node) or added.target is not aten.add.Tensor or set(added.users) != {copy}:
            continue
        new, more = added.args
        if not isinstance(new, fx.Node) or new.target is not operator.getitem or set(new.users) != {added}:
            continue
        # At the end of the graph another buffer may have its next value already.
        still = isinstance(more, fx.Node) and roots[more] not in changed
        if still and all(has_same_form(value_of(t), value_of(buffer)) for t in (new, added)):
            copy.update_arg(1, new)
            added.update_arg(0, more)
            taken.append((buffer, added))
    return taken


def _add_at_the_end(graph: fx.Graph, buffer: fx.Node, added: fx.Node) -> None:
    with graph.inserting_before(graph.output_node()):
        late = graph.call_function(aten.add_.Tensor, (buffer, *added.args[1:]), dict(added.kwargs))
    late.meta["val"] = value_of(buffer)
    graph.erase_node(added)


def _is_counter(buffer: object, more: Tensor) -> bool:
    return isinstance(buffer, Tensor) and buffer.dim() == more.dim() == 0 and buffer.dtype == more.dtype


def _norm(graph: fx.Graph, node: fx.Node, copies: dict[Any, fx.Node], outputs: set[fx.Node]) -> bool:
    """The norm itself writes its running statistics, if their new values are copied there and not read otherwise."""
    items, (first, moving) = items_of(node), MOVING[node.target]
    pairs = [(node.args[first], 3), (node.args[first + 1], 4)]
    for buffer, place in pairs:
        new, copy = items.get(place), copies.get(buffer)
        if new is None or copy is None or copy.args[1] is not new or set(new.users) != {copy} or new in outputs:
            return False
        if buffer.op != "placeholder" or set(buffer.users) != {node, copy}:  # type: ignore[union-attr]
            return False
    for buffer, place in pairs:
        graph.erase_node(copies[buffer])
        graph.erase_node(items[place])
    node.target = moving
    return True
