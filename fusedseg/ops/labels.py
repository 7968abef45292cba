"""Labels for the compiler's partition of a graph: which values of it backward computes again, and which are kept.

The compiler decides for each value of a graph whether to keep it for backward or to compute it again.  The labels are
those that ``torch.utils.checkpoint`` sets in a graph, too.

``begin``, ``end``, ``called`` and the two calls of a norm are calls that the compiler takes into its graph.  They run
while AOTAutograd traces this graph once more, into a graph of aten ops, and leave no node in it.  They only look at the
nodes that the trace has made: nothing stays open if the trace fails, and no configuration of PyTorch changes.

* A norm of this package runs stock functions in compiled code, between ``norm_begins`` and ``norm_ends``.  Outside of
  scopes these label what the norm computes, so that backward computes it again from the norm's input.
* A recompute scope calls ``begin`` and ``end``, or ``called`` (``fusedseg/scope/compiled.py``).
"""

import warnings
from collections.abc import Callable
from itertools import takewhile
from operator import getitem
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch
from .cheap import call_of, is_cheap, is_product, size_of, tensors_of
from .observer import LARGER, MAX_STEPS, SMALL
from .unfused import assume_constant_result

# The key of a label in ``Node.meta``, and the labels: backward computes the value again, or it is kept.
LABEL = "recompute"
AGAIN, KEEP = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
# The calls that compute a value again which is kept.
KEPT: frozenset[str] = frozenset()


def _traced() -> fx.Graph | None:
    """The graph that AOTAutograd traces now, if autograd saves tensors; None otherwise."""
    mode = _torch.proxy_mode()
    return None if mode is None or not torch.is_grad_enabled() else mode.tracer.graph


def begin() -> None:
    """Marks the place in the graph where a scope begins."""
    graph = _traced()
    if graph is not None:
        _labels.setdefault(graph, Labels()).begin(graph)
    elif not _torch.has_fake_mode():
        _warn_of_backend()


def end() -> None:
    """Labels the nodes that were made since ``begin``."""
    graph = _traced()
    if graph is not None and graph in _labels:
        _labels[graph].end(graph)


def called() -> None:
    """Labels all nodes so far, because a scope is open around the compiled function."""
    graph = _traced()
    if graph is not None:
        _labels.setdefault(graph, Labels()).label(graph)


