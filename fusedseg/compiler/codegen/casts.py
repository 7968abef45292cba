"""Casts of many tensors in one call, for the codegen "aten".

Under autocast a step casts every weight in forward and again in backward, and every gradient of a weight.  A call takes
the host longer than the cast takes the GPU.  So arguments are cast together where the first of them is read, and
results that the graph only returns, such as gradients, at its end.

    w, v = casts(weight_1, weight_2)    PyTorch's ``_foreach_copy_``: one launch for dozens of tensors

A result that is made early needs memory, and so does a gradient that waits for its cast.  It is left where it is if the
peak of the graph would rise.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from ... import _torch
from ...ops.replay import Allocation
from ...ops.together import Casts, Zeros
from ..graph import has_symbols, is_cast, is_dense, nbytes_of, node_at, roots_of, value_of, writes
from ..plan.liveness import Liveness

# The dtypes that PyTorch's kernel for many tensors casts.
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def casts_alone(node: fx.Node) -> bool:
    """Whether a node is a copy that has another dtype than its source, and is like it otherwise."""
    alike = is_cast(node) and value_of(node).layout is torch.strided
    return alike and set(node.kwargs) <= {"dtype", "layout", "device"}


def batch_casts(graph: fx.Graph, liveness: Liveness) -> int:
    """Writes casts of several tensors, and returns their number."""
    # Behind the first write to an argument nothing is moved.
    end = next((node for node in graph.nodes if writes(node)), graph.output_node())
    before = liveness.place_of[end]
    found = [node for node in graph.nodes if casts_alone(node) and _is_plain(node) and liveness.place_of[node] < before]
    of_arguments = [node for node in found if node_at(node, 0).op == "placeholder"]
    roots = roots_of(graph)
    of_results = [node for node in found if _can_wait(node, roots)]
    count = 0
    for nodes in _alike(of_arguments):
        # What does not fit at the first of them may fit at a later one.
        while len(nodes) > 1:
            taken = [node for node in nodes[1:] if _is_early(node, nodes[0], liveness)]
            count += _cast_together(graph, [nodes[0], *taken], nodes[0])
            nodes = [node for node in nodes[1:] if node not in taken]
    for nodes in _alike(of_results):
        count += _cast_together(graph, [node for node in nodes if _is_late(node, end, liveness)], end)
    return count


def _alike(nodes: Iterable[fx.Node]) -> list[list[fx.Node]]:
    """The casts between the same dtypes on the same device, in their order."""
    kinds: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        source, value = value_of(node_at(node, 0)), value_of(node)
        kinds.setdefault((source.dtype, value.dtype, value.device), []).append(node)
    return [*kinds.values()]


def _is_plain(node: fx.Node) -> bool:
    """Whether PyTorch casts such tensors together: without gaps, and with the strides of the result."""
    source, value = value_of(node_at(node, 0)), value_of(node)
    known = {source.dtype, value.dtype} <= DTYPES and value.device.type in _torch.EMPTY_STRIDED
    if not known or has_symbols(source):
        return False
    return bool(source.stride() == value.stride() and is_dense(source))


def _can_wait(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> bool:
    """Whether nothing but the end of the graph reads the result of a cast, and only the cast its source.

    A source that is a part of a larger tensor would keep all of it.
    """
    source = node_at(node, 0)
    root = roots[source]
    whole = root.op == "call_function" and nbytes_of(root) == nbytes_of(source)
    return whole and set(source.users) == {node} and set(node.users) == {node.graph.output_node()}


def _is_early(node: fx.Node, first: fx.Node, liveness: Liveness) -> bool:
    """Whether the result of a cast may be alive from the place of another one on."""
    return liveness.takes((liveness.place_of[first], liveness.place_of[node] - 1, nbytes_of(node)))


def _is_late(node: fx.Node, end: fx.Node, liveness: Liveness) -> bool:
    """Whether the source of a cast may be alive until the end of the graph, in place of the result."""
    source, result = nbytes_of(node_at(node, 0)), nbytes_of(node)
    last = liveness.place_of[end]
    return liveness.takes((liveness.place_of[node] + 1, last - 1, source - result), (last, last, source))


def _cast_together(graph: fx.Graph, nodes: Sequence[fx.Node], before: fx.Node) -> int:
    """Writes one call for these casts, and returns 1; for a single one it writes nothing, and returns 0."""
    if len(nodes) < 2:
        return 0
    put_together(graph, nodes, before, Casts, *(node_at(node, 0) for node in nodes))
    return 1


def put_together(
    graph: fx.Graph, nodes: Sequence[fx.Node], before: fx.Node, make: type[Casts | Zeros], *args: Argument
) -> None:
    """Writes one call of ``make(forms, device)``, whose results are those of ``nodes``, in their place."""
    values = [value_of(node) for node in nodes]
    forms = tuple(Allocation(tuple(t.shape), t.stride(), t.dtype) for t in values)
    with graph.inserting_before(before):
        together = graph.call_function(make(forms, values[0].device), args)
        together.meta["val"] = tuple(values)
        for place, node in enumerate(nodes):
            part = graph.call_function(operator.getitem, (together, place))
            part.meta = dict(node.meta)
            node.replace_all_uses_with(part)
    for node in nodes:
        graph.erase_node(node)
