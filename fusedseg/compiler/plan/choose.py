"""Which values forward keeps, and which convolutions and matrix products run twice.

``min_cut.py`` gives the values that are recomputed for a price of what runs again.  Without a budget it is
``DEFAULT_PRICE``, and no compute-intensive op runs again, but for those of which a second run is nearly free
(``nearly_free.py``).

For a budget the prices fall.  Each of these choices has a price of its own, counted on the schedule of ``peak.py``:
kept bytes, repeated arithmetic, and the peak.
The choices do not depend on the budget.  Each keeps less than the one before it, and one whose peak is above the lowest
before it is left out.  So a smaller budget has no higher peak, but for ``PEAK_SLACK``.  With ``extra_flops`` alone the
last choice counts: none may peak above the first.
Arithmetic that is left at the end, too little for the next choice, buys single compute-intensive ops.
They run a third time where the peak loses as many bytes for it as the choice keeps less for its arithmetic.
"""

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import NamedTuple

from torch import fx

from ..._sizes import text_of
from ...memory.step_bytes import StepBytes
from ..budget import Budget
from ..graph import Joint, nbytes_of, twin_of
from ..settings import OP
from . import nearly_free
from .decision import Decision, call_node, decision_that_recomputes, inputs_of
from .min_cut import DEFAULT_PRICE, UNIT, Cut
from .peak import ByteModel
from .schedule import PeakTarget, is_inlined

# A call that Inductor computes inside the kernels that read it costs 1 / INLINED of the bytes that it would move, so
# that endless chains are not for nothing.
INLINED = 32
# A choice is left out if it keeps less by so small a share of eager mode's bytes, but for the last one.
LEAST_SAVED = 0.004
# The search ends after so many choices in a row that peak higher.
TRIES = 12
# So many choices that repeat too much are tried without one of their compute-intensive ops.
NEAREST = 4
# The share by which the peak may rise, for small tensors such as copies of biases.
PEAK_SLACK = 1e-3


class Choice(NamedTuple):
    """A decision, what it costs, and whether it meets the budget."""

    decision: Decision
    cost: StepBytes
    met: bool = True


