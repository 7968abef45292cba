"""What forward keeps in 8 or 4 bits a value, for the option "bits".

``settled`` says which kept values are packed, and what must be exact beside them, by the rule of ``rule.py``.

A value is rounded once.  Everything that backward recomputes from it is a copy that reads the unpacked value.  What
must read exact values is computed in forward: a predicate, x <= 0, takes one bit a value, and another result is kept,
packed if its readers allow it.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ... import _torch
from ...ops.low_bit.spec import DTYPES, FEWEST_VALUES
from ..graph import Joint, Outputs, behind, is_dense, is_op, is_tensor, name_of, node_at, row_of, size_of, value_of
from ..op_table import FOLLOWS
from ..plan import nearly_free, recompute
from ..plan.keep import Decision, call_node, decide, decision_of, drop_reader, is_free, is_view, sources_of
from ..rewrite.branches import pointwise_chain_of, write_pointwise_chain
from .rule import Rule, bent, is_predicate

# The most positions in a window that are packed.
MOST_POSITIONS = 1 << 7


@dataclass
class Rounded:
    """What is not kept as it is.

    Attributes:
        bits: for each kept node the bits of a value.
        units: for some of these nodes the unit of their groups (``ops/low_bit/spec.py``).
        kinks: for some of these nodes the norm that reads them and whose sign is exact.
        integers: the kept nodes with masks or small integers, and the bits of a value.
        branching: ops of backward with a branch, which must be written as pointwise chains before anything can be
            decided.
    """

    bits: dict[fx.Node, int] = field(default_factory=dict)
    units: dict[fx.Node, str] = field(default_factory=dict)
    kinks: dict[fx.Node, recompute.NormActForm] = field(default_factory=dict)
    integers: dict[fx.Node, int] = field(default_factory=dict)
    branching: set[fx.Node] = field(default_factory=set)


def _has_size(node: fx.Node) -> bool:
    """Whether a kept result of forward is large, and lies in memory without gaps."""
    large = node.op == "call_function" and is_tensor(node) and size_of(node) >= FEWEST_VALUES
    return large and not _torch.depends_on_data(value_of(node)) and is_dense(value_of(node))


def _positions(node: fx.Node) -> int:
    """How many numbers there are, if a node numbers positions in windows; otherwise 0."""
    pool: Any = node.args[0] if node.target is operator.getitem and node.args[1] == 1 else None
    return math.prod(pool.args[1]) if row_of(pool).positions else 0


def _is_statistic(node: fx.Node) -> bool:
    """Whether a node is a mean or 1/sqrt(var + eps) of a norm."""
    is_item = node.target is operator.getitem
    first = row_of(node.args[0] if is_item else node).statistics
    place: Any = node.args[1] if is_item else 0
    return first is not None and bool(place >= first)


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


class _Choice:
    """What is kept, and in how many bits; ``found`` and ``exact`` are changed where something must be exact."""

    def __init__(self, joint: Joint, found: Decision, bits: int, stuck: set[fx.Node], exact: set[fx.Node]) -> None:
        self.joint, self.found, self.least, self.stuck, self.exact = joint, found, bits, stuck, exact
        self.rounded = Rounded()
        self.predicates: dict[object, fx.Node] = {}
        for node in found.kept:
            self._pack(node)

    def _pack(self, node: fx.Node) -> None:
        bits = 0 if node in self.joint.held or node in self.exact else bits_of(node, self.least)
        if bits:
            floating = value_of(node).dtype in DTYPES
            (self.rounded.bits if floating else self.rounded.integers)[node] = bits

    def settle(self) -> bool:
        """Makes exact what the rule asks for; whether it has asked for anything."""
        self.rounded.branching.clear()
        exact = Rule(self.joint, self.found, self.rounded, self.stuck).broken()
        for node in sorted(exact):
            if node in self.rounded.bits:
                self.exact.add(node)
                del self.rounded.bits[node]
                self.rounded.kinks.pop(node, None)
                self.rounded.units.pop(node, None)
            else:
                self._answer(node)
        return bool(exact)

    def _answer(self, node: fx.Node) -> None:
        """Something that must read exact values is computed in forward: predicates of it, or its result."""
        found = self.found
        if is_predicate(node):
            first = self.predicates.setdefault(_key_of(node), node)
            if first is not node:
                self._replace(node, first)
                return
        # What is linear between its kinks follows with exact predicates.
        is_bent = row_of(node).pieces is not None or (bool(row_of(node).kinks) and row_of(node).reads == FOLLOWS)
        chain = pointwise_chain_of(self.joint.graph, node) if is_op(node) and is_bent else None
        sources = found.recomputed[node]
        if chain is None or len(chain) != 1:
            del found.recomputed[node]
            found.kept.add(node)
            self._early(node)
            self._pack(node)
            drop_reader(node, sources, found)
            return
        (result,) = chain
        self._add(result)
        found.recomputed[node] = sources
        self._replace(node, result)

    def _early(self, node: fx.Node) -> None:
        """Puts a result right behind its sources.  Where backward stood, they would live until the end of forward."""
        for source in node.all_input_nodes:
            if source.op == "call_function" and source not in self.joint.forward:
                self._early(source)
        sources = [source for source in node.all_input_nodes if source.op == "call_function"]
        if sources and node not in self.joint.forward:
            behind(max(sources)).prepend(node)

    def _replace(self, node: fx.Node, other: fx.Node) -> None:
        """Backward reads another node of the same value."""
        found = self.found
        sources, readers = found.recomputed.pop(node), found.readers.pop(node, set())
        found.instead[node] = other
        found.readers.setdefault(other, set()).update(readers)
        for reader in readers:
            if reader in found.recomputed:
                found.recomputed[reader] = [other if source is node else source for source in found.recomputed[reader]]
        drop_reader(node, sources, found)

    def _add(self, result: fx.Node) -> None:
        """The nodes of a pointwise chain are recomputed."""
        stack = [result]
        while stack:
            one = stack.pop()
            if one in self.found.recomputed or one in self.found.kept or is_free(one):
                continue
            self.found.recomputed[one] = list(one.all_input_nodes)
            for source in one.all_input_nodes:
                self.found.readers.setdefault(source, set()).add(one)
                stack.append(source)


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


def settled(
    graph: fx.Graph, outputs: Outputs, bits: int, chosen: Decision | None = None
) -> tuple[Joint, Decision, Rounded]:
    """What is kept, and in how many bits; ops with branches become pointwise chains where they need exact values.

    chosen: what backward recomputes, where a budget has chosen it.
    """
    stuck, exact, before = set[fx.Node](), set[fx.Node](), set(graph.nodes)
    while True:
        # A chain that is added to answer a question is another one in each round.
        nodes, joint = set(graph.nodes), Joint(graph, outputs)
        if chosen is None:
            decided = decide(joint, nearly_free.scores)
        else:
            chains = {node for node in graph.nodes if node not in before and sources_of(node, joint) is not None}
            decided = decision_of(joint, chains.union(chosen.recomputed))
            decided.peak_target = chosen.peak_target
        choice = _Choice(joint, decided, bits, stuck, set(exact))
        while choice.settle():
            pass
        if not choice.rounded.branching:
            if choice.exact & nodes == exact:
                return joint, decided, choice.rounded
            # Once more, without answers for values that are exact.
            exact = choice.exact & nodes
        # In the order of the graph, so that nodes have the same names in every process, which caches ask for.
        branching = [node for node in graph.nodes if node in choice.rounded.branching]
        stuck.update(node for node in branching if not write_pointwise_chain(graph, node))
        graph.eliminate_dead_code()
