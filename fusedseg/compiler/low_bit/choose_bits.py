"""What forward keeps in 8 or 4 bits a value, for the option "bits".

``settled`` says which kept values are packed, and what must be exact beside them, by the rule of ``rule.py``.

A value is rounded once.  Everything that backward recomputes from it is a copy that reads the unpacked value.  What
must read exact values is computed in forward: a predicate, x <= 0, takes one bit a value, and another result is kept,
packed if its readers allow it.
"""

import math
from typing import Any, NamedTuple

from torch import fx

from ... import _torch
from ...ops.low_bit.spec import DTYPES, FEWEST_VALUES
from ..graph import Joint, Outputs, behind, is_dense, is_tensor, name_of, node_at, nodes_from, row_of, size_of, value_of
from ..op_table import FOLLOWS
from ..plan import nearly_free
from ..plan.keep import Decision, by_rules, call_node, decision_that_recomputes, is_view, sources_of
from ..rewrite.branches import pointwise_chain_of, write_pointwise_chain
from .rule import Facts, Rounded, Rule, bent, is_predicate

# The most positions in a window that are packed.
MOST_POSITIONS = 1 << 7


def _has_size(node: fx.Node) -> bool:
    """Whether a kept result of forward is large, and lies in memory without gaps."""
    large = node.op == "call_function" and is_tensor(node) and size_of(node) >= FEWEST_VALUES
    return large and not _torch.depends_on_data(value_of(node)) and is_dense(value_of(node))


def _positions(node: fx.Node) -> int:
    """How many numbers there are, if a node numbers positions in windows; otherwise 0."""
    pool: Any = call_node(node)
    return math.prod(pool.args[1]) if row_of(pool).positions and node.args[1] == 1 else 0


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node is a mean or 1/sqrt(var + eps) of a norm."""
    first, place = row_of(call_node(node)).statistics, node.args[1:2]
    return first is not None and place >= (first,)


def _has_poles(node: fx.Node) -> bool:
    """Whether a value may be infinite, or huge, until a mask hides it.  A group of values with it has no grid."""
    while is_view(node):
        node = node_at(node, 0)
    made = call_node(node)
    return row_of(made).poles and not (name_of(made) == "div" and not is_tensor(made.args[1]))


def bits_of(node: fx.Node, bits: int) -> int:
    """In how many bits a value of a kept node is packed before its readers are asked; 0 if it stays as it is."""
    if not _has_size(node) or _is_statistic(node):
        return 0
    if is_predicate(node):
        return 1
    if value_of(node).dtype in DTYPES:
        return 0 if _has_poles(node) else bits
    return (_positions(node) - 1).bit_length() if 1 < _positions(node) <= MOST_POSITIONS else 0


class _Attempt:
    """What is recomputed, and what must be exact: ``recomputed`` and ``exact`` are changed until the rule is kept."""

    def __init__(self, joint: Joint, recomputed: set[fx.Node], bits: int, exact: set[fx.Node]) -> None:
        self.joint, self.recomputed, self.bits, self.exact = joint, recomputed, bits, exact
        self.facts = Facts(joint)
        self.instead: dict[fx.Node, fx.Node] = {}
        self.predicates: dict[object, fx.Node] = {}

    def settle(self) -> Rule:
        """What is packed, and what the rule has noted of it."""
        while True:
            found = decision_that_recomputes(self.joint, self.recomputed, self.instead)
            rule = Rule(self.facts, found, self._packed(found.kept))
            broken = rule.broken()
            if not broken:
                return rule
            for node in sorted(broken):
                if node in found.kept:
                    self.exact.add(node)
                else:
                    self._answer(node)

    def _packed(self, kept: set[fx.Node]) -> Rounded:
        rounded = Rounded()
        for node in kept - self.joint.held - self.exact:
            if bits := bits_of(node, self.bits):
                (rounded.bits if value_of(node).dtype in DTYPES else rounded.integers)[node] = bits
        return rounded

    def _answer(self, node: fx.Node) -> None:
        """Something that must read exact values is computed in forward: predicates of it, or its result."""
        first = self.predicates.setdefault(_key_of(node), node) if is_predicate(node) else node
        # What is linear between its kinks follows with exact predicates.
        is_bent = row_of(node).pieces is not None or (bool(row_of(node).kinks) and row_of(node).reads == FOLLOWS)
        before = node.prev
        if first is not node:
            self.instead[node] = first
        elif is_bent and (chain := pointwise_chain_of(self.joint.graph, node)) is not None:
            self.instead[node] = chain[0]
            self.recomputed.update(nodes_from(before.next, node))
            self.facts.note(nodes_from(before.next, node))
        else:
            self.recomputed.remove(node)
            self._early(node)

    def _early(self, node: fx.Node) -> None:
        """Puts a result right behind its sources.  Where backward stood, they would live until the end of forward."""
        for source in node.all_input_nodes:
            if source.op == "call_function" and source not in self.joint.forward:
                self._early(source)
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if sources and node not in self.joint.forward:
            behind(max(sources)).prepend(node)


def _key_of(predicate: fx.Node) -> object:
    """What is equal for two predicates with the same answer: relu(x) <= 0 and x <= 0.

    A value that a cast to 16 bits would round to 0 counts with its own sign.
    """
    source, *rest = predicate.args
    if isinstance(source, fx.Node) and name_of(predicate) in ("le", "gt") and rest == [0]:
        while (before := _with_its_sign(source)) is not source:
            source = before
    return predicate.target, source, *rest


def _with_its_sign(node: fx.Node) -> fx.Node:
    """What a node has its sign from: the argument of an activation, or of a cast between floating-point numbers."""
    if name_of(node) not in ("convert_element_type", "_to_copy"):
        return bent(node)
    source = node_at(node, 0)
    return source if value_of(source).is_floating_point() and value_of(node).is_floating_point() else node


class Settled(NamedTuple):
    """A graph, what backward reads of its forward, and in how many bits that is kept."""

    joint: Joint
    decision: Decision
    rounded: Rounded


def settled(graph: fx.Graph, outputs: Outputs, bits: int, chosen: Decision | None = None) -> Settled:
    """What is kept, and in how many bits; ops with branches become pointwise chains where they need exact values.

    chosen: what backward recomputes, where a budget has chosen it.
    """
    exact, before = set[fx.Node](), set(graph.nodes)
    while True:
        # A chain that is added to answer a question is another one in each round.
        nodes, joint = set(graph.nodes), Joint(graph, outputs)
        if chosen is None:
            recomputed = set(by_rules(joint, nearly_free.scores).recomputed)
        else:
            chains = {node for node in graph.nodes if node not in before and sources_of(node, joint) is not None}
            recomputed = chains.union(chosen.recomputed)
        attempt = _Attempt(joint, recomputed, bits, exact & nodes)
        rule = attempt.settle()
        if not rule.branching and attempt.exact & nodes == exact & nodes:
            rule.found.peak_target = None if chosen is None else chosen.peak_target
            return Settled(joint, rule.found, rule.rounded)
        # In the order of the graph, so that nodes have the same names in every process, which caches ask for.
        for node in [node for node in graph.nodes if node in rule.branching]:
            written = write_pointwise_chain(graph, node)
            assert written
        # Once more, without answers for values that are exact.
        exact = exact if rule.branching else attempt.exact & nodes
        graph.eliminate_dead_code()