class Choices:
    """The choices for one graph.

    by_inductor: whether Inductor generates the code.
    peak_target: that of the decision without a budget.
    """

    def __init__(self, joint: Joint, by_inductor: bool, peak_target: PeakTarget | None = None) -> None:
        self.joint, self.eager = joint, joint.outputs.eager
        self.by_inductor, self.peak_target = by_inductor, peak_target
        self.model = ByteModel(joint, by_inductor)
        self.flops, self.total = self.model.flops, self.model.total

    def _price(self, call: fx.Node) -> int:
        """What a second run of a call costs: arithmetic, or the bytes that it reads and writes."""
        if flops := self.flops.get(call):
            return flops
        moved = sum(map(nbytes_of, (call, *inputs_of(call))))
        return moved // INLINED if self.by_inductor and is_inlined(call) else moved

    def nbytes(self, node: fx.Node) -> int:
        return 0 if node in self.joint.free_to_save else nbytes_of(node)

    def first(self, share: float = nearly_free.SHARE, from_larger: bool = False) -> Decision:
        """The decision without a budget: no compute-intensive op runs again that is not nearly free.

        share: that of ``nearly_free.cheapest``.  from_larger: that of ``Cut``.
        """
        cut = Cut(self.joint, partial(Choices.nbytes, self), self._price, from_larger=from_larger)

        def decided(intensive: AbstractSet[fx.Node]) -> Decision:
            recomputed = cut.with_intensive(intensive, UNIT * DEFAULT_PRICE)
            return replace(decision_that_recomputes(self.joint, recomputed), peak_target=self.peak_target)

        choices = [decided(frozenset())]
        twice_run = nearly_free.scores(cut.compute_intensive, self.joint)
        if share:
            # Of what would be saved if cheap calls cost nothing: the results of compute-intensive ops themselves.
            saved = decision_that_recomputes(self.joint, cut.all_cheap()).saved
            twice_run |= nearly_free.cheapest(saved, self.joint, share)
        if twice_run:
            # A compute-intensive op that runs again may need an input that backward would not keep otherwise.
            choices.insert(0, decided(twice_run))
        return min(choices, key=lambda choice: sum(map(nbytes_of, choice.saved)))

    def cut(self) -> Cut:
        return Cut(self.joint, self.nbytes, self._price)

    def kept(self, decision: Decision) -> int:
        """The bytes that forward keeps, or a few less."""
        return self.model.kept(decision)

    def counted(self, decision: Decision) -> Choice:
        """A decision with what it costs; one without a target of the peak may get one."""
        return Choice(decision, self.model.needs(decision))

    def flops_of(self, nodes: Iterable[fx.Node]) -> int:
        """The arithmetic of the compute-intensive ops that compute these nodes, once each."""
        return sum(self.flops.get(call, 0) for call in {call_node(node) for node in nodes})

    def in_copy(self, known: "Known", most_flops: float, falling_peak: bool) -> Iterator[Choice]:
        """``frontier`` for a graph that is divided in several ways: it is found once for all equal copies of it.

        The search goes on in a copy of its own, which nobody changes, and its choices are those of this graph.
        """
        key = (str(self.joint.graph), self.eager, self.by_inductor, self.peak_target, most_flops, falling_peak)
        if key not in known:
            twin = Joint(twin_of(self.joint.graph)[0], self.joint.outputs)
            search = Choices(twin, self.by_inductor, self.peak_target).frontier(most_flops, falling_peak)
            known[key] = (list(twin.graph.nodes), search)
        twins, search = known[key]
        found, search = itertools.tee(search)
        known[key] = (twins, search)
        own = dict(zip(twins, self.joint.graph.nodes, strict=True))
        for decision, cost, _ in found:
            of_own = decision_that_recomputes(self.joint, {own[node] for node in decision.recomputed})
            yield Choice(replace(of_own, peak_target=decision.peak_target), cost)

    def frontier(self, most_flops: float, falling_peak: bool = True) -> Iterator[Choice]:
        """The choices within so much arithmetic that keep less and less.

        With ``falling_peak`` none peaks higher than one before it, otherwise none peaks higher than the first one.
        """
        search = Search(self, self.counted(self.first()), most_flops, falling_peak)
        yield search.best
        cut = self.cut()
        steps = cut.steps()
        search.recomputed = next(iter(steps))
        # The first choices for which there is too little arithmetic, and their prices.
        over_flops: dict[frozenset[fx.Node], float] = {}
        for wanted, price in steps.items():
            # Parts that save too little by themselves.
            small: frozenset[fx.Node] = frozenset()
            for part in sorted(cut.parts(wanted - search.recomputed), key=self.flops_of) or [set()]:
                tried = search.recomputed | small | part
                verdict = search.try_with(tried)
                if verdict is TrialResult.OVER_FLOPS and len(over_flops) < NEAREST:
                    over_flops.setdefault(tried, price)
                if verdict is TrialResult.OVER_FLOPS or search.is_over:
                    break
                small = small | part if verdict is TrialResult.SMALL else frozenset()
                if verdict is TrialResult.TAKEN:
                    yield search.best
            if search.is_over:
                return
        if over_flops:
            search.refused.clear()
            yield from self._use_up(search, cut, over_flops)

    def _use_up(self, search: "Search", cut: Cut, over_flops: dict[frozenset[fx.Node], float]) -> Iterator[Choice]:
        """Choices that use up the arithmetic: those of ``over_flops`` with one op less, and then with one op more."""
        price = next(iter(over_flops.values()))
        for more in over_flops:
            intensive = cut.compute_intensive & {
                call_node(node) for node in decision_that_recomputes(self.joint, more).recomputed
            }
            for call in sorted(intensive, key=self.nbytes):
                if self.flops_of(intensive - {call}) > search.most_flops:
                    continue
                if search.try_with(cut.with_intensive(intensive - {call}, over_flops[more])) is TrialResult.TAKEN:
                    yield search.best
                    break
                if search.is_over:
                    return
        for call in sorted(cut.compute_intensive, key=lambda call: -self.nbytes(call) / max(self.flops[call], 1)):
            intensive = cut.compute_intensive & {call_node(node) for node in search.best.decision.recomputed}
            if call in intensive or self.flops_of(intensive | {call}) > search.most_flops:
                continue
            if search.try_with(search.recomputed | cut.with_intensive(intensive | {call}, price)) is TrialResult.TAKEN:
                yield search.best
            if search.is_over:
                return


class TrialResult(Enum):
    """What becomes of a choice that is tried: it is the next one, saves too little, or repeats or peaks too much."""

    TAKEN = auto()
    SMALL = auto()
    OVER_FLOPS = auto()
    OVER_PEAK = auto()


