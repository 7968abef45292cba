"""The bytes of a step, counted on a joint graph and a plan: what is kept, and the peak.

The order is that of the graphs that will run: forward as it stands, then backward, where the compiler's partitioner
puts what is computed again right before its first reader.  A value lives until its last reader.  Ops write over their
input where ``reinplace.py`` lets them.  Sizes that are symbols have those of the example.
"""

import operator
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ops.cheap import numel_of, tensors_of
from . import forms, keep, order, reinplace
from .joint import Joint, flops_of, is_op, name_of, value_of, writes

# Ops beside the elementwise ones that Inductor computes inside the kernels that read their results, and ops that read
# such results inside their own kernel.
INLINED = {"_to_copy", "_unsafe_index", "clone", "constant_pad_nd", "full", "index", "iota", "repeat"}
REDUCTIONS = {"amax", "amin", "mean", "sum", "var", "var_mean"}


def nbytes_of(node: fx.Node) -> int:
    """The bytes of the results of a node, as if none of them were a view."""
    return sum(numel_of(t) * t.dtype.itemsize for t in tensors_of(node))


class Step(NamedTuple):
    """A node that runs.

    Attributes:
        node: the node; its result is known by it.
        reads: the nodes whose results it reads.
        over: those of them over which it may write its result.
    """

    node: fx.Node
    reads: list[fx.Node]
    over: list[fx.Node]


class Virtual:
    """A node of backward before there is a graph of it, with the attributes of a node that ``order.py`` reads.

    node: the node of the joint graph.  view: whether its result lies in the memory of its first input.
    made, nbytes: the bytes of its results while it runs, and those that later nodes read.
    """

    __slots__ = ("all_input_nodes", "made", "nbytes", "node", "op", "root", "target", "users")

    def __init__(self, node: Any, inputs: list["Virtual"], nbytes: int, view: bool = False, op: str = "") -> None:
        self.node, self.all_input_nodes = node, list(dict.fromkeys(inputs))
        self.op, self.users = op or "call_function", list[Virtual]()
        # A result of a call reads the call.  One that is computed in another form is a call itself.
        self.target = node.target if node.target is not operator.getitem or _picks(node, inputs) else None
        self.root: Virtual = inputs[0].root if view and inputs else self
        self.made = nbytes if self.root is self else 0
        # Each of several results has a node of its own.
        self.nbytes = 0 if isinstance(value_of(node), (tuple, list)) else self.made
        for one in self.all_input_nodes:
            one.users.append(self)


class Planned(order.Backward):
    """Backward of a plan, before there is a graph of it.

    Args:
        joint: the graph.
        plan: what backward reads.
        nbytes: the bytes of each node.
    """

    def __init__(self, joint: Joint, plan: keep.Plan, nbytes: dict[fx.Node, int]) -> None:
        self._plan, self._nbytes = plan, nbytes
        self._made: dict[fx.Node, Virtual] = {}
        self._given: list[Virtual] = []
        calls: list[Virtual] = []
        follows: set[Virtual] = set()
        for node in joint.graph.nodes:
            if node.op == "placeholder" and node in joint.backward:
                follows.add(self._argument(node, nbytes[node]))
        for reader in (*plan.reading, joint.end):
            reads = joint.gradients if reader is joint.end else reader.all_input_nodes
            inputs = [self._value(node, calls) for node in reads]
            if reader in self._made:
                continue
            if reader is joint.end:
                made = Virtual(reader, inputs, 0, op="output")
            else:
                made = Virtual(reader, inputs, nbytes_of(reader), _is_view(reader))
            self._made[reader] = made
            calls.append(made)
            if any(one in follows for one in inputs):
                follows.add(made)
        self.graph: Any = SimpleNamespace(nodes=[*self._given, *calls])
        self.roots: Any = {one: one.root for one in self.graph.nodes}
        self.again: Any = {
            one for one in calls if one not in follows and one.op == "call_function" and order.is_pure(one.node)
        }
        self._prepare()

    def nbytes(self, node: Any) -> int:
        return node.nbytes

    def made(self, node: Any) -> int:
        return node.made

    def over(self, node: Any) -> order.Over:
        sources = [(self._made.get(x), nbytes_of(x)) for x in order.gives_memory(node.node)]
        inputs = node.all_input_nodes
        return [(inputs.index(one), nbytes) for one, nbytes in sources if one in inputs]

    def flops_of(self, node: Any) -> int:
        return flops_of(node.node)

    def _argument(self, node: fx.Node, nbytes: int) -> Virtual:
        made = self._made[node] = Virtual(node, [], nbytes, op="placeholder")
        self._given.append(made)
        return made

    def _value(self, node: fx.Node, calls: list[Virtual]) -> Virtual:
        """What backward reads in place of a node."""
        stack = [node]
        while stack:
            one = stack[-1]
            sources = self._plan.again.get(one, [])
            waiting = [source for source in sources if source not in self._made]
            if one not in self._made and waiting:
                stack += waiting
                continue
            stack.pop()
            if one in self._made:
                continue
            if one in self._plan.again:
                self._made[one] = self._rebuilt(one, [self._made[source] for source in sources], calls)
            else:
                self._argument(one, self._nbytes[one] if one in self._plan.kept else 0)
        return self._made[node]

    def _rebuilt(self, node: fx.Node, inputs: list[Virtual], calls: list[Virtual]) -> Virtual:
        """A value that is computed again."""
        form, call = forms.form_of(node), keep.call_node(node)
        if isinstance(form, forms.BatchNorm) and form.mean is not None:
            # Its scale, and ones.
            vectors = [Virtual(form.mean, [self._made[n]], nbytes_of(form.mean)) for n in (form.rstd, form.mean) if n]
            calls += vectors
            inputs = [*inputs, *vectors]
        if form is None and call is not node:
            if call not in self._made:
                self._made[call] = Virtual(call, inputs, nbytes_of(call), _is_view(call))
                calls.append(self._made[call])
            inputs = [self._made[call]]
        made = Virtual(node, inputs, nbytes_of(node), form is None and _is_view(node))
        calls.append(made)
        return made


