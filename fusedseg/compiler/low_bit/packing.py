"""What is packed, written into the graph: the nodes that pack and unpack, and what a step costs with them."""

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from ...memory.step_bytes import StepBytes
from ...ops.low_bit import graph as ops
from ...ops.low_bit.spec import SMOOTH_BITS
from .. import passes
from ..graph import Joint, behind, call, form_in, size_of, twin_of, value_of
from ..plan import write
from ..plan.choose import Choice, Choices
from ..plan.decision import RECOMPUTE, SAVE, Decision, call_node, decision_that_recomputes
from ..plan.min_cut import Cut
from ..plan.peak import ByteModel
from ..plan.recompute import Norm
from ..plan.schedule import LOWEST
from .choose_bits import bits_of, settled
from .rule import Packed, Rule


def _pack(graph: fx.Graph, packed: dict[fx.Node, Packed], seed: int) -> tuple[list[fx.Node], write.Unpacking]:
    """New nodes that pack, each right after its value is computed, and for each value the call that unpacks it."""
    packing: list[fx.Node] = []
    unpacking: dict[fx.Node, tuple[Any, ...]] = {}

    def added(target: Callable[..., object], *given: Any, before: fx.Node) -> fx.Node:
        packing.append(call(graph, target, *given, before=before))
        return packing[-1]

    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    is_rounded = any(value_of(node).is_floating_point() for node in packed)
    key = call(graph, ops.rounding_key, seed, before=first) if is_rounded else None
    for place, node in enumerate([node for node in graph.nodes if node in packed]):
        how, after, kink = packed[node], behind(node), None
        form = form_in(graph, node, after)
        if not value_of(node).is_floating_point():
            codes = added(ops.bits_pack, node, how.bits, form[1], before=after)
            unpacking[node] = (ops.bits_unpack, codes, how.bits, value_of(node).dtype, *form)
            continue
        if isinstance(norm := how.sign, Norm):
            after = behind(call_node(norm.mean))
            of_norm = (norm.x, norm.mean, norm.rstd, norm.weight, norm.bias, norm.of_samples)
            kink = added(ops.norm_kink, *of_norm, before=after)
        codes = added(ops.round_op, node, how.bits, key, place, kink, how.unit, form[1], before=after)
        results = [added(operator.getitem, codes, k, before=after) for k in range(3)]
        unpacking[node] = (ops.unpack_op, *results, kink, how.bits, how.unit, *form)
    return packing, unpacking


def packed(rule: Rule, seed: int, by_inductor: bool, exact: StepBytes) -> Choice:
    """Writes a decision into its graph, with everything that packs and unpacks, and counts it there.

    exact: what the step costs without bits.  Where the packed one peaks higher, values are computed once more until the
        peak is the lowest, whatever time it takes; the target of the peak of the decision that is returned says so.
    """
    before, decided = rule.facts.joint, rule.found
    graph = before.graph
    write.apply(before, decided, *_pack(graph, rule.packed, seed))
    graph.eliminate_dead_code()
    passes.run(passes.Stage.PACKED, passes.JOINT, graph)
    policies = decided.policies
    joint = Joint(graph, before.outputs, [node for node in graph.nodes if policies.get(node) is SAVE])
    counted = decision_that_recomputes(joint, {node for node in graph.nodes if policies.get(node) is RECOMPUTE})
    counted.peak_target = decided.peak_target
    model = ByteModel(joint, by_inductor)
    cost = model.needs(counted)
    if counted.peak_target is None and not cost.is_within(exact):
        counted.peak_target = LOWEST
        lowest = model.needs(counted)
        # The search is greedy, and may end higher.
        if lowest.is_within(exact) or lowest.peak < cost.peak:
            return Choice(replace(decided, peak_target=LOWEST), lowest)
    return Choice(decided, cost)


class RoundedChoices(Choices):
    """The choices with ``bits``: what is kept is packed, and so costs fewer bytes.

    Each choice is counted on a copy of the graph with everything that packs, unpacks and answers predicates.
    """

    def __init__(self, joint: Joint, by_inductor: bool, bits: int, exact: StepBytes) -> None:
        super().__init__(joint, by_inductor)
        self._bits, self._exact = bits, exact

    def nbytes(self, node: fx.Node) -> int:
        nbytes, bits = super().nbytes(node), bits_of(node, self._bits)
        return min(nbytes, size_of(node) * bits // 8) if bits else nbytes

    def first(self, share: float = 0.0, from_larger: bool = True) -> Decision:
        # The result of a pool is picked from the larger value, which costs fewer bytes than to keep both.
        return super().first(share, from_larger)

    def cut(self) -> Cut:
        def is_rounded(node: fx.Node) -> bool:
            return self.nbytes(node) < Choices.nbytes(self, node)

        return Cut(self.joint, self.nbytes, self._price, is_rounded if self._bits < SMOOTH_BITS else None)

    def kept(self, decision: Decision) -> int:
        return sum(map(self.nbytes, decision.saved))

    def counted(self, decision: Decision) -> Choice:
        graph, twins = twin_of(self.joint.graph)
        chosen = replace(decision, recomputed={twins[node]: [] for node in decision.recomputed})
        rule = settled(graph, self.joint.outputs, self._bits, chosen)
        found = packed(rule, seed=0, by_inductor=self.by_inductor, exact=self._exact)
        return Choice(replace(decision, peak_target=found.decision.peak_target), found.cost)
