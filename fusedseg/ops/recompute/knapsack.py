"""Chooses which calls run twice: branch and bound over a price that is not additive.

The price of a set of calls is bytes, arithmetic and peak (``Graph.cost``).  Sums over the calls bound it: a set saves
at most the sum of the bytes that each call saves by itself, and repeats at least the sum of the arithmetic of its
calls.  At each moment of the step (``Graph.moments``), it lowers the bytes by at most the outputs that are kept then.
So a limit of the bytes, or of the peak, demands a weight that the calls of a set must have together.  If a part of a
call could run twice, each demand would be met at the least by the calls with the least arithmetic per weight, and a
part of the last one.  The largest of these bounds prunes the search, and the true price decides.

``descend`` lowers the bytes in small steps that do not depend on the budget.  Each step takes the set with the least
arithmetic among those whose peak is not above the lowest peak so far.  So a smaller budget never has a larger peak, but
for ``SAME``, the share by which the peak may rise for small tensors such as copies of biases.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf

from .graph import Graph
from .replay import Cost

# A search ends after this many prices or this many steps, with the best set so far.
MOST_PRICES = 60
MOST_STEPS = 3000
# The search may miss this share of the arithmetic of all calls.
CLOSE = 2e-4
# The number of steps into which ``descend`` divides the bytes that a step keeps without fusedseg.
STEPS = 100
SAME = 1e-3

Again = frozenset[int]


@dataclass(frozen=True)
class Limits:
    """What a set may cost at most."""

    kept: float = inf
    flops: float = inf
    peak: float = inf

    def allow(self, cost: Cost | None) -> bool:
        return cost is not None and cost.kept <= self.kept and cost.flops <= self.flops and cost.peak <= self.peak


@dataclass(frozen=True)
class Found:
    """A set of calls and its price."""

    again: Again
    cost: Cost

    def is_better_than(self, other: "Found | None") -> bool:
        return other is None or (self.cost.flops, self.cost.peak, self.cost.kept) < (
            other.cost.flops,
            other.cost.peak,
            other.cost.kept,
        )


@dataclass(frozen=True)
class Item:
    """A call by itself: the bytes that it saves, and the arithmetic of one run."""

    index: int
    saves: int
    flops: int


class Weights:
    """The weight of each item for one demand, and the least arithmetic of a weight.

    Args:
        items: the items, in the order of the search.
        weights: their weights.
    """

    def __init__(self, items: list[Item], weights: list[int]) -> None:
        self.weights = weights
        # For the items from each position on: sums of weights and of arithmetic, the cheapest items first.
        self._sums: list[tuple[list[int], list[int]]] = []
        self._items = items
        order = sorted((i for i, w in enumerate(weights) if w), key=lambda i: items[i].flops / weights[i])
        for at in range(len(items) + 1):
            own = [i for i in order if i >= at]
            self._sums.append(([*accumulate(weights[i] for i in own)], [0, *accumulate(items[i].flops for i in own)]))

    def least(self, at: int, need: float) -> float:
        """The least arithmetic by which the items from ``at`` on weigh ``need``, in parts if necessary."""
        if need <= 0:
            return 0.0
        weights, flops = self._sums[at]
        i = bisect_left(weights, need)
        if i == len(weights):
            return inf
        before = weights[i - 1] if i else 0
        return flops[i] + (flops[i + 1] - flops[i]) * (need - before) / (weights[i] - before)


class Knapsack:
    """The problem: the calls of a step that may run twice, and the price of each set of them.

    ``hold_all`` is that of ``Graph.cost``.
    """

    def __init__(self, graph: Graph, *, hold_all: bool = False) -> None:
        self._price = partial(graph.cost, hold_all=hold_all)
        self._known: dict[Again, Cost | None] = {}
        nothing = self.cost(frozenset())
        assert nothing is not None
        self.nothing = nothing
        alone = {i: self.cost(frozenset((i,))) for i in graph.choosable}
        items = [
            Item(i, nothing.kept - cost.kept, graph.calls[i].flops)
            for i, cost in alone.items()
            if cost is not None and cost.kept < nothing.kept
        ]
        self._items = sorted(items, key=lambda item: item.flops / item.saves)
        self._saves = Weights(self._items, [item.saves for item in self._items])
        self._moments = sorted(graph.moments(), key=lambda moment: sum(moment.outputs.values()))
        self._weights: dict[int, Weights] = {}
        self._close = CLOSE * sum(item.flops for item in items)

    def cost(self, again: Again) -> Cost | None:
        if again not in self._known:
            self._known[again] = self._price(again)
        return self._known[again]

    def _demands(self, limits: Limits) -> list[tuple[Weights, float]]:
        """What a set must weigh at least to be within the limits."""
        demands = [(self._saves, self.nothing.kept - limits.kept)]
        most = 0.0
        for i, moment in enumerate(self._moments):
            need = moment.nbytes - limits.peak
            # A moment with more outputs demands less than one with fewer outputs and more bytes.
            if need > most:
                most = need
                if i not in self._weights:
                    weights = [moment.outputs.get(item.index, 0) for item in self._items]
                    self._weights[i] = Weights(self._items, weights)
                demands.append((self._weights[i], need))
        return demands

    def solve(self, limits: Limits, start: Again = frozenset()) -> Found | None:
        """The set with the least arithmetic within the limits; None if none was found.

        ``start`` is a set that nearly fits, from which the search may go on.
        """
        items, demands = self._items, self._demands(limits)
        weights = [demand.weights for demand, _ in demands]
        best: Found | None = None
        for first in (start, frozenset()):
            found = self._greedy(limits, demands, first)
            if found is not None and found.is_better_than(best):
                best = found
        prices = steps = 0
        # (position, set, its arithmetic at least, what it must weigh beyond its weights); the last one is next.
        stack: list[tuple[int, Again, int, tuple[float, ...]]] = [(0, frozenset(), 0, tuple(n for _, n in demands))]
        while stack and prices < MOST_PRICES and steps < MOST_STEPS:
            at, again, flops, needs = stack.pop()
            steps += 1
            bound = flops + max(demand.least(at, need) for (demand, _), need in zip(demands, needs, strict=True))
            if bound > limits.flops or (best is not None and bound >= best.cost.flops - self._close):
                continue
            if max(needs) <= 0:
                cost = self.cost(again)
                prices += 1
                if cost is None or cost.flops > limits.flops:
                    # More calls would only make it worse.
                    continue
                if limits.allow(cost):
                    found = Found(again, cost)
                    best = found if found.is_better_than(best) else best
                    continue
            if at == len(items):
                continue
            item = items[at]
            stack.append((at + 1, again, flops, needs))
            less = tuple(need - weight[at] for need, weight in zip(needs, weights, strict=True))
            stack.append((at + 1, again | {item.index}, flops + item.flops, less))
        return best

    def _greedy(self, limits: Limits, demands: list[tuple[Weights, float]], again: Again) -> Found | None:
        """A good first set: items by their arithmetic per weight until all demands are met, without needless ones."""
        left = {at: item for at, item in enumerate(self._items) if item.index not in again}
        needs = [
            need - sum(w for item, w in zip(self._items, of.weights, strict=True) if item.index in again)
            for of, need in demands
        ]
        while left:
            if max(needs) <= 0 and limits.allow(self.cost(again)):
                break
            unmet = [(of.weights, need) for (of, _), need in zip(demands, needs, strict=True) if need > 0]
            at = min(left, key=partial(self._dearness, unmet=unmet))
            again = again | {left.pop(at).index}
            needs = [need - of.weights[at] for (of, _), need in zip(demands, needs, strict=True)]
        cost = self.cost(again)
        if not limits.allow(cost):
            return None
        assert cost is not None
        best = Found(again, cost)
        for item in sorted(self._items, key=lambda item: -item.flops):
            if item.index in best.again:
                fewer = best.again - {item.index}
                cost = self.cost(fewer)
                if limits.allow(cost):
                    assert cost is not None
                    best = Found(fewer, cost)
        return best

    def _dearness(self, at: int, unmet: list[tuple[list[int], float]]) -> float:
        """The arithmetic of an item for its shares of the unmet demands, or for its bytes if all demands are met."""
        item = self._items[at]
        gain = sum(min(1.0, weights[at] / need) for weights, need in unmet) if unmet else item.saves
        return item.flops / gain if gain else inf

    def descend(self, eager: int, most_bytes: float, most_flops: float, unknown: int = 0) -> Found:
        """The set for a budget: the first one within ``most_bytes`` on the way down, or else the last one.

        Args:
            eager: bytes that the step keeps without fusedseg; the steps end at hundredths of them.
            most_bytes: the bytes that may be kept; -inf for as few as possible.
            most_flops: the arithmetic that may be repeated.
            unknown: bytes that are kept but not priced.
        """
        for best in self.steps(eager, most_flops, unknown):
            if best.cost.kept <= most_bytes:
                break
        return best

    def steps(self, eager: int, most_flops: float, unknown: int = 0) -> Iterator[Found]:
        """The sets on the way down, in order; the first one is empty.  Arguments as in ``descend``."""
        best, peak = Found(frozenset(), self.nothing), self.nothing.peak
        yield best
        for step in reversed(range(STEPS)):
            level = step * eager / STEPS - unknown
            if level < 0:
                return
            if best.cost.kept <= level:
                continue
            found = self.solve(Limits(level, most_flops, peak * (1 + SAME)), best.again)
            if found is None:
                return
            best, peak = found, min(peak, found.cost.peak)
            yield best
