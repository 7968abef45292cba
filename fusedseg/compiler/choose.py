"""A budget: which values forward keeps, and which convolutions and matrix products run twice for it.

``cut.py`` gives the values that are computed again, for falling prices of arithmetic.  Each of these choices has a
price of its own, counted on the schedule that will run: kept bytes, repeated arithmetic, and the peak (``live.py``).
The choices on the way down do not depend on the budget, and one whose peak is above the lowest before it is left out.
So a smaller budget never has a higher peak.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from torch import fx

from .._sizes import text_of
from . import keep, reinplace
from .cut import Cut
from .joint import Goal, Joint, flops_of
from .live import Live, nbytes_of
from .settings import OP
from .wanted import Wanted

# A cheap call costs so much arithmetic for each byte that it reads or writes, so that long chains are not for nothing.
CHEAP = 1
# A choice is left out if it keeps less by so small a share of eager mode's bytes, but for the last one.
LEAST = 0.004
# The share by which the peak may rise, for small tensors such as copies of biases.
SAME = 1e-3


class Cost(NamedTuple):
    """The bytes that forward keeps, the arithmetic that backward repeats, and the most bytes at once."""

    kept: int
    flops: int
    peak: int


class Choice(NamedTuple):
    plan: keep.Plan
    cost: Cost


def eager_bytes(joint: Joint) -> int:
    """The bytes that autograd keeps in eager mode: results of forward that backward reads, each memory once."""
    roots = reinplace.roots_of(joint.graph)
    # A part of what a call of forward has made is a value of forward, even if backward alone reads that part.
    made = {node for node in joint.graph.nodes if keep.call_node(node) in joint.forward}
    kept = {roots[node] for node in joint.gradients if node in made}
    for node in joint.graph.nodes:
        if node not in made and node is not joint.end:
            kept |= {roots[source] for source in node.all_input_nodes if source in made}
    return sum(nbytes_of(root) for root in kept if root.op == "call_function")


class Choices:
    """The choices for one graph.

    Args:
        joint: the graph.
        eager: the bytes that eager mode keeps.
        fused: whether Inductor generates the code, which computes elementwise neighbours in one kernel.
    """

    def __init__(self, joint: Joint, eager: int, fused: bool) -> None:
        self.joint, self._eager = joint, eager
        self.live = Live(joint, fused)
        self.flops = {node: flops_of(node) for node in joint.forward}
        self.total = sum(self.flops.values())

    def _price(self, call: fx.Node) -> int:
        """What a second run of a call costs."""
        return self.flops.get(call) or CHEAP * sum(map(nbytes_of, (call, *call.all_input_nodes)))

    def nbytes(self, node: fx.Node) -> int:
        return 0 if node in self.joint.returned else nbytes_of(node)

    def cut(self) -> Cut:
        return Cut(self.joint, self.nbytes, self._price)

    def _plans(self) -> Iterator[keep.Plan]:
        """Plans that keep less and less."""
        cut = self.cut()
        again: frozenset[fx.Node] = frozenset()
        for step, next_ones in enumerate(cut.steps()):
            parts: Sequence[AbstractSet[fx.Node]] = [next_ones]
            if step > 0:
                parts = sorted(cut.parts(next_ones - again), key=self._flops_of)
            for part in parts:
                again |= part
                yield keep.plan_of(self.joint, again)

    def _flops_of(self, nodes: AbstractSet[fx.Node]) -> int:
        return sum(self.flops.get(call, 0) for call in {keep.call_node(node) for node in nodes})

    def on_the_way_down(self, most_flops: float) -> Iterator[Choice]:
        """The choices within so much arithmetic that keep less and less, and do not peak higher and higher."""
        first = keep.plan(self.joint)
        best = Choice(first, self._cost(first))
        yield best
        lowest = best.cost.peak
        for plan in self._plans():
            kept = self.live.kept(plan)
            if kept > best.cost.kept - LEAST * self._eager:
                continue
            if self._flops_of(set(plan.again)) > most_flops:
                return
            plan.goal = Goal(lowest * (1 + SAME), most_flops)
            cost = self._cost(plan)
            if cost.peak <= plan.goal.peak and cost.flops <= most_flops:
                best = Choice(plan, cost)
                lowest = min(lowest, cost.peak)
                yield best

    def _cost(self, plan: keep.Plan) -> Cost:
        peak, flops = self.live.peak(plan)
        return Cost(self.live.kept(plan), flops, peak)


def choose(joint: Joint, wanted: Wanted, eager: int, fused: bool) -> keep.Plan:
    """The plan for a budget, or the nearest one, with a warning.

    Args:
        joint: the graph.
        wanted: the budget.
        eager: the bytes that eager mode keeps.
        fused: as in ``Choices``.
    """
    return chosen(Choices(joint, eager, fused), wanted, eager).plan


def chosen(choices: Choices, wanted: Wanted, eager: int) -> Choice:
    budget, arguments = wanted.budget, choices.live.arguments
    most = budget.bytes_of(eager)
    for found in choices.on_the_way_down(budget.most_flops * choices.total):
        kept_enough = most is not None and found.cost.kept <= most
        if kept_enough or (wanted.peak is not None and found.cost.peak + arguments <= wanted.peak):
            break
    else:
        _warn_of(found.cost, wanted, eager, choices)
    return found


def _warn_of(cost: Cost, wanted: Wanted, eager: int, choices: Choices) -> None:
    """Says which budget can be met; one without a number of bytes always is."""
    most, peak = wanted.budget.bytes_of(eager), cost.peak + choices.live.arguments
    if wanted.peak is not None:
        asked, nearest = f"a peak of {text_of(wanted.peak)}", f"a peak of {text_of(peak)}"
    elif most is not None:
        asked, nearest = (
            f"budget {text_of(most)}",
            f"{text_of(cost.kept)}, which is a share of {_up(cost.kept / eager)}",
        )
    else:
        return
    warnings.warn(
        f"{OP}: {asked} cannot be met without a higher peak or more arithmetic.  The nearest that can is {nearest}; "
        f"{cost.flops / max(choices.total, 1):.1%} of the forward's arithmetic runs again, and extra_flops, which is "
        f"{wanted.budget.most_flops:g}, limits it",
        stacklevel=2,
    )


def _up(share: float) -> str:
    return f"{math.ceil(share * 1000) / 1000:g}"
