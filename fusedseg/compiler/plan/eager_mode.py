"""What eager mode keeps for backward, as the joint graph that was traced says.

Its backward reads just what eager mode keeps, but for the ops of this package that stand for stock functions.
``eager_step.py`` counts a step for the report.
"""

from collections.abc import Iterator

from torch import fx

from ... import _torch
from ...ops.norm.graph import GradientCall, NormCall
from ..capture.stock_norms import kept_by_eager
from ..graph import (
    Joint,
    Outputs,
    following,
    items_of,
    nbytes_of,
    node_at,
    outputs_of,
    reads_size_alone,
    roots_of,
    row_of,
)
from .decision import call_node

# What ``note_changeable`` writes on the output of a graph.
CHANGEABLE = "fusedseg_changeable"


def read(graph: fx.Graph, forward_outputs: int, *, counted: bool) -> Outputs:
    """What a joint graph with the notes of ``note_changeable`` says of eager mode; ``counted`` asks for the bytes."""
    changeable = graph.output_node().meta.pop(CHANGEABLE)
    outputs = Outputs(forward_outputs, frozenset(place for place in changeable if place < forward_outputs))
    return outputs._replace(eager=kept_bytes(Joint(graph, outputs))) if counted else outputs


def _read(node: fx.Node) -> list[fx.Node]:
    """What a node of backward reads of what eager mode keeps: a sum with a residual keeps neither of them."""
    sources, norm = node.all_input_nodes, GradientCall.of(node)
    if norm is None or norm.residual is norm.x:
        return sources
    return [source for source in sources if source is not norm.residual]


def _activated(graph: fx.Graph) -> Iterator[tuple[str, fx.Node]]:
    """The results of norms with an activation, and what eager mode keeps for it (``EAGER_SAVES``)."""
    trained = {gradient.x for node in graph.nodes if (gradient := GradientCall.of(node))}
    for node in graph.nodes:
        norm = NormCall.of(node)
        if norm is not None and norm.x in trained and 0 in items_of(node):
            yield kept_by_eager(node), items_of(node)[0]


def note_changeable(graph: fx.Graph) -> None:
    """Notes which outputs of a joint graph eager mode does not keep for backward.

    The graph is the one that was traced.  A pass that has run before, such as those of Inductor that leave out copies,
    would change this.
    """
    end = graph.output_node()
    if CHANGEABLE in end.meta:
        return
    roots = roots_of(graph)
    kept = {roots[z] for what, z in _activated(graph) if what == "result"}
    backward = {node for node in graph.nodes if _torch.is_traced_in_backward(node)} | following(graph)
    backward.discard(end)
    for node in graph.nodes:
        if node in backward and not reads_size_alone(node):
            kept |= {roots[source] for source in _read(node) if source not in backward}
        elif row_of(node).eager_keeps_input:
            kept.add(roots[node_at(node, 0)])
    returned = enumerate(outputs_of(graph))
    end.meta[CHANGEABLE] = [k for k, node in returned if isinstance(node, fx.Node) and roots[node] not in kept]


def kept_bytes(joint: Joint) -> int:
    """The bytes that autograd keeps in eager mode: results of forward that backward reads, each memory once."""
    roots = roots_of(joint.graph)
    # A part of what a call of forward has made is a value of forward, even if backward alone reads that part.
    made = {node for node in joint.graph.nodes if call_node(node) in joint.forward}
    kept = {roots[node] for node in joint.gradients if node in made}
    for node in joint.graph.nodes:
        if node not in made and node is not joint.end:
            kept |= {roots[source] for source in _read(node) if source in made}
    activated = list(_activated(joint.graph))
    kept |= {roots[z] for what, z in activated if what == "result"}
    # The argument of an activation has no node, and the size of the result.
    arguments = sum(nbytes_of(z) for what, z in activated if what == "input")
    return arguments + sum(nbytes_of(root) for root in kept if root.op == "call_function")