def keeping(mode: Any, x: Tensor, norm: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Traces a norm of ``x`` that keeps its output, the first result of ``norm``, and labels this output."""
    tracer = mode.tracer
    last = _last_of(tracer.graph)
    z, stats = norm()
    nodes = _after(last, tracer.graph)
    _inputs.setdefault(tracer.graph, {}).update(dict.fromkeys(nodes, _torch.node_of(x, tracer)))
    # A checkpoint may have labelled it.
    _torch.node_of(z, tracer).meta.setdefault(LABEL, KEEP)
    return z, stats


def norm_begins() -> None:
    """Marks the place in the graph where the stock functions of a norm begin."""
    graph = _traced()
    if graph is not None:
        _labels.setdefault(graph, Labels()).norm_begins(graph)


def norm_ends() -> None:
    """Makes the nodes since ``norm_begins`` one call, and labels them unless a scope will."""
    graph = _traced()
    if graph is not None and graph in _labels:
        _labels[graph].norm_ends(graph)


@assume_constant_result
def norms_are_stock() -> bool:
    """Whether a compiler gets stock functions for norms.  It runs while the compiler traces.

    Without labels, these might keep two tensors where the op keeps one.
    """
    if not _torch.LABELS_ALL_NORMS or _torch.compiled_problem():
        return False
    for function in (norm_begins, norm_ends):
        torch.compiler.allow_in_graph(function)
    return True


def _warn_of_backend() -> None:
    warnings.warn(
        "fusedseg.recompute: a scope inside a compiled function has no effect with this backend, which runs the graph "
        "without AOTAutograd; compile with backend='inductor' or 'aot_eager', or write `with fusedseg.recompute():` "
        "around the call of the compiled function",
        stacklevel=3,
    )


def _last_of(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _after(last: fx.Node | None, graph: fx.Graph) -> list[fx.Node]:
    """The nodes after ``last``, in their order; all nodes for None."""
    nodes = [*takewhile(lambda node: node is not last, reversed(graph.nodes))]
    return nodes[::-1]


class Labels:
    """The scopes in one graph, and the values that follow from the products in them.

    calls: for each large value that follows from a product, the calls that compute it again from values that are kept;
        none for a value that is kept itself.
    """

    def __init__(self) -> None:
        self.calls: dict[fx.Node, frozenset[str]] = {}
        self._open = 0
        self._last: fx.Node | None = None
        # The node before the norm that is traced now, and the call of each node of the norms so far.
        self._before_norm: fx.Node | None = None
        self._norms: dict[fx.Node, str] = {}

    def begin(self, graph: fx.Graph) -> None:
        self._open += 1
        if self._open == 1:
            self._last = _last_of(graph)

    def end(self, graph: fx.Graph) -> None:
        self._open -= 1
        if self._open == 0:
            self.label(graph)

    def label(self, graph: fx.Graph) -> None:
        """Labels the nodes after the last one that was labelled."""
        nodes = _after(self._last, graph)
        for node in nodes:
            self._label(node)
        self._last = nodes[-1] if nodes else self._last

    def norm_begins(self, graph: fx.Graph) -> None:
        self._before_norm = _last_of(graph)

    def norm_ends(self, graph: fx.Graph) -> None:
        nodes = _after(self._before_norm, graph)
        self._norms.update(dict.fromkeys(nodes, nodes[0].name))
        if self._open:
            return
        # Outside of scopes the inputs of the norm count as kept, whatever has made them; vectors need no label.
        inputs = {source for node in nodes for source in node.all_input_nodes if source not in self._norms}
        largest = max(map(size_of, inputs), default=0)
        for source in inputs:
            if source not in self.calls and size_of(source) * SMALL > largest:
                self.calls[source] = KEPT
        for node in nodes:
            self._label(node)

    def _call(self, node: fx.Node) -> str:
        """The call of a function, or of a norm, to which the node belongs.

        The compiler may write one call as many nodes.
        """
        return self._norms.get(node) or call_of(node)

    def _label(self, node: fx.Node) -> None:
        x = _inputs.get(node.graph, {}).get(node)
        if x is not None:
            if not self.calls.get(x):
                if LABEL in node.meta:
                    self.calls[node] = KEPT
                return
            # The input of the norm is computed again, so its output is, too.
            node.meta.pop(LABEL, None)
        if node.op != "call_function" or LABEL in node.meta:
            # A checkpoint has labelled it already.
            return
        inputs = [source for source in node.all_input_nodes if source in self.calls]
        cheap = is_cheap(node) or self._is_norm_of_again(node, inputs)
        if not cheap and is_product(node):
            self.calls[node] = KEPT
            return
        if not inputs or size_of(node) * SMALL <= max(map(size_of, inputs)):
            # The compiler keeps small results, such as one value per channel, unless they cost nothing.
            return
        if node.target is getitem:
            self.calls[node] = self.calls[inputs[0]]
        elif not cheap:
            self.calls[node] = KEPT
        else:
            calls = frozenset({self._call(node)}).union(*(self.calls[source] for source in inputs))
            again = len(calls) <= MAX_STEPS and not self._has_larger_source(node, inputs)
            self.calls[node] = calls if again else KEPT
            node.meta[LABEL] = AGAIN if again else KEEP

    def _is_norm_of_again(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """Whether the node is a norm that keeps its output, of a value that is rebuilt: then the norm runs again."""
        op = node.target
        if not isinstance(op, _torch.OpOverload) or op._schema.name != "fusedseg::norm":
            return False
        given = {arg.name: value for arg, value in zip(op._schema.arguments, node.args, strict=False)}
        rebuilt = any(self.calls[source] for source in inputs)
        return given.get("process_group") is None and rebuilt

    def _has_larger_source(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """Whether a much larger value would have to be computed again first, as for a pool; see ``LARGER``.

        The positions of a stock max-pool are int64, which would weigh more than the input.
        """
        if node.target.is_view or any(t.dtype == torch.int64 for t in tensors_of(node)):  # type: ignore[union-attr]
            return False
        return any(self.calls[source] and size_of(source) >= LARGER * size_of(node) for source in inputs)


# The labels of the graphs that are traced now; and for each node of a norm that keeps its output, the norm's input.
_labels: WeakKeyDictionary[fx.Graph, Labels] = WeakKeyDictionary()
_inputs: WeakKeyDictionary[fx.Graph, dict[fx.Node, fx.Node]] = WeakKeyDictionary()
