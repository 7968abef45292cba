"""The bytes of a step, counted on a joint graph and a decision: what is kept, and the peak.

The order is that of the graphs that will run: forward as it stands, then backward, where the compiler's partitioner
puts what is recomputed right before its first reader.  With Inductor some sums run later (``reorder``).  A value lives
until its last reader.  Ops write over their input where ``codegen/in_place.py`` lets them.  Sizes that are symbols have
those of the example.
"""

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from ...memory.step_bytes import StepBytes
from ...ops.low_bit import graph as packing
from ..graph import (
    Joint,
    arguments_of,
    flops_of,
    hinted,
    is_op,
    is_tensor,
    nbytes_of,
    node_at,
    op_of,
    row_of,
    size_of,
    value_of,
    writes,
)
from . import recompute, schedule
from .decision import Decision, call_node, is_view
from .liveness import Liveness, Over, ScheduledNode

PACKS = (packing.round_op, packing.bits_pack)
PACKING = (*PACKS, packing.unpack_op, packing.bits_unpack)


class PlannedNode:
    """A node of backward before there is a graph of it, with the attributes of a node that ``schedule.py`` reads.

    node: the node of the joint graph.  view: whether its result lies in the memory of its first input.
    made, nbytes: the bytes of its results while it runs, and those that later nodes read.
    """

    __slots__ = ("all_input_nodes", "made", "nbytes", "node", "op", "root", "target", "users")

    def __init__(self, node: Any, inputs: list["PlannedNode"], nbytes: int, view: bool = False, op: str = "") -> None:
        self.node, self.all_input_nodes = node, list(dict.fromkeys(inputs))
        self.op, self.users = op or "call_function", list[PlannedNode]()
        # A result of a call reads the call.  One that is computed in another form is a call itself.
        picks = len(inputs) == 1 and inputs[0].node is node.args[0]
        self.target = node.target if node.target is not operator.getitem or picks else None
        self.root: PlannedNode = inputs[0].root if view and inputs else self
        self.made = nbytes if self.root is self else 0
        # Each of several results has a node of its own.
        self.nbytes = 0 if isinstance(value_of(node), (tuple, list)) else self.made
        for one in self.all_input_nodes:
            one.users.append(self)


class PlannedBackward(schedule.BackwardGraph):
    """Backward of a decision, before there is a graph of it; ``nbytes`` has the bytes of each node."""

    def __init__(self, joint: Joint, decision: Decision, nbytes: dict[fx.Node, int], by_inductor: bool) -> None:
        self._decision, self._nbytes, self.by_inductor = decision, nbytes, by_inductor
        self._made: dict[fx.Node, PlannedNode] = {}
        self._given: list[PlannedNode] = []
        calls: list[PlannedNode] = []
        follows: set[PlannedNode] = set()
        for node in joint.graph.nodes:
            if node.op == "placeholder" and node in joint.backward:
                follows.add(self._argument(node, nbytes[node]))
        for reader in (*decision.backward, joint.end):
            reads = joint.gradients if reader is joint.end else reader.all_input_nodes
            inputs = [self._value(node, calls) for node in reads]
            if reader in self._made:
                continue
            if reader is joint.end:
                made = PlannedNode(reader, inputs, 0, op="output")
            else:
                made = PlannedNode(reader, inputs, nbytes_of(reader), is_view(reader))
            self._made[reader] = made
            calls.append(made)
            if any(one in follows for one in inputs):
                follows.add(made)
        pure = {one for one in calls if one.op == "call_function" and schedule.is_pure(one.node)}
        nodes = [*self._given, *calls]
        self._prepare(nodes, {one: one.root for one in nodes}, pure - follows)

    def nbytes(self, node: Any) -> int:
        return node.nbytes

    def made(self, node: Any) -> int:
        return node.made

    def over(self, node: Any) -> Over:
        sources = [(self._made.get(x), nbytes_of(x)) for x in schedule.gives_memory(node.node, self.by_inductor)]
        inputs = node.all_input_nodes
        return [(inputs.index(one), nbytes) for one, nbytes in sources if one in inputs]

    def node_of(self, node: Any) -> fx.Node:
        return node.node

    def _argument(self, node: fx.Node, nbytes: int) -> PlannedNode:
        made = self._made[node] = PlannedNode(node, [], nbytes, op="placeholder")
        self._given.append(made)
        return made

    def _value(self, node: fx.Node, calls: list[PlannedNode]) -> PlannedNode:
        """What backward reads in place of a node."""
        recomputed = self._decision.recomputed
        for one in schedule.inputs_first(node, lambda one: recomputed.get(one, ()), self._made):
            if one in recomputed:
                self._made[one] = self._rebuilt(one, [self._made[source] for source in recomputed[one]], calls)
            else:
                self._argument(one, self._nbytes[one] if one in self._decision.saved else 0)
        return self._made[node]

    def _rebuilt(self, node: fx.Node, inputs: list[PlannedNode], calls: list[PlannedNode]) -> PlannedNode:
        """A value that is recomputed."""
        other, call = recompute.recomputation_of(node), call_node(node)
        if other is None and call is not node:
            if call not in self._made:
                self._made[call] = PlannedNode(call, inputs, nbytes_of(call), is_view(call))
                calls.append(self._made[call])
            inputs = [self._made[call]]
        made = PlannedNode(node, inputs, nbytes_of(node), other is None and is_view(node))
        calls.append(made)
        return made


