"""The order in which backward recomputes values of forward, and how often.

Each is computed right before its first reader, and of the inputs of a node those first that need the most memory on the
way (Sethi and Ullman).  A value that several readers need, such as the sum at the end of a residual block, lives from
the first to the last.  Where it lies at the peak and nobody reads it there, it is computed once more for its later
readers, if that lowers the peak, and is worth its arithmetic.
"""

import operator
from collections.abc import Callable, Container, Iterable, Iterator
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import torch
from torch import fx

from ..graph import flops_of, following, is_op, is_random, nbytes_of, op_of, roots_of, row_of, value_of, writes
from ..op_table import INSIDE, READS
from .aliasing import gives_memory
from .liveness import Liveness, Over, ScheduledNode, memory_read

# How many repetitions are tried for one graph.
TRIALS = 200
# Without a budget a value is computed once more where the peak loses a byte for at most so many bytes that kernels read
# and write for it.  Rebuilding a norm moves two or three times its result, and a chain of n residual sums n times that.
MOST_TRAFFIC = 12
# A compute-intensive op computes so many multiplications and additions in the time in which a GPU moves a byte: 380
# TFLOP/s and 2.9 TB/s on an H100.
FLOPS_A_BYTE = 130


class PeakTarget(NamedTuple):
    """Values are computed once more in backward until the peak is at most so many bytes, within so much arithmetic.

    After that a value is computed once more where a byte less at the peak costs at most ``price`` of arithmetic.  With
    Inductor these are results of compute-intensive ops alone; its kernels compute other values again by themselves.
    """

    peak: float
    flops: float
    price: float = 0


# The least peak, whatever is repeated for it.
LOWEST = PeakTarget(-inf, inf)


def inputs_first(
    end: fx.Node, inputs: Callable[[fx.Node], Iterable[fx.Node]], done: Container[fx.Node]
) -> Iterator[fx.Node]:
    """A node behind all that it follows from, each behind its own inputs; nodes that are ``done`` are left out.

    The caller adds each node to ``done`` before it asks for the next one.
    """
    stack = [end]
    while stack:
        node = stack[-1]
        waiting = [] if node in done else [source for source in inputs(node) if source not in done]
        stack += waiting
        if not waiting:
            stack.pop()
            if node not in done:
                yield node


