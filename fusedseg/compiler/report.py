"""What the backend has made of a model: ``report``, and ``counted`` for a model that has not run.

All bytes are counted on the graphs, without what a kernel allocates inside itself: with the codegen "aten" on the two
graphs as they run, and for Inductor as if it fused what it can.
"""

import contextvars
import json
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .. import _torch
from .._sizes import change_text, text_of
from ..memory.buffers import peak_if_fused, results
from ..memory.fake import fake_mode
from ..memory.meter import key_of, measure
from . import keep, order
from .joint import flops_of, following, name_of, outputs_of, value_of

# A row shows at most this many ops that are computed again.
NAMES = 6


class Bytes(NamedTuple):
    """What forward keeps for backward, and the most bytes at once, both without inputs and parameters."""

    kept: int
    peak: int


@dataclass
class Graph:
    """A graph that the compiler has captured.

    Attributes:
        calls: the number of calls in it.
        trained: whether it has a backward.
        eager: what eager mode keeps; None for a graph without a backward, and one from the compiler's cache.
        stock: what the compiler's own partitioner keeps; None if nobody has asked for it.
        ours: what the backend keeps; None if ``eager`` is None.
        again: the ops that backward computes again, and how often.
        repeated: the arithmetic of products that backward computes again, as a share of forward's.
        returned: the bytes that the graph returns.
        symbolic: whether it serves several sizes, so that its bytes are not counted.
        ends: why the graph ends where it does, and where that is; "" if it is the last one.
        unpacked: whether the option bits changes nothing, because the step would keep more, or peak higher, with it.
    """

    calls: int
    trained: bool
    eager: Bytes | None = None
    stock: Bytes | None = None
    ours: Bytes | None = None
    again: dict[str, int] = field(default_factory=dict)
    repeated: float = 0.0
    returned: int = 0
    symbolic: bool = False
    ends: str = ""
    unpacked: bool = False

    def lines(self) -> Iterator[str]:
        if not self.trained:
            yield "  runs without a backward, and keeps nothing"
        elif self.symbolic:
            yield "  serves several sizes, so its bytes are not counted"
        elif self.eager is None or self.ours is None:
            yield "  comes from the compiler's cache, uncounted; TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 compiles it anew"
        else:
            for label, place in (("kept for backward", 0), ("at the peak", 1)):
                stock = f"; torch.compile {text_of(self.stock[place])}" if self.stock else ""
                yield change_text(label, self.eager[place], self.ours[place]) + stock
        if self.again:
            most = sorted(self.again.items(), key=lambda row: -row[1])
            names = ", ".join(f"{name} ×{count}" for name, count in most[:NAMES])
            more = f" and {len(most) - NAMES} other ops" if len(most) > NAMES else ""
            share = f", {self.repeated:.1%} of forward's arithmetic" if self.repeated else ""
            yield f"  computed again     {names}{more}{share}"
        if self.unpacked:
            yield "  bits               not used: the step would keep more, or peak higher, with them"
        if self.ends:
            yield f"  ends               {self.ends}"
            yield f"                     The next graph keeps what it reads of {text_of(self.returned)} as it is."


@dataclass
class Report:
    """What the backend has made of a model; ``print(report)`` shows it, ``to_json()`` returns it for programs.

    Attributes:
        name: the class of the model.
        graphs: the graphs that were captured, in the order in which they were compiled.
    """

    name: str
    graphs: list[Graph]

    @property
    def kept(self) -> tuple[int, int]:
        """The bytes that all graphs keep in eager mode, and in the backend."""
        eager = sum(graph.eager.kept for graph in self.graphs if graph.eager is not None)
        return eager, sum(graph.ours.kept for graph in self.graphs if graph.ours is not None)

    def to_json(self) -> str:
        return json.dumps({"model": self.name, "graphs": [asdict(graph) for graph in self.graphs]})

    def __str__(self) -> str:
        count = len(self.graphs)
        lines = [f"{self.name}: {count} graph{'s' if count != 1 else ''}, from eager mode to this backend"]
        for number, graph in enumerate(self.graphs, 1):
            lines += ["", f"Graph {number}, {graph.calls} calls", *graph.lines()]
        eager, ours = self.kept
        if count > 1 and eager:
            lines += ["", f"All graphs keep {text_of(eager)} -> {text_of(ours)} ({ours / eager:.2f})"]
        return "\n".join(lines)


class Captured:
    """A graph as Dynamo has captured it, and its inputs without values: a step of eager mode is counted on it."""

    def __init__(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        self._module, self._inputs = fx.GraphModule(module, graph), [_form(value) for value in example_inputs]
        self._autocast = {
            kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        }

    def bytes(self) -> Bytes:
        with ExitStack() as stack:
            stack.enter_context(fake_mode())
            for kind, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype))
            inputs = [value() if isinstance(value, Form) else value for value in self._inputs]
            found = measure(self._module, *inputs, owned=[x for x in inputs if isinstance(x, Tensor)])
        return Bytes(found.saved, found.peak)


