"""A joint graph of forward and backward, as AOTAutograd traces it: what its nodes are, and new nodes in it.

A cheap node may be recomputed: it gives the same result, without much arithmetic.  A compute-intensive op is a
convolution, a matrix product or attention.  It is kept, unless a second run is nearly free, as is the result of an op
of another package, and what is cheap follows from it.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from .. import _torch
from ..ops.norm.graph import GradientCall, NormCall
from .op_table import FORM, OF_OP, UNKNOWN, OpRow

# The name of what a checkpoint in the model says of a node, or the compiler: whether it is saved (``node.meta``).
POLICY = "recompute"
# The note of ``note_written_later`` on an argument.
WRITTEN_LATER = "fusedseg_written_later"


def _tensors_in(value: object) -> list[Tensor]:
    return [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]


def tensors_of(node: fx.Node) -> list[Tensor]:
    """The results of a node, which are tensors without values."""
    return _tensors_in(value_of(node))


def hint_of(size: int | torch.SymInt) -> int:
    """A size as a number.  A symbolic size has the size of the example as its hint; reading the hint adds no guard."""
    return size if isinstance(size, int) else size.node.hint or 1


def numel_of(t: Tensor) -> int:
    """The number of elements, with hints in place of symbolic sizes."""
    return math.prod(map(hint_of, t.shape))


def hinted(t: Tensor) -> Tensor:
    """The tensor without values; where its sizes are symbols, one that has their hints."""
    if all(isinstance(size, int) for size in (*t.shape, *t.stride())):
        return t
    sizes, strides = (list(map(hint_of, of)) for of in (t.shape, t.stride()))
    return torch.empty_strided(sizes, strides, dtype=t.dtype, device="meta")


def size_of(node: fx.Node) -> int:
    """The number of elements of the largest result."""
    return max(map(numel_of, tensors_of(node)), default=0)


def outputs_of(graph: fx.Graph) -> list[Argument]:
    """What a graph returns, one after the other."""
    (returned,) = graph.output_node().args
    return list(returned) if isinstance(returned, (list, tuple)) else [returned]


def is_op(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(node.target, _torch.OpOverload)


def op_of(node: object) -> Any:
    """The overload of the op that a node calls; None for other nodes."""
    return node.target if is_op(node) else None


def node_at(node: fx.Node, place: int) -> fx.Node:
    """An argument that is a node."""
    argument = node.args[place]
    assert isinstance(argument, fx.Node)
    return argument


def nodes_at(node: fx.Node, place: int) -> list[fx.Node]:
    """An argument that is a list of nodes."""
    argument = node.args[place]
    assert isinstance(argument, (list, tuple))
    return [source for source in argument if isinstance(source, fx.Node)]


def captured_value_of(node: object) -> Any:
    """The tensor without values that Dynamo has computed for a node of a captured graph; None for other results."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def captured_tensors_of(node: fx.Node) -> list[Tensor]:
    """The tensors among the results of a node of a captured graph."""
    return _tensors_in(node.meta.get("example_value"))


