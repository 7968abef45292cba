"""The bytes that the kernels of a step read and write: with PyTorch's own kernels, and with those that Inductor fuses.

Where no codegen is named, the backend takes Inductor's code for a graph if that moves clearly fewer bytes
(``LEAST_GAIN``), and PyTorch's kernels otherwise.  Both are counted on the graphs of forward and backward that the
codegen "aten" would run, so no code is generated to find out.

PyTorch's kernels read and write memory for each op.  Inductor computes connected elementwise ops of one size, and ops
over rows such as a softmax, in one kernel: it reads once what other kernels have made, and writes what others read.
Sums end such a kernel.  Convolutions, matrix products, norms over a batch or a sample, pools and interpolations are
kernels of their own with both.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from ..ops.norm import graph as norms
from .graph import calls_view, name_of, nbytes_of, outputs_of, reads_size_alone, roots_of, size_of
from .plan.decision import call_node
from .plan.schedule import is_inlined, reads_inside

# Inductor's code is taken where it moves at least this share of the bytes less.
LEAST_GAIN = 0.1
# Ops over rows, and ops that draw numbers, which Inductor computes in the kernel of the elementwise ops around them.
ALSO_FUSED = (
    "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
    "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward", "native_dropout", "bernoulli",
    "rand_like", "randn_like",
)  # fmt: skip


class Moved(NamedTuple):
    """The bytes that kernels read and write.

    aten: with a kernel for each op.
    inductor: with a kernel for each connected set of elementwise ops.
    """

    aten: int
    inductor: int


class InductorMovesLess(Exception):
    """Raised by ``check`` where graphs are not for the codegen "aten"; ``moved`` says why."""

    def __init__(self, moved: Moved) -> None:
        super().__init__(f"{moved.inductor} bytes in place of {moved.aten}")
        self.moved = moved


def check(graphs: Sequence[fx.Graph]) -> Moved:
    """What the graphs of a step move; raises ``InductorMovesLess`` if Inductor's kernels move clearly less."""
    found = [moved_by(graph) for graph in graphs]
    moved = Moved(sum(one.aten for one in found), sum(one.inductor for one in found))
    if moved.inductor <= (1 - LEAST_GAIN) * moved.aten:
        raise InductorMovesLess(moved)
    return moved


def moved_by(graph: fx.Graph) -> Moved:
    """What the kernels of one graph move."""
    roots = roots_of(graph)
    calls = [node for node in graph.nodes if _computes(node)]
    results = [node for node in outputs_of(graph) if isinstance(node, fx.Node)]
    return Moved(sum(_alone(node, roots) for node in calls), _Fused(calls, roots).nbytes(results))


def norm_passes(node: fx.Node) -> tuple[list[Any], int] | None:
    """The large tensors that a norm in a graph reads, each as often as it does, and how many of x's size it writes.

    None for other nodes.
    """
    norm, gradient = norms.NormCall.of(node), norms.GradientCall.of(node)
    if norm is not None:
        # Statistics read x once, and the output is a second pass.
        return [norm.x] * (2 if norm.norm.own and norm.mean is None else 1) + [norm.residual], 1
    if gradient is not None:
        # Sums over the gradient and x are the first pass.  With a residual it writes the sum of two gradients, which
        # the second pass reads.
        read = [gradient.dz, gradient.x, gradient.residual]
        more = [] if gradient.also is None else [gradient.also]
        return ([*more, *read * 2], 2) if gradient.of_residual else ([*more, *read] * 2, 1)
    if node.target in (norms.statistics, norms.statistics_moving):
        return [node.args[0]], 0
    return None


def _computes(node: fx.Node) -> bool:
    """Whether a node is a call whose kernel writes memory."""
    return node.op == "call_function" and node.target is not operator.getitem and not calls_view(node)