class Form(NamedTuple):
    """An input without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_leaf: bool

    def __call__(self) -> Tensor:
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        made.requires_grad_(self.requires_grad)
        return made if self.is_leaf else made.clone()


def _form(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    shape, stride = tuple(value.shape), tuple(value.stride())
    return Form(shape, stride, value.dtype, value.device, value.requires_grad, value.is_leaf)


class Row(NamedTuple):
    """A compiled graph.

    run, of: weak references to what runs it, and to the module or function that was compiled.
    kind: what the module has in common with others that run the graph; None for a function.
    """

    run: Callable[[], object]
    of: Callable[[], object]
    kind: object
    graph: Graph
    captured: Captured


# The graphs that PyTorch holds, and those whose module or function lives.
_found: list[Row] = []
# The graph that this thread compiles.
_open: contextvars.ContextVar[Graph | None] = contextvars.ContextVar("fusedseg graph", default=None)


def report(compiled: Callable[..., object]) -> Report:
    """What the backend keeps of a compiled model, graph by graph, and what eager mode keeps.

    PyTorch runs the graphs of a model for all models of its class and structure, and each has them in its report.

    Args:
        compiled: a model, or a function, that was compiled with the backend and has run once; or a module that has such
            modules.

    Raises:
        ValueError: the backend has compiled no graph of it.
    """
    target = _torch.uncompiled(compiled)
    parts = set(target.modules()) if isinstance(target, nn.Module) else {target}
    found = [row for row in _found if row.of() in parts]
    if not found:
        called = [part for part in parts if _torch.is_compiled_in_place(part)]
        kinds = {_kind(part) for part in (called if target is compiled else parts) if isinstance(part, nn.Module)}
        found = [row for row in _found if row.run() is not None and row.kind in kinds]
    name = type(target).__name__ if isinstance(target, nn.Module) else target.__name__
    if not found:
        raise ValueError(
            f"fusedseg.compiler.report: the backend has compiled no graph of {name}; call what "
            f'torch.compile(..., backend="fusedseg") returned once before'
        )
    return counted_in_eager_mode(name, [(row.graph, row.captured) for row in found])


def _kind(module: nn.Module) -> object:
    """What two modules have in common of which one runs the graphs of the other one."""
    return type(module), repr(module), tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters())


def counted_in_eager_mode(name: str, found: Sequence[tuple[Graph, Captured]]) -> Report:
    for graph, captured in found:
        if graph.ours is not None and graph.eager is None:
            graph.eager = captured.bytes()
    return Report(name, [graph for graph, _ in found])


@contextmanager
def noting(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[tuple[Graph, Captured]]:
    """A context in which a captured graph is compiled."""
    why = _torch.reason_of_break(module)
    trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
    calls = sum(node.op not in ("placeholder", "output", "get_attr") for node in module.graph.nodes)
    graph, captured = Graph(calls, trained, ends=why), Captured(module, example_inputs)
    token = _open.set(graph)
    try:
        yield graph, captured
    finally:
        _open.reset(token)


def remember(run: Callable[..., object], graph: Graph, captured: Captured) -> None:
    """Notes a graph of what the compiler compiles now; ``run`` runs it."""
    target = _torch.compiling()
    _found[:] = [row for row in _found if row.run() is not None or row.of() is not None]
    if target is not None:
        # PyTorch holds the function inside of those that only disable the compiler.
        runs = weakref.ref(_torch.uncompiled(run))
        kind = _kind(target) if isinstance(target, nn.Module) else None
        _found.append(Row(runs, weakref.ref(target), kind, graph, captured))


def note_after(
    decision: keep.Decision, parts: tuple[fx.GraphModule, fx.GraphModule], outputs: int, fused: bool
) -> None:
    """Notes what the partitioned graphs keep."""
    graph = _open.get()
    if graph is None:
        return
    graph.symbolic = any(isinstance(value_of(node), torch.SymInt) for node in parts[0].graph.nodes)
    if graph.symbolic:
        # Comparing symbolic sizes would make guards of them.
        return
    graph.ours = Bytes(kept_of(parts[0], outputs), peak_of(parts, fused))
    # A result of several stands for its call; a node that the graph has no longer has None as its argument.
    calls = dict.fromkeys(keep.call_node(n) for n in decision.again if n.target is not operator.getitem or n.args[0])
    graph.again = dict(Counter(_readable(call) for call in calls if not keep.is_view(call)))
    graph.repeated = _repeated(*parts)
    graph.returned = sum(_storages(outputs_of(parts[0].graph)[:outputs]).values())


def note_unpacked() -> None:
    """Notes that the graph that is compiled now keeps values as they are, although the option bits is given."""
    graph = _open.get()
    if graph is not None:
        graph.unpacked = True


def _repeated(forward: fx.GraphModule, backward: fx.GraphModule) -> float:
    """The arithmetic in backward that does not follow from a gradient, as a share of forward's."""
    again = set(backward.graph.nodes) - following(backward.graph)
    return sum(map(flops_of, again)) / max(1, sum(map(flops_of, forward.graph.nodes)))


def _readable(node: fx.Node) -> str:
    name = name_of(node) or str(node.target).split(".")[-2 if "." in str(node.target) else 0]
    for part in ("native_", "_legit_functional", "_with_offsets", "_kernel"):
        name = name.replace(part, "")
    return name.strip("_").replace("_", " ")


def kept_of(forward: fx.GraphModule, outputs: int) -> int:
    """The bytes that forward keeps for backward; its first ``outputs`` results are those of the model."""
    return sum(_storages(outputs_of(forward.graph)[outputs:]).values())


def peak_of(parts: tuple[fx.GraphModule, fx.GraphModule], fused: bool) -> int:
    """The most bytes at once of two graphs; ``fused``: elementwise functions are computed inside other kernels."""
    if fused:
        return peak_if_fused(*parts)
    counted = [order.Backward(part.graph) for part in parts]
    return max(of.alive(list(of.as_it_stands(of.graph.nodes).values())).peak[0] for of in counted)


def _storages(nodes: Sequence[object]) -> dict[int, int]:
    """The bytes of the storages of nodes that are no inputs."""
    made = [node for node in nodes if isinstance(node, fx.Node) and node.op == "call_function"]
    # A result may be a view of an input.
    given = {key_of(t) for node in made for n in node.all_input_nodes if n.op == "placeholder" for t in results(n)}
    sizes = {key_of(t): t.untyped_storage().nbytes() for node in made for t in results(node)}
    return {key: n for key, n in sizes.items() if key not in given}