def captured_arguments_of(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call of a captured graph by name; ``names`` are those of the first ones."""
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def nodes_from(first: fx.Node, end: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph from one on, before another one."""
    while first is not end:
        yield first
        first = first.next


def in_one_grad_mode(first: fx.Node, last: fx.Node) -> bool:
    """Whether no call between two calls of a captured graph switches gradients on or off."""
    return not any(map(_torch.changes_grad_mode, nodes_from(first, last)))


def is_gradient(node: fx.Node) -> bool:
    """Whether a node is a gradient that backward is given."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def following(graph: fx.Graph) -> set[fx.Node]:
    """The gradients that backward is given, and the nodes that are computed from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gradient(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in op_of(node).tags


# The norms of this package that stand in graphs for PyTorch's.
_NORMS = ("fusedseg::norm", "fusedseg::norm_backward")


@functools.cache
def _name_of_op(op: Any) -> str:
    # A graph asks for the names of its ops hundreds of thousands of times.
    return op._schema.name.removeprefix("aten::").removeprefix("prims::")


def _name_in_the_table(node: object) -> str:
    """The name of the op of a node as ``op_table.py`` has it: with its namespace, unless that is aten or prims.

    A norm of this package that is not plain has no row.
    """
    name = _name_of_op(node.target) if is_op(node) else ""
    return "" if name in _NORMS and NormCall.of(node) is GradientCall.of(node) is None else name


def name_of(node: object) -> str:
    """The name of the aten op of a node, or of such a norm, without its overload; "" for other nodes."""
    name = _name_in_the_table(node)
    if name in _NORMS:
        return name.removeprefix("fusedseg::")
    return "" if "::" in name else name


def row_of(node: object) -> OpRow:
    """The row of ``op_table.py`` for the op of a node; ``UNKNOWN`` for other nodes and for ops without a row."""
    return OF_OP.get(_name_in_the_table(node), UNKNOWN)


def reads_size_alone(node: fx.Node) -> bool:
    """Whether a node reads the size of its argument, and no values."""
    return row_of(node).reads == FORM


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of an op by their names in its schema, with defaults."""
    schema = op_of(node)._schema.arguments
    given = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    return given | dict(zip((arg.name for arg in schema), node.args, strict=False)) | node.kwargs


def value_of(node: fx.Node) -> Any:
    """The result of a node: tensors without values."""
    return node.meta.get("val")


def is_tensor(node: object) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and isinstance(value_of(node), Tensor)


def is_cast(node: fx.Node) -> bool:
    """Whether a node copies a tensor to another dtype on the same device; in the same call it may change strides."""
    if name_of(node) != "_to_copy":
        return False
    source, value = value_of(node_at(node, 0)), value_of(node)
    return source.dtype != value.dtype and source.device == value.device


def items_of(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that pick one of the results of a node, by the place of the result."""
    return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]


def last_readers(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last reader of each node; the node itself if nobody reads it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        last |= dict.fromkeys((node, *node.all_input_nodes), node)
    return last


def nbytes_of(node: fx.Node) -> int:
    """The bytes of the results of a node, as if none of them were a view."""
    return sum(numel_of(t) * t.dtype.itemsize for t in tensors_of(node))


def is_compute_intensive(node: fx.Node) -> bool:
    """Whether the node is a convolution, a matrix product or attention."""
    from torch.utils.flop_counter import flop_registry

    return is_op(node) and op_of(node).overloadpacket in flop_registry


def is_cheap(node: fx.Node) -> bool:
    """Whether the compiler may recompute the node, with the same result and without much arithmetic."""
    if not is_op(node) or writes(node) or is_random(node):
        return False
    if any(isinstance(value_of(source), torch.SymFloat) for source in node.all_input_nodes):
        # The compiler cannot keep such a number for backward.
        return False
    if row_of(node).cheap:
        return True
    op = op_of(node)
    return op.namespace in ("aten", "prims") and (torch.Tag.pointwise in op.tags or op.is_view)


def flops_of(node: fx.Node) -> int:
    """The arithmetic of a compute-intensive op, where a multiplication and a sum are two; 0 for other nodes."""
    if not is_compute_intensive(node):
        return 0
    from torch.utils.flop_counter import flop_registry

    def numbers(value: object) -> Any:
        return torch.Size(map(hint_of, value.shape)) if isinstance(value, Tensor) else value

    args, kwargs, out = _torch.tree_map(numbers, fx.map_arg((node.args, node.kwargs, node), value_of))
    return int(flop_registry[op_of(node).overloadpacket](*args, **kwargs, out_val=out))


def call(
    graph: fx.Graph, target: Callable[..., object], *args: Argument, before: fx.Node, **kwargs: Argument
) -> fx.Node:
    """A new node before another one; its result is computed on tensors without values."""
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta["val"] = computed(target, node.args, node.kwargs)
    return node


def computed(
    target: Callable[..., object],
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument],
    value: Callable[[fx.Node], Any] = value_of,
) -> Any:
    """The result of a call on tensors without values; ``value`` gives those of nodes among the arguments."""
    given, named = fx.map_arg((args, kwargs), value)
    sources = _torch.tree_leaves((given, named))
    mode = next((t.fake_mode for t in sources if isinstance(t, _torch.FakeTensor)), None)
    with mode or nullcontext(), _torch.python_dispatcher():
        return target(*given, **named)


def form_in(graph: fx.Graph, node: fx.Node, before: fx.Node) -> tuple[list[int | fx.Node], list[int | fx.Node]]:
    """The sizes and the strides of a result: numbers, and new nodes for symbolic ones."""
    value = value_of(node)

    def number(known: object, op: Callable[..., object], place: int) -> int | fx.Node:
        return known if isinstance(known, int) else call(graph, op, node, place, before=before)

    sizes = [number(n, torch.ops.aten.sym_size.int, place) for place, n in enumerate(value.shape)]
    return sizes, [number(n, torch.ops.aten.sym_stride.int, place) for place, n in enumerate(value.stride())]


def behind(node: fx.Node) -> fx.Node:
    """The node right behind another one and its other results."""
    after = node.next
    while after.target is operator.getitem or after.op == "placeholder":
        after = after.next
    return after


def copied(graph: fx.Graph, node: fx.Node, swapped: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
    """A second node of the same call that reads other inputs."""
    with graph.inserting_before(before):
        return graph.node_copy(node, lambda source: swapped.get(source, source))


def twin_of(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of a graph, and for each node its copy."""
    twin, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    twin.output(twin.graph_copy(graph, twins))
    twin.output_node().meta.update(graph.output_node().meta)
    return twin, twins


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A module with a copy of the graph, which has the same constants."""
    copy = fx.GraphModule(module, twin_of(module.graph)[0])
    copy.meta.update(module.meta)
    return copy


def splice(graph: fx.Graph, inner: fx.Graph, sources: Sequence[fx.Node], before: fx.Node) -> list[fx.Node]:
    """Writes the calls of another graph before a node, for these inputs, and returns its results."""
    env: dict[object, fx.Node] = dict(zip(inner.find_nodes(op="placeholder"), sources, strict=True))
    with graph.inserting_before(before):
        for node in inner.nodes:
            if node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
    return [env[result] for result in outputs_of(inner)]


def number_of(size: object) -> int | None:
    """A size, or the node of a size, as a number; None if the size depends on the inputs of the graph."""
    known = value_of(size) if isinstance(size, fx.Node) else size
    return known.node.maybe_as_int() if isinstance(known, torch.SymInt) else known  # type: ignore[return-value]


def has_symbols(*values: Tensor) -> bool:
    """Whether a size of these tensors is a symbol."""
    return any(not isinstance(n, int) for value in values for n in value.shape)


def is_alike(x: object, result: object) -> bool:
    """Whether two tensors have the same dtype, shape and strides, and no two elements of one share memory."""
    if not isinstance(x, Tensor) or x.dim() == 0 or not has_same_form(x, result):
        return False
    return all(not isinstance(s, int) or s > 0 for s in x.stride()) if has_symbols(x) else is_dense(x)


def has_same_form(x: Tensor, other: object) -> bool:
    """Whether two tensors have the same dtype, device, shape and strides."""
    if not isinstance(other, Tensor) or x.dtype != other.dtype or x.device != other.device or x.dim() != other.dim():
        return False
    # Equal expressions of symbolic sizes are equal sizes; nothing is asked that would become a guard.
    return [str(n) for n in (*x.shape, *x.stride())] == [str(n) for n in (*other.shape, *other.stride())]


def is_dense(x: Tensor) -> bool:
    """Whether a tensor lies in memory without gaps, and no two elements share memory."""
    pairs, expected = zip(x.stride(), x.shape, strict=True), 1
    for step, n in sorted(pairs, key=lambda pair: (hint_of(pair[0]), hint_of(pair[1]))):
        if hint_of(n) != 1:
            # Nothing is asked of symbolic sizes that would become a guard.
            if not _torch.known(step == expected):
                return False
            expected = n * expected
    return True


class Outputs(NamedTuple):
    """The first ``number`` outputs of a joint graph, which forward returns.

    changeable: the places of those that eager mode does not keep for backward.  A program may change them in place
        before backward, so backward here must not read them either.
    eager: the bytes that eager mode keeps for backward, where a budget asks for them.
    """

    number: int
    changeable: frozenset[int] = frozenset()
    eager: int = 0


class Joint:
    """Which part of a joint graph a node belongs to.

    Args:
        graph: the graph.
        outputs: those of its outputs that forward returns.
        handed: nodes that forward computes although nothing of forward reads them.

    Attributes:
        backward: the gradients that backward is given, and the nodes that are computed from them.
        forward: the nodes that forward needs.
        returned: what forward returns, and with it lives at least until forward ends.
        changeable: the nodes in the memory of a result that the program may change before backward.
        free_to_save: the results of forward that backward may read; they live anyway.
        overwritten: arguments that are written to before backward, such as running statistics, and views of them:
            backward would find other values there.
    """

    def __init__(self, graph: fx.Graph, outputs: Outputs, handed: Iterable[fx.Node] = ()) -> None:
        self.graph = graph
        self.outputs = outputs
        all_outputs, roots = outputs_of(self.graph), roots_of(graph)
        self.returned = {node for node in all_outputs[: outputs.number] if isinstance(node, fx.Node)}
        self.gradients = [node for node in all_outputs[outputs.number :] if isinstance(node, fx.Node)]
        changed = {roots[node] for k in outputs.changeable if isinstance(node := all_outputs[k], fx.Node)}
        self.changeable = {node for node, root in roots.items() if root in changed and root.op == "call_function"}
        self.free_to_save = self.returned - self.changeable
        self.end = graph.output_node()
        self.backward = following(graph) - {self.end}
        writing = [node for node in self.graph.nodes if writes(node)]
        self.forward = {*self.returned, *writing, *handed} - self.backward
        for node in reversed(self.graph.nodes):
            if node in self.forward:
                self.forward.update(node.all_input_nodes)
        self.overwritten = {node.args[0] for node in writing}
        self.overwritten |= {node for node in self.graph.nodes if node.meta.get(WRITTEN_LATER)}
        for node in self.graph.nodes:
            if calls_view(node) and any(n in self.overwritten for n in node.all_input_nodes):
                self.overwritten.add(node)


def roots_of(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one whose memory its result lies in."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        root = node
        if calls_view(node):
            root = next((roots[source] for source in node.all_input_nodes if source in roots), node)
        elif node.target is operator.getitem:
            # One of several results; they may be views, as those of split.
            source = node.all_input_nodes[0]
            root = roots[source] if calls_view(source) else node
        roots[node] = root
    return roots


def calls_view(node: fx.Node) -> bool:
    """Whether a node calls an op whose result lies in the memory of its argument, whatever its schema says."""
    return is_op(node) and (op_of(node).is_view or row_of(node).aliases)


def has_own_memory(node: fx.Node) -> bool:
    """Whether no other tensor than its views lies in the memory of a result, and that memory is no larger than it.

    The schema of an op does not say so, nor do tensors without values: ``unsafe_split`` returns parts of its argument,
    and ``col2im`` a tensor in memory of several times its size.  So ops that the table does not know are not trusted.
    The memory of a view is that of what it shows.
    """
    made = node_at(node, 0) if node.target is operator.getitem else node
    if calls_view(made):
        return has_own_memory(made.all_input_nodes[0])
    op = op_of(made)
    is_known = op is None or row_of(made) is not UNKNOWN
    return is_known or op.namespace == "fusedseg" or torch.Tag.pointwise in op.tags


def writes(node: fx.Node) -> bool:
    return is_op(node) and op_of(node)._schema.is_mutable


def note_written_later(graph: fx.Graph) -> None:
    """Notes the arguments that may get a new value right after forward, outside of the graph.

    Autograd knows such arguments, and so AOTAutograd lets the graph read a copy of the argument alone.  A pass of
    Inductor leaves copies out, so it runs before that.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and [name_of(user) for user in node.users] == ["clone"]:
            node.meta[WRITTEN_LATER] = True