class Search:
    """Counts one set of recomputed values after the other, and takes each that keeps less within arithmetic and peak.

    Attributes:
        best: the choice that was taken last.
        recomputed: the values that may be recomputed in it.
        refused: the sets that were tried since then, and with which the peak was too high.
    """

    def __init__(self, choices: Choices, best: Choice, most_flops: float, falling_peak: bool) -> None:
        self._choices, self.best, self.most_flops, self._falling_peak = choices, best, most_flops, falling_peak
        self.recomputed: frozenset[fx.Node] = frozenset()
        self.refused: set[frozenset[fx.Node]] = set()
        self._most = best.cost.peak

    @property
    def is_over(self) -> bool:
        """Whether too many choices in a row peaked too high."""
        return len(self.refused) == TRIES

    def try_with(self, tried: frozenset[fx.Node]) -> TrialResult:
        """Tries the choice with these values."""
        of, best = self._choices, self.best
        decision = decision_that_recomputes(of.joint, tried)
        enough = best.cost.kept - LEAST_SAVED * of.eager
        kept, flops = of.kept(decision), of.flops_of(decision.recomputed)
        if kept > enough or tried in self.refused:
            return TrialResult.SMALL
        if flops > self.most_flops:
            return TrialResult.OVER_FLOPS
        # A byte of the peak is worth as much as one that is kept.
        price = max(flops - of.flops_of(best.decision.recomputed), 0) / max(of.kept(best.decision) - kept, 1)
        decision.peak_target = PeakTarget(self._most * (1 + PEAK_SLACK), self.most_flops, price)
        found = of.counted(decision)
        cost = found.cost
        if cost.kept > enough or cost.peak > decision.peak_target.peak or cost.repeated * of.total > self.most_flops:
            self.refused.add(tried)
            return TrialResult.OVER_PEAK
        self.best, self.recomputed = found, tried
        if self._falling_peak:
            self._most = min(self._most, cost.peak)
        self.refused.clear()
        return TrialResult.TAKEN


# Of a graph, by what a search depends on: the nodes of its copy, and the search.  All are copies of one joint graph, so
# that the text of a graph, which has no sizes, tells them apart.
Known = dict[tuple[object, ...], tuple[list[fx.Node], Iterator[Choice]]]


def nearest(
    choices: Choices, budget: Budget | None, most: StepBytes | None = None, known: Known | None = None
) -> Choice:
    """The choice for a budget that keeps and peaks at no more than ``most``.

    If no choice meets it, the last one within ``most``, or the last of all.  Without a budget, the first choice.
    ``known`` has the searches of other ways to divide the same graph.
    """
    frontier = choices.frontier if known is None else partial(choices.in_copy, known)
    if budget is None:
        return next(frontier(0.0, True))
    nbytes, arguments = budget.bytes_of(choices.eager), choices.model.arguments
    # Arithmetic alone asks for the fewest bytes; a budget stops before.
    falling_peak = nbytes is not None or budget.peak is not None
    last = None
    for found in frontier(budget.most_flops * choices.total, falling_peak):
        if most is not None and not found.cost.is_within(most):
            continue
        last = found
        kept_enough = nbytes is not None and found.cost.kept <= nbytes
        if kept_enough or (budget.peak is not None and found.cost.peak + arguments <= budget.peak):
            return found
    return (last or found)._replace(met=False)


def warn_of(cost: StepBytes, budget: Budget | None, choices: Choices) -> None:
    """Says which budget can be met.  A budget without a number of bytes is always met."""
    assert budget is not None
    most, peak = budget.bytes_of(choices.eager), cost.peak + choices.model.arguments
    if budget.peak is not None:
        asked, nearest = f"a peak of {text_of(budget.peak)}", f"a peak of {text_of(peak)}"
    elif most is not None:
        share = math.ceil(cost.kept / choices.eager * 1000) / 1000
        asked, nearest = f"budget {text_of(most)}", f"{text_of(cost.kept)}, which is a share of {share:g}"
    else:
        return
    warnings.warn(
        f"{OP}: {asked} cannot be met without a higher peak or more arithmetic.  The nearest that can is {nearest}; "
        f"{cost.repeated:.1%} of the forward's arithmetic runs again, and extra_flops, which is "
        f"{budget.most_flops:g}, limits it",
        stacklevel=2,
    )
