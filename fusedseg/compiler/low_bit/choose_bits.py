"""What forward keeps in 8 or 4 bits a value, for the option "bits".

``settled`` says which kept values are packed, and what must be exact beside them, by the rule of ``rule.py``.

A value is rounded once.  Everything that backward recomputes from it is a copy that reads the unpacked value.  What
must read exact values is computed in forward: a predicate, x <= 0, takes one bit a value, and another result is kept,
packed if its readers allow it.
"""

import math
from typing import Any

from torch import fx

from ... import _torch
from ...ops.low_bit.spec import DTYPES, FEWEST_VALUES
from ..graph import Joint, Outputs, behind, is_dense, is_tensor, node_at, nodes_from, row_of, size_of, value_of
from ..op_table import FACTOR
from ..plan import nearly_free
from ..plan.decision import Decision, call_node, decision_that_recomputes, is_view, sources_of
from ..plan.default_rules import by_rules
from ..rewrite.branches import pointwise_chain_of, write_pointwise_chain
from .rule import Facts, Packed, Rule, asked_for_its_sign, is_piecewise_linear, is_predicate, source_of_sign

# The most positions in a window that are packed.
MOST_POSITIONS = 1 << 7


def bits_of(node: fx.Node, bits: int) -> int:
    """In how many bits a value of a kept node is packed before its readers are asked; 0 if it stays as it is."""
    value = value_of(node)
    is_large = node.op == "call_function" and is_tensor(node) and size_of(node) >= FEWEST_VALUES
    if not is_large or _torch.depends_on_data(value) or not is_dense(value):
        return 0
    made: Any = call_node(node)
    place: Any = 0 if made is node else node.args[1]
    row = row_of(made)
    if row.statistics is not None and place >= row.statistics:
        return 0
    if is_predicate(node):
        return 1
    if value.dtype in DTYPES:
        return 0 if _has_poles(node) else bits
    positions = math.prod(made.args[1]) if row.positions and place == 1 else 0
    return (positions - 1).bit_length() if 1 < positions <= MOST_POSITIONS else 0


def _has_poles(node: fx.Node) -> bool:
    """Whether a value may be infinite, or huge, until a mask hides it.  A group of values with it has no grid."""
    while is_view(node):
        node = node_at(node, 0)
    made = call_node(node)
    return row_of(made).poles and (row_of(made).reads != FACTOR or is_tensor(made.args[1]))


class _Attempt:
    """What is recomputed, and what must be exact: ``recomputed`` and ``exact`` are changed until the rule is kept."""

    def __init__(self, joint: Joint, recomputed: set[fx.Node], bits: int, exact: set[fx.Node]) -> None:
        self.joint, self.recomputed, self.bits, self.exact = joint, recomputed, bits, exact
        self.facts = Facts(joint)
        self.replacements: dict[fx.Node, fx.Node] = {}
        self.predicates: dict[object, fx.Node] = {}

    def settle(self) -> Rule:
        """What is packed, and what the rule has noted of it."""
        while True:
            found = decision_that_recomputes(self.joint, self.recomputed, self.replacements)
            candidates = found.saved - self.joint.free_to_save - self.exact
            packed = {node: Packed(bits) for node in candidates if (bits := bits_of(node, self.bits))}
            rule = Rule(self.facts, found, packed)
            broken = rule.broken()
            if not broken:
                return rule
            for node in sorted(broken):
                if node in found.saved:
                    self.exact.add(node)
                else:
                    self._answer(node)

    def _answer(self, node: fx.Node) -> None:
        """Something that must read exact values is computed in forward: predicates of it, or its result."""
        first = self.predicates.setdefault(_key_of(node), node) if is_predicate(node) else node
        before = node.prev
        if first is not node:
            self.replacements[node] = first
        # What is linear between its kinks follows with exact predicates.
        elif is_piecewise_linear(node) and (chain := pointwise_chain_of(self.joint.graph, node)) is not None:
            self.replacements[node] = chain[0]
            self.recomputed.update(nodes_from(before.next, node))
            self.facts.note(list(nodes_from(before.next, node)))
        else:
            self.recomputed.remove(node)
            self._early(node)

    def _early(self, node: fx.Node) -> None:
        """Puts a result right behind its sources.  Where backward stood, they would live until the end of forward."""
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if node not in self.joint.forward and sources:
            for source in sources:
                self._early(source)
            behind(max(sources)).prepend(node)


def _key_of(predicate: fx.Node) -> object:
    """What is equal for two predicates with the same answer: relu(x) <= 0 and x <= 0."""
    source = asked_for_its_sign(predicate)
    return predicate.target, *(predicate.args if source is None else (source_of_sign(source),))


def settled(graph: fx.Graph, outputs: Outputs, bits: int, chosen: Decision | None = None) -> Rule:
    """What is kept, and how it is packed; ops with branches become pointwise chains where they need exact values.

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
            return rule
        # In the order of the graph, so that nodes have the same names in every process, which caches ask for.
        for node in [node for node in graph.nodes if node in rule.branching]:
            written = write_pointwise_chain(graph, node)
            assert written
        # Once more, without answers for values that are exact.
        exact = exact if rule.branching else attempt.exact & nodes
        graph.eliminate_dead_code()