class BackwardGraph:
    """A graph of backward: which of its nodes recompute values of forward, and what each needs of memory.

    by_inductor: whether Inductor generates the code.  Elementwise ops have no memory of their own then where
    elementwise ops and sums alone read them, and only compute-intensive ops are worth a second run: Inductor would fuse
    the runs of other ops.
    """

    def __init__(self, graph: fx.Graph, by_inductor: bool = False) -> None:
        self.by_inductor = by_inductor
        calls = (node for node in graph.nodes if node.op == "call_function" and node.users and is_pure(node))
        self._prepare([*graph.nodes], roots_of(graph), {*calls} - following(graph))

    def _prepare(self, nodes: list[Any], roots: dict[Any, Any], recomputed: set[Any]) -> None:
        """Takes the nodes, for each the one whose memory its result lies in, and those that recompute values."""
        self.nodes, self.roots, self.recomputed = nodes, roots, recomputed
        self._flops: dict[fx.Node, int] = {}
        # For each node the inputs that are recomputed, in the best order.
        self.inputs: dict[fx.Node, list[fx.Node]] = {}
        needs: dict[fx.Node, int] = {}
        for node in nodes:
            rebuilt = [source for source in node.all_input_nodes if source in recomputed]
            self.inputs[node] = sorted(rebuilt, key=lambda source: self.nbytes(source) - needs[source])
            held = need = 0
            for source in self.inputs[node]:
                need = max(need, held + needs[source])
                held += self.nbytes(source)
            needs[node] = max(need, held + self.made(node))
        self._over = {node: self.over(node) for node in nodes}

    def made(self, node: fx.Node) -> int:
        """The bytes that a node allocates.  Parameters are alive anyway."""
        if node.op == "output" or self.roots[node] is not node or str(node.target).startswith("primals"):
            return 0
        return nbytes_of(node)

    def nbytes(self, node: fx.Node) -> int:
        """The bytes that later nodes read; each of several results has a node of its own."""
        return 0 if isinstance(value_of(node), (tuple, list)) else self.made(node)

    def in_turn(self) -> list[ScheduledNode]:
        """The nodes, each value of forward right before its first reader."""
        done: dict[fx.Node, ScheduledNode] = {}
        for reader in self.nodes:
            if reader in self.recomputed:
                continue
            for node in inputs_first(reader, lambda node: reversed(self.inputs[node]), done):
                # All results of a call follow it at once, so that those that nobody reads are let go.
                items = [user for user in node.users if node in self.recomputed and user.target is operator.getitem]
                for one in (node, *items):
                    done[one] = self.step(one, [done[source] for source in one.all_input_nodes])
        return [*done.values()]

    def step(self, node: fx.Node, reads: list[ScheduledNode]) -> ScheduledNode:
        return ScheduledNode(node, reads, self.roots[node], self.nbytes(node), self.made(node), self._over[node])

    def over(self, node: fx.Node) -> Over:
        """The places of the inputs over which a result may be written, and their bytes."""
        return [(node.all_input_nodes.index(x), nbytes_of(x)) for x in gives_memory(node, self.by_inductor)]

    def as_it_stands(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, ScheduledNode]:
        """The steps of nodes in this order."""
        done: dict[fx.Node, ScheduledNode] = {}
        for node in nodes:
            done[node] = self.step(node, [done[source] for source in node.all_input_nodes])
        return done

    def node_of(self, node: fx.Node) -> fx.Node:
        """The node of a graph for a node of ``graph``; another one in ``peak.PlannedBackward``."""
        return node

    def liveness(self, steps: list[ScheduledNode], workspace: Callable[[fx.Node, bool], int] | None = None) -> Liveness:
        """What is alive at each step; ``workspace`` says what a node needs besides, while it runs."""
        inlined = self._inlined(steps) if self.by_inductor else {}
        if workspace is None:
            return Liveness(steps, inlined)
        return Liveness(steps, inlined, lambda step: workspace(self.node_of(step.node), self.by_inductor))

    def _inlined(self, steps: list[ScheduledNode]) -> dict[ScheduledNode, list[ScheduledNode]]:
        """The steps whose result is computed where it is read, and the memory that is read there."""
        own = [step for step in steps if step.first is step]
        fusing = {step for step in own if is_inlined(self.node_of(step.node))}
        apart = set[ScheduledNode]()
        for step in own:
            if step not in fusing and not reads_inside(self.node_of(step.node)):
                apart |= {read.first for read in step.reads}
        inlined: dict[ScheduledNode, list[ScheduledNode]] = {}
        for step in own:
            if step in fusing and step not in apart:
                inlined[step] = memory_read(step, inlined)
        return inlined

    def flops(self, steps: list[ScheduledNode]) -> int:
        """The arithmetic of the compute-intensive ops that are recomputed."""
        for step in steps:
            if step.node in self.recomputed and step.node not in self._flops:
                self._flops[step.node] = flops_of(self.node_of(step.node))
        return sum(self._flops[step.node] for step in steps if step.node in self.recomputed)

    def time(self, steps: list[ScheduledNode]) -> float:
        """The time in which values are recomputed, in bytes that a GPU moves in it."""
        calls = (step for step in steps if step.node in self.recomputed and step.first is step and step.call() is step)
        return sum(map(self._moved, calls)) + self.flops(steps) / FLOPS_A_BYTE

    @staticmethod
    def _moved(step: ScheduledNode) -> int:
        """The bytes that a call reads and writes."""
        return step.made + sum(read.nbytes for read in {read.first for read in step.reads})

    def least_peak(self, peak_target: PeakTarget | None) -> list[ScheduledNode]:
        """The nodes in turn, with those computed once more that lower the peak."""
        now = self.liveness(self.in_turn())
        if peak_target is None:
            return self._at_price(now, inf, MOST_TRAFFIC, self.time, sharing=True)
        if peak_target.flops < inf:
            # What repeats no arithmetic comes first.
            now = self._until(now, self.flops(now.steps), -inf)
        now = self._until(now, peak_target.flops, peak_target.peak)
        if not peak_target.price or now.peak[0] > peak_target.peak:
            return now.steps
        return self._at_price(now, peak_target.flops, peak_target.price, self.flops)

    def _at_price(
        self,
        now: Liveness,
        most: float,
        price: float,
        spent: Callable[[list[ScheduledNode]], float],
        sharing: bool = False,
    ) -> list[ScheduledNode]:
        """Values are computed once more, as far as a byte that the peak loses is worth ``price`` of what is spent.

        One alone may lower nothing, where several places peak as high.
        """
        tried = islice(self._second_runs(now, most, sharing), TRIALS)
        return min(tried, key=lambda now: spent(now.steps) + price * now.peak[0]).steps

    def _until(self, now: Liveness, most: float, enough: float) -> Liveness:
        """Values are computed once more, within ``most`` arithmetic, until the peak is ``enough``."""
        for found in islice(self._second_runs(now, most), TRIALS + 1):
            now = found
            if now.peak[0] <= enough:
                break
        return now

    def _second_runs(self, now: Liveness | None, most: float, sharing: bool = False) -> Iterator[Liveness]:
        """The steps as they are, then with a value computed twice, then with another one, while the peak falls."""
        while now is not None:
            yield now
            now = self._with_second_run(now, most, sharing)

    def _with_second_run(self, now: Liveness, most: float, sharing: bool) -> Liveness | None:
        """The steps with one value computed twice, so that fewer bytes are alive at the peak; or None.

        sharing: a later run of what that needs takes place now, where the peak falls all the same.  Otherwise the
            outputs of a chain of residual blocks would each be rebuilt from the beginning of the chain.
        """
        top = now.top
        read = {read.first for read in now.steps[top].reads}
        crossing = [
            step
            for step in now.steps[:top]
            if step.node in self.recomputed and step.nbytes and now.last[step] > top and step not in read
            if not self.by_inductor or self.flops([step.call()])
        ]
        for step in sorted(crossing, key=self._price if sharing else self._price_of_arithmetic):
            for shared in (True, False) if sharing else (False,):
                steps = self._recomputed_after(now, step, shared)
                if self.flops(steps) <= most and (found := self.liveness(steps)).peak < now.peak:
                    return found
        return None

    def _price_of_arithmetic(self, step: ScheduledNode) -> tuple[float, ...]:
        """What a further run of a step costs for each byte that it frees; the largest results first."""
        return self.flops([step.call()]) / step.nbytes, -step.nbytes

    def _price(self, step: ScheduledNode) -> tuple[float, ...]:
        """The same, and of equal arithmetic what moves the fewest bytes: a mask is unpacked again before a sum that is
        the end of a chain is computed again.
        """
        flops, largest = self._price_of_arithmetic(step)
        return flops, self._moved(step.call()) / step.nbytes, largest

    def _recomputed_after(self, now: Liveness, old: ScheduledNode, shared: bool) -> list[ScheduledNode]:
        """The steps with ``old`` recomputed for its readers after the peak."""
        behind = now.top + 1
        found = now.steps[:behind]
        made: dict[ScheduledNode, ScheduledNode] = {}
        for place, step in enumerate(now.steps[behind:], behind):
            if shared and step not in made and step.node in self.recomputed:
                # Another step of the same node has run by now.
                recomputed = next((new for new in made.values() if new.node is step.node and new is not step), None)
                if recomputed is not None:
                    made[step] = recomputed
            if step in made:
                continue
            reads = [self._recompute(read, old, place, now, made, found) for read in step.reads]
            if reads == step.reads:
                found.append(step)
            else:
                made[step] = self.step(step.node, reads)
                found.append(made[step])
        return self._read(found) if shared else found

    def _read(self, steps: list[ScheduledNode]) -> list[ScheduledNode]:
        """The steps without those that computed a value again which nobody reads any more."""
        read: set[ScheduledNode] = set()
        for step in reversed(steps):
            if step.node not in self.recomputed or step in read:
                read |= {step, *step.reads}
        return [step for step in steps if step in read or (step.call() is not step and step.call() in read)]

    def _recompute(
        self,
        read: ScheduledNode,
        old: ScheduledNode,
        place: int,
        now: Liveness,
        made: dict[ScheduledNode, ScheduledNode],
        found: list[ScheduledNode],
    ) -> ScheduledNode:
        """The step that a reader at ``place`` reads for ``read``.

        It is ``read`` itself while its memory is alive, and otherwise a second run of it, which is added to ``found``
        behind the second runs of its inputs that are gone as well.  ``old`` counts as gone.
        """
        if read in made:
            return made[read]
        # All results of a call are computed at once, and so are all gone.
        gone = read.first.call() is old.call() or now.last[read.first] < place
        inlined = read in now.inlined
        if not (gone or inlined) or read.node not in self.recomputed or now.places[read] > place:
            return read
        reads = [self._recompute(r, old, place, now, made, found) for r in read.reads]
        if inlined and reads == read.reads:
            made[read] = read
        else:
            made[read] = self.step(read.node, reads)
            found.append(made[read])
        return made[read]


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes a node inside the kernels that read it."""
    return is_op(node) and (torch.Tag.pointwise in op_of(node).tags or row_of(node).inductor == INSIDE)


def reads_inside(node: fx.Node) -> bool:
    """Whether Inductor computes elementwise inputs of a node inside the node's own kernel."""
    return row_of(node).inductor == READS