def _alone(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> int:
    """What a kernel of one op reads and writes."""
    norm = norm_passes(node)
    if norm is not None:
        read, written = norm
        return sum(nbytes_of(x) for x in read if x is not None) + written * nbytes_of(read[0])
    read = [] if reads_size_alone(node) else node.all_input_nodes
    return nbytes_of(node) + sum(_read_bytes(source, roots) for source in read)


def _read_bytes(source: fx.Node, roots: dict[fx.Node, fx.Node]) -> int:
    """What one reader reads of a node: of a slice its part, and of what is expanded the memory once."""
    least = nbytes_of(source)
    while source is not roots[source]:
        source = next(one for one in source.all_input_nodes if roots[one] is roots[source])
        least = min(least, nbytes_of(source))
    return least


def _is_fused(node: fx.Node) -> bool:
    """Whether Inductor computes an op together with others."""
    return is_inlined(node) or reads_inside(node) or name_of(node) in ALSO_FUSED


class _Kernel:
    """A kernel of Inductor's code.

    size: the number of elements that it goes over; 0 if it computes a single op, which no other joins.
    bits: a bit for each node that it computes.  behind: those of the kernels that it waits for.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: list[fx.Node] = []
        self.bits = self.behind = 0

    def waits_for(self, other: "_Kernel") -> bool:
        return bool(self.behind & other.bits)


class _Fused:
    """The kernels of a graph, each of which computes as many ops as no other kernel stands between."""

    def __init__(self, calls: Sequence[fx.Node], roots: dict[fx.Node, fx.Node]) -> None:
        self._roots = roots
        self._kernels: dict[fx.Node, _Kernel] = {}
        for place, node in enumerate(calls):
            self._add(node, 1 << place)

    def _kernel_of(self, source: fx.Node) -> _Kernel | None:
        """The kernel that writes the memory of a node; None for arguments of the graph."""
        return self._kernels.get(call_node(self._roots[source]))

    def _add(self, node: fx.Node, bit: int) -> None:
        found = (self._kernel_of(source) for source in node.all_input_nodes)
        sources = [kernel for kernel in dict.fromkeys(found) if kernel is not None]
        size = max(map(size_of, (node, *node.all_input_nodes))) if _is_fused(node) else 0
        # A sum is not known before its kernel ends.
        ended = {self._kernel_of(source) for source in node.all_input_nodes if reads_inside(source)}
        own: _Kernel | None = None
        for kernel in sources:
            if size == 0 or kernel.size != size or kernel in ended:
                continue
            if any(other.waits_for(kernel) for other in sources):
                continue
            if own is None:
                own = kernel
            elif not kernel.waits_for(own):
                self._join(own, kernel)
        own = own or _Kernel(size)
        own.nodes.append(node)
        own.bits |= bit
        for kernel in sources:
            if kernel is not own and not kernel.bits & own.bits:
                own.behind |= kernel.bits | kernel.behind
        self._kernels[node] = own

    def _join(self, one: _Kernel, other: _Kernel) -> None:
        one.nodes += other.nodes
        one.bits |= other.bits
        one.behind |= other.behind
        self._kernels |= dict.fromkeys(other.nodes, one)

    def nbytes(self, results: Sequence[fx.Node]) -> int:
        """What the kernels read and write; ``results`` are those of the graph."""
        total, written = 0, {self._roots[node] for node in results}
        for kernel in dict.fromkeys(self._kernels.values()):
            if kernel.size == 0:
                total += sum(_alone(node, self._roots) for node in kernel.nodes)
            reads: dict[fx.Node, int] = {}
            for source in (source for node in kernel.nodes for source in node.all_input_nodes):
                if self._kernel_of(source) is not kernel:
                    root = self._roots[source]
                    reads[root] = max(reads.get(root, 0), _read_bytes(source, self._roots))
            written |= reads.keys()
            total += sum(reads.values()) if kernel.size else 0
        made = (root for root in written if (maker := self._kernel_of(root)) is not None and maker.size)
        return total + sum(map(nbytes_of, made))