def _picks(node: fx.Node, inputs: list[Virtual]) -> bool:
    return len(inputs) == 1 and inputs[0].node is node.args[0]


def _is_view(node: fx.Node) -> bool:
    return keep.is_view(node) or name_of(node) in reinplace.UNSAFE_VIEWS


class Live:
    """Counts the bytes of the plans of a joint graph.

    Args:
        joint: the graph.
        fused: whether elementwise ops have no memory of their own where elementwise ops and sums alone read them.

    Attributes:
        arguments: the bytes of the arguments of the graph.
    """

    def __init__(self, joint: Joint, fused: bool) -> None:
        self._joint, self._fused = joint, fused
        self._roots = reinplace.roots_of(joint.graph)
        nodes = [node for node in joint.graph.nodes if node is not joint.end]
        self._nbytes = {node: 0 if writes(node) else nbytes_of(node) for node in nodes}
        self._place = {node: place for place, node in enumerate(nodes)}
        self._tangents = [node for node in nodes if node.op == "placeholder" and node in joint.backward]
        self.arguments = sum(
            self._nbytes[node] for node in nodes if node.op == "placeholder" and node not in joint.backward
        )
        # Gradients that are written over gradients lower the peak of all plans, and are not priced yet.
        priced = [node for node in nodes if not fused and not name_of(node).endswith("_backward")]
        self._over = {node: [x for x in reinplace.may_overwrite(node) if x is node.args[0]] for node in priced}
        self._inlined = {node for node in nodes if fused and _is_inlined(node)}
        self._fusing = self._inlined | {node for node in nodes if name_of(node) in REDUCTIONS}
        self._forward = self._steps(
            (node, node.all_input_nodes) for node in nodes if keep.call_node(node) in joint.forward
        )

    def _steps(self, runs: Iterable[tuple[fx.Node, Iterable[fx.Node]]]) -> list[Step]:
        """The steps of nodes that allocate memory; views and arguments do not."""
        return [
            Step(node, [self._roots[x] for x in reads], [self._roots[x] for x in self._over.get(node, ())])
            for node, reads in runs
            if node.op == "call_function" and self._roots[node] is node
        ]

    def kept(self, plan: keep.Plan) -> int:
        """The bytes that forward keeps, each memory once."""
        return sum(self._nbytes[root] for root in self._kept(plan))

    def _kept(self, plan: keep.Plan) -> set[fx.Node]:
        return {self._roots[node] for node in plan.kept if self._roots[node].op == "call_function"}

    def peak(self, plan: keep.Plan) -> tuple[int, int]:
        """The most bytes beyond the arguments at one moment, and the arithmetic that backward repeats.

        The caller holds what forward returns.
        """
        kept, returned = self._kept(plan), {self._roots[node] for node in self._joint.returned}
        forward = self._most(self._forward, set(), kept | returned)
        if not self._fused:
            planned = Planned(self._joint, plan, self._nbytes)
            steps = planned.least_peak(plan.goal)
            others = sum(self._nbytes[root] for root in returned - kept if root.op == "call_function")
            return max(forward, order.Alive(steps).peak[0] + others), planned.flops(steps)
        gradients = {self._roots[node] for node in self._joint.gradients}
        backward = self._most(self._backward(plan), kept | returned | set(self._tangents), returned | gradients)
        products = {keep.call_node(node) for node in plan.again}
        return max(forward, backward), sum(map(flops_of, products & self._joint.forward))

    def _backward(self, plan: keep.Plan) -> list[Step]:
        """Backward in its order: before each node what is computed again for it."""
        runs: list[tuple[fx.Node, Iterable[fx.Node]]] = []
        done: set[fx.Node] = set()
        for reader in [*plan.reading, self._joint.end]:
            reads = self._joint.gradients if reader is self._joint.end else reader.all_input_nodes
            own = self._again(reads, plan, done)
            # Nodes that read nothing that is computed again stay where they are in the graph, before all copies.
            copies = {node for node in own if any(source in plan.again for source in plan.again[node])}
            own.sort(key=lambda node: (node in copies, 0 if node in copies else self._place[node]))
            runs += [(node, plan.again[node]) for node in own] + [(reader, reads)]
        return self._steps(runs)

    @staticmethod
    def _again(reads: Iterable[fx.Node], plan: keep.Plan, done: set[fx.Node]) -> list[fx.Node]:
        """The nodes that are computed again before these reads, in an order in which they can be."""
        found: list[fx.Node] = []
        stack = [node for node in reversed(list(reads)) if node in plan.again]
        while stack:
            node = stack[-1]
            waiting = [source for source in plan.again[node] if source in plan.again and source not in done]
            if node in done or not waiting:
                stack.pop()
                if node not in done:
                    done.add(node)
                    found.append(node)
            else:
                stack += reversed(waiting)
        return found

    def _most(self, steps: list[Step], start: set[fx.Node], end: set[fx.Node]) -> int:
        """The most bytes alive while the steps run.  start: what lives before them; end: what lives after them."""
        if self._inlined:
            steps = self._without_inlined(steps, end)
        last = {source: place for place, step in enumerate(steps) for source in step.reads}
        last.update(dict.fromkeys(end, len(steps)))
        held = {node: self._nbytes[node] for node in start}
        live = most = sum(held.values())
        # For the result of a step that has written over its input: the node whose memory it is.
        memory: dict[fx.Node, fx.Node] = {}
        for place, step in enumerate(steps):
            node, reads = step.node, [memory.get(source, source) for source in step.reads]
            over = [memory.get(source, source) for source in step.over]
            call: Any = node.args[0] if node.target is operator.getitem else None
            dead = (
                x for x in over if x in held and x not in start and last[x] <= place and held[x] == self._nbytes[node]
            )
            x = next((x for x in dead if reads.count(x) == 1), None)
            if x is not None:
                memory[node] = x
                last[x] = last.get(node, place)
            elif call in held:
                # A part of what the call has made.
                held[node] = self._nbytes[node]
                held[call] -= held[node]
            else:
                held[node] = self._nbytes[node]
                live += held[node]
                most = max(most, live)
            for source in (*reads, node):
                if source in held and last.get(source, place) <= place:
                    live -= held.pop(source)
        return most

    def _without_inlined(self, steps: list[Step], end: set[fx.Node]) -> list[Step]:
        """The steps without those whose result is computed where it is read."""
        apart = {source for step in steps if step.node not in self._fusing for source in step.reads} | end
        inlined: dict[fx.Node, list[fx.Node]] = {}
        left = []
        for node, sources, over in steps:
            reads = list(dict.fromkeys(read for source in sources for read in inlined.get(source, [source])))
            if node in self._inlined and node not in apart:
                inlined[node] = reads
            else:
                left.append(Step(node, reads, over))
        return left


def _is_inlined(node: fx.Node) -> bool:
    """Whether Inductor computes a node inside the kernels that read it."""
    return is_op(node) and (torch.Tag.pointwise in node.target.tags or name_of(node) in INLINED)  # type: ignore[union-attr]