class ByteModel:
    """Counts what the decisions about a joint graph need.

    Attributes:
        arguments: the bytes of the arguments of the graph.
        flops: the arithmetic of each node of forward.  total: that of forward.
    """

    def __init__(self, joint: Joint, by_inductor: bool) -> None:
        self._joint, self._by_inductor = joint, by_inductor
        self._whole = schedule.BackwardGraph(joint.graph, by_inductor)
        self._roots = self._whole.roots
        nodes = [node for node in joint.graph.nodes if node is not joint.end]
        self._nbytes = {node: 0 if writes(node) else nbytes_of(node) for node in nodes}
        self.arguments = sum(
            self._nbytes[node] for node in nodes if node.op == "placeholder" and node not in joint.backward
        )
        self.flops = {node: flops_of(node) for node in joint.forward}
        self.total = sum(self.flops.values())
        self._forward = self._whole.as_it_stands(node for node in nodes if call_node(node) in joint.forward)

    def kept(self, decision: Decision) -> int:
        """The bytes that forward keeps, each memory once."""
        return sum(self._nbytes[root] for root in self._kept(decision))

    def _kept(self, decision: Decision) -> set[fx.Node]:
        return {self._roots[node] for node in decision.saved if self._roots[node].op == "call_function"}

    def needs(self, decision: Decision) -> StepBytes:
        """What a step needs with a decision.

        Backward is counted in the order in which it will run, with the ops that run a third time (``schedule.py``).
        The caller holds what forward returns.  Copies of results (``write.py``) count from the beginning of forward.
        """
        kept, returned = self._kept(decision), {self._roots[node] for node in self._joint.returned}
        held = [step for node, step in self._forward.items() if node in kept | returned]
        end = ScheduledNode(self._joint.end, held, self._joint.end, 0, 0, [])
        forward = self._whole.liveness([*self._forward.values(), end], workspace)
        planned = PlannedBackward(self._joint, decision, self._nbytes, self._by_inductor)
        steps = planned.least_peak(decision.peak_target)
        backward = planned.liveness(steps, workspace)
        copied = {root for root in kept if root in self._joint.changeable}
        copies = sum(self._nbytes[root] for root in copied)
        others = sum(self._nbytes[root] for root in returned - (kept - copied) if root.op == "call_function")
        return StepBytes(
            kept=self.kept(decision),
            peak=max(forward.peak[0] + copies, backward.peak[0] + others),
            with_workspaces=max(forward.with_workspaces + copies, backward.with_workspaces + others),
            repeated=planned.flops(steps) / max(self.total, 1),
        )


def images_of(node: fx.Node) -> list[fx.Node]:
    """The images that a convolution or its gradient reads, with the image that a convolution makes."""
    read = [node_at(node, place) for place in row_of(node).images]
    return [*read, node] if read and is_tensor(node) else read


def workspace(node: fx.Node, by_inductor: bool) -> int:
    """The bytes beside its arguments and results that a node may need while it runs.

    Kernels of convolutions may copy images into another layout.  Which kernel runs is not known here.
    """
    images = images_of(node)
    if images:
        return sum(map(nbytes_of, images))
    if not is_op(node) or op_of(node) not in PACKING:
        return 0
    given = arguments_of(node)
    if by_inductor and given.get("kink") is None:
        # Inductor computes it inside the kernels beside it.
        return 0
    value = node_at(node, 0) if op_of(node) in PACKS else node
    moved = "unit" in given and packing.is_moved(hinted(value_of(value)), given["unit"])
    copied = nbytes_of(value) if moved else 0
    return copied + packing.workspace_of(op_of(node), value_of(value), size_of(value), given["bits"])


def liveness_of(
    graph: fx.Graph, by_inductor: bool = False, workspace: Callable[[fx.Node, bool], int] = workspace
) -> Liveness:
    """What is alive at each node of a graph as it stands."""
    steps = schedule.BackwardGraph(graph, by_inductor)
    return steps.liveness([*steps.as_it_stands(graph.nodes).values()], workspace)
