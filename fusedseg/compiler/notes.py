"""What is noted of each graph while it is compiled, and which module or function has it: ``report`` finds it there."""

import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from .. import _torch
from . import counting
from .eager_step import Captured
from .graph import value_of
from .plan.decision import Decision
from .report import Graph, Report, counted_in_eager_mode


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
            f'torch.compile(..., backend="fusedseg") returned once before, and compile before DistributedDataParallel '
            "or fully_shard"
        )
    return counted_in_eager_mode(name, [(row.graph, row.captured) for row in found])


def _kind(module: nn.Module) -> object:
    """What modules have in common that run the graphs of each other."""
    return type(module), repr(module), tuple((p.shape, p.dtype, p.requires_grad) for p in module.parameters())


def note_of(module: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[Graph, Captured]:
    """The note of a captured graph that is compiled now, and the graph as a step of eager mode is counted on it."""
    why = _torch.reason_of_break(module)
    trained = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in example_inputs)
    calls = sum(node.op not in ("placeholder", "output", "get_attr") for node in module.graph.nodes)
    return Graph(calls, trained, ends=why), Captured(module, example_inputs)


@contextmanager
def noting_on(graph: Graph) -> Iterator[None]:
    """A context in which the partitioner's notes go to ``graph``."""
    token = _open.set(graph)
    try:
        yield
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


def current() -> Graph:
    """The notes of the graph that is compiled now; where there is none, notes that nobody reads."""
    return _open.get() or Graph(calls=0, trained=False)


def note_bytes(decision: Decision | None, parts: counting.Parts, outputs: int, by_inductor: bool) -> None:
    """Notes what the partitioned graphs keep; without a decision the compiler has divided them itself."""
    graph = current()
    graph.symbolic = any(isinstance(value_of(node), torch.SymInt) for node in parts[0].graph.nodes)
    graph.ours, graph.ours_course, graph.at_peak = counting.bytes_of(parts, outputs, by_inductor)
    graph.ours_by = counting.kept_by_module(parts[0], outputs)
    graph.returned = counting.returned_bytes(parts[0], outputs)
    graph.gradients = counting.returned_bytes(parts[1])
    if decision is not None:
        graph.recomputed = counting.recomputed_modules(decision.recomputed)