def reorder(module: fx.GraphModule, peak_target: PeakTarget | None = None, by_inductor: bool = False) -> None:
    """Puts the nodes of a graph of backward into this order."""
    backward = BackwardGraph(module.graph, by_inductor)
    steps = backward.least_peak(peak_target)
    if by_inductor:
        steps = sums_after_compute_intensive_ops(steps)
    module.graph = _written(steps)


def sums_after_compute_intensive_ops(steps: list[ScheduledNode]) -> list[ScheduledNode]:
    """Sums of an elementwise value after the first compute-intensive op that reads it.

    A sum that somebody reads before that op stays where it is.

    The op needs the value in memory, and a sum after it reads that memory.  For a sum before it Inductor computes the
    value once more from its inputs, which then live on beside it: in backward of an attention three tensors of the size
    of its scores in place of two.
    """
    for added in [step for step in steps if reads_inside(step.node)]:
        start = steps.index(added)
        values = {read.first for read in added.reads if is_inlined(read.first.node)}
        end = next((place for place in range(start, len(steps)) if _reads_from_memory(values, steps[place])), start)
        first: list[ScheduledNode] = []
        later = [added]
        for step in steps[start + 1 : end + 1]:
            (first if set(step.reads).isdisjoint(later) else later).append(step)
        if all(step.first is added for step in later):
            steps = [*steps[:start], *first, *later, *steps[end + 1 :]]
    return steps


def _reads_from_memory(values: set[ScheduledNode], step: ScheduledNode) -> bool:
    """Whether a step reads one of these values from memory."""
    # Nearly every step fails this test, which takes less time than the others.
    if step.first is not step or not any(read.first in values for read in step.reads):
        return False
    return is_op(step.node) and not is_inlined(step.node) and not reads_inside(step.node)


def _written(steps: list[ScheduledNode]) -> fx.Graph:
    graph = fx.Graph()
    made: dict[ScheduledNode, fx.Node] = {}
    for step in steps:
        swapped = {source: made[read] for source, read in zip(step.node.all_input_nodes, step.reads, strict=True)}
        made[step] = graph.node_copy(step.node, swapped.__getitem__)
    return graph


def is_pure(node: fx.Node) -> bool:
    """Whether a node may run at another place, and twice."""
    if node.target is operator.getitem:
        return True
    return is_op(node) and not writes(node) and not is_random(node)
