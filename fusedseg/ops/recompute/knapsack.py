"""Chooses which calls run twice: branch and bound over a price that is not additive.

The price of a set of calls is bytes, arithmetic and peak (``Graph.cost``).  Sums over the calls bound bytes and
arithmetic: a set saves at most the sum of the bytes that each call saves by itself, and repeats at least the sum of the
arithmetic that each call repeats by itself, because a call can only be needed more often if other calls run twice too.
If a part of a call could run twice, these sums would be least for the calls with the least arithmetic per byte, and a
part of the last one.  This bound prunes the search, and the true price decides.

``descend`` lowers the bytes in small steps that do not depend on the budget.  Each step takes the set with the least
arithmetic among those whose peak is not above the lowest peak so far.  So a smaller budget never has a larger peak, but
for ``SAME``, the share by which the peak may rise for small tensors such as copies of biases.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from .graph import Cost

# A search ends after this many prices or this many steps, with the best set so far.  Up to about eight calls, it
# always ends before.
MOST_PRICES = 150
MOST_STEPS = 20_000
# The number of steps into which ``descend`` divides the bytes that a step keeps without fusedseg.
STEPS = 100
SAME = 1e-3

Price = Callable[[frozenset[int]], Cost | None]
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
    """A set of calls and its price.  ``exact`` says that the search ended by itself, so that no set is better."""

    again: Again
    cost: Cost
    exact: bool

    def is_better_than(self, other: "Found | None") -> bool:
        return other is None or (self.cost.flops, self.cost.peak, self.cost.kept) < (
            other.cost.flops,
            other.cost.peak,
            other.cost.kept,
        )


@dataclass(frozen=True)
class Item:
    """A call by itself: the bytes that it saves, and the arithmetic that it repeats."""

    index: int
    saves: int
    flops: int


class Knapsack:
    """The problem: the calls that may run twice, and the price of each set of them.

    Args:
        calls: the indices of the calls.
        price: returns the price of a set, or None if the set is not possible.
    """

    def __init__(self, calls: Iterable[int], price: Price) -> None:
        self._price = price
        self._known: dict[Again, Cost | None] = {}
        nothing = self.cost(frozenset())
        assert nothing is not None
        self.nothing = nothing
        alone = {i: self.cost(frozenset((i,))) for i in calls}
        items = [
            Item(i, nothing.kept - cost.kept, cost.flops - nothing.flops)
            for i, cost in alone.items()
            if cost is not None and cost.kept < nothing.kept
        ]
        self._items = sorted(items, key=lambda item: item.flops / item.saves)
        # The bytes that the items from each position on save together.
        self._left = [sum(item.saves for item in self._items[at:]) for at in range(len(items) + 1)]

    def cost(self, again: Again) -> Cost | None:
        if again not in self._known:
            self._known[again] = self._price(again)
        return self._known[again]

    def solve(self, limits: Limits, start: Again = frozenset()) -> Found | None:
        """The set with the least arithmetic within the limits; None if none was found.

        ``start`` is a set that nearly fits, from which the search may go on.
        """
        best = self._first(limits, frozenset())
        if start:
            other = self._first(limits, start)
            best = other if other is not None and other.is_better_than(best) else best
        items, need = self._items, self.nothing.kept - limits.kept
        prices = steps = 0
        # (position, set, bytes that it saves at most, arithmetic that it repeats at least); the last one is next.
        stack: list[tuple[int, Again, int, int]] = [(0, frozenset(), 0, 0)]
        while stack and prices < MOST_PRICES and steps < MOST_STEPS:
            at, again, saves, flops = stack.pop()
            steps += 1
            if saves + self._left[at] < need:
                continue
            bound = flops + self._least(at, need - saves)
            if bound > limits.flops or (best is not None and bound >= best.cost.flops):
                continue
            if saves >= need:
                cost = self.cost(again)
                prices += 1
                if cost is None or cost.flops > limits.flops:
                    # More calls would only make it worse.
                    continue
                if limits.allow(cost):
                    found = Found(again, cost, exact=True)
                    best = found if found.is_better_than(best) else best
                    continue
            if at == len(items):
                continue
            item = items[at]
            stack.append((at + 1, again, saves, flops))
            stack.append((at + 1, again | {item.index}, saves + item.saves, flops + item.flops))
        return best if best is None or not stack else Found(best.again, best.cost, exact=False)

    def _least(self, at: int, need: float) -> float:
        """The least arithmetic by which the items from ``at`` on save ``need`` bytes, in parts if necessary."""
        flops = 0.0
        for item in self._items[at:]:
            if need <= 0:
                break
            flops += item.flops * min(1.0, need / item.saves)
            need -= item.saves
        return flops

    def _first(self, limits: Limits, again: Again) -> Found | None:
        """A good first set: items by their arithmetic per byte until the bytes are reached, and then exchanges."""
        best: Found | None = None
        for item in (None, *self._items):
            again = again if item is None else again | {item.index}
            cost = self.cost(again)
            if limits.allow(cost):
                assert cost is not None
                best = Found(again, cost, exact=True)
                break
        left = MOST_PRICES
        better = best is not None
        while better and best is not None and left > 0:
            better = False
            for changed in islice(self._neighbours(best.again), left):
                left -= 1
                cost = self.cost(changed)
                if limits.allow(cost):
                    assert cost is not None
                    found = Found(changed, cost, exact=True)
                    if found.is_better_than(best):
                        best, better = found, True
                        break
        return best

    def _neighbours(self, again: Again) -> Iterable[Again]:
        """Sets without one of the calls, and sets with a cheaper call in its place."""
        for i in again:
            yield again - {i}
        flops = {item.index: item.flops for item in self._items}
        for i in again:
            for item in self._items:
                if item.index not in again and item.flops < flops.get(i, inf):
                    yield again - {i} | {item.index}

    def descend(self, eager: int, most_bytes: float, most_flops: float) -> Found:
        """The set for a budget: the first one within ``most_bytes`` on the way down, or else the last one.

        Args:
            eager: bytes that the step keeps without fusedseg; a hundredth of them is the height of a step.
            most_bytes: the bytes that may be kept; -inf for as few as possible.
            most_flops: the arithmetic that may be repeated.
        """
        for best in self.steps(eager, most_flops):
            if best.cost.kept <= most_bytes:
                break
        return best

    def steps(self, eager: int, most_flops: float) -> Iterator[Found]:
        """The sets on the way down, in order; the first one is empty.  Arguments as in ``descend``."""
        best = Found(frozenset(), self.nothing, exact=True)
        yield best
        height = max(1, eager // STEPS)
        level, peak = float(self.nothing.kept), self.nothing.peak
        while (level := level - height) >= 0:
            if best.cost.kept <= level:
                continue
            found = self.solve(Limits(level, most_flops, peak * (1 + SAME)), best.again)
            if found is None:
                return
            best, peak = found, min(peak, found.cost.peak)
            yield best
