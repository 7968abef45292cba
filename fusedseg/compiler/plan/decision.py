"""What backward reads of forward: a decision about a joint graph, and what every decision must respect.

Views cost nothing.  A result of the graph that eager mode does not keep may be changed in place before backward.  It
counts as any other value, and where it is saved, a copy of it is.
"""

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ...ops.low_bit.spec import FEWEST_VALUES
from ..graph import (
    POLICY,
    Joint,
    calls_view,
    is_cheap,
    is_compute_intensive,
    is_op,
    is_random,
    node_at,
    size_of,
    tensors_of,
)
from . import recompute
from .schedule import PeakTarget

RECOMPUTE, SAVE = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE


@dataclass
class Decision:
    """What backward reads of forward.

    Attributes:
        saved: the nodes that forward saves for backward.
        recomputed: the nodes that backward recomputes, in the order of the graph, each with the nodes that this reads.
        backward: the nodes of backward.
        replacements: nodes that backward reads in place of others, with the same value.
        peak_target: until which peak the order of backward computes values once more.  The search for a budget sets it
            (``choose.py``), and so do the graph without bits and the packed one if there are bits (``decide.py``,
            ``low_bit/packing.py``).  With None, values run once more only where that costs little.
        policies: what the partitioner is told of each node, once ``apply`` has written the decision.
    """

    saved: set[fx.Node] = field(default_factory=set)
    recomputed: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    replacements: dict[fx.Node, fx.Node] = field(default_factory=dict)
    peak_target: PeakTarget | None = None
    backward: list[fx.Node] = field(default_factory=list)
    policies: dict[fx.Node, CheckpointPolicy] = field(default_factory=dict)


def is_available(node: fx.Node) -> bool:
    """Whether backward has a value anyway: an argument, a number, or what a checkpoint in the model decides about."""
    return node.op in ("placeholder", "get_attr") or not tensors_of(node) or POLICY in node.meta


def call_node(node: fx.Node) -> fx.Node:
    """The call of which a node picks one of several results, or the node itself."""
    return node_at(node, 0) if node.target is operator.getitem else node


def is_view(node: fx.Node) -> bool:
    """Whether a value needs no memory of its own."""
    return calls_view(call_node(node))


def _may_run_again(node: fx.Node, intensive: bool = False) -> bool:
    """Whether backward may compute a node again; ``intensive`` says that a compute-intensive op may run for it."""
    made = call_node(node)
    if is_cheap(made) or recompute.recomputation_of(node) is not None:
        return True
    is_allowed = not made.all_input_nodes or (intensive and is_compute_intensive(made))
    return is_allowed and is_op(made) and not is_random(made)


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes from which backward recomputes a node."""
    other = recompute.recomputation_of(node)
    return list(call_node(node).all_input_nodes) if other is None else recompute.read_by(other)


def sources_of(node: fx.Node, joint: Joint) -> list[fx.Node] | None:
    """The nodes from which backward may recompute a node; None if it must be kept."""
    if node in joint.free_to_save or not _may_run_again(node, intensive=True):
        return None
    if isinstance(recompute.recomputation_of(node), recompute.MaxPool) and size_of(node) < FEWEST_VALUES:
        # A result that is too small to be rounded has no noise.
        return None
    sources = inputs_of(node)
    if not is_view(node) and any(source in joint.overwritten for source in sources):
        # Backward would read what forward has written there.
        return None
    return sources


def read_of_forward(joint: Joint, backward: list[fx.Node]) -> list[fx.Node]:
    """The nodes of forward that nodes of backward read.  The end of the graph reads gradients."""
    own = set(backward)
    read = [*(source for node in backward for source in node.all_input_nodes), *joint.gradients]
    return [node for node in dict.fromkeys(read) if node not in own and not is_available(node)]


def readers_of_forward(joint: Joint, recomputed: Collection[fx.Node] = ()) -> list[fx.Node]:
    """The nodes of backward, in the order of the graph.

    They are computed from a gradient, or backward alone needs them and they are not cheap, or they are computed from
    such nodes.

    recomputed: nodes that backward computes as it does values of forward.
    """
    found: dict[fx.Node, None] = {}

    def is_of_backward(node: fx.Node) -> bool:
        if node in joint.backward:
            return True
        if node.op != "call_function" or not tensors_of(node) or node in recomputed or call_node(node) in joint.forward:
            # Symbolic sizes are computed in forward.
            return False
        return not _may_run_again(node) or any(source in found for source in node.all_input_nodes)

    for node in joint.graph.nodes:
        if is_of_backward(node):
            found[node] = None
    return list(found)


def decision_that_recomputes(
    joint: Joint, recomputed: Collection[fx.Node], replacements: Mapping[fx.Node, fx.Node] = MappingProxyType({})
) -> Decision:
    """What backward reads if just these values are recomputed, and others are read in place of some nodes."""
    backward = readers_of_forward(joint, recomputed)
    found = Decision(backward=backward, replacements=dict(replacements))
    stack = [replacements.get(node, node) for node in reversed(read_of_forward(joint, backward))]
    while stack:
        node = stack.pop()
        if node in found.saved or node in found.recomputed:
            continue
        if node not in recomputed:
            found.saved.add(node)
            continue
        found.recomputed[node] = [replacements.get(source, source) for source in inputs_of(node)]
        stack += [source for source in found.recomputed[node] if not is_available(source)]
    found.recomputed = {node: found.recomputed[node] for node in joint.graph.nodes if node in found.recomputed}
    return found
