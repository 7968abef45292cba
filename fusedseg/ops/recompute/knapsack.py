"""Chooses which calls run twice: branch and bound over a price that is not additive.

The price of a set of calls is bytes and arithmetic.  Both are bounded by sums over the calls: a set saves at most the
sum of the bytes that each call saves by itself, and repeats at least the sum of the arithmetic that each call repeats by
itself.  (A call can only be needed more often if other calls run twice as well.)  Without the whole-number condition,
these sums are minimised by taking calls in the order of arithmetic per byte, and a part of the last one.  This bound
prunes the search.  The true price decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .graph import Cost

# The search ends after this many prices, with the best set so far.  Up to about 12 calls it always ends before.
MOST_PRICES = 1500
MOST_STEPS = 40_000

Price = Callable[[frozenset[int]], Cost | None]


@dataclass(frozen=True)
class Found:
    """A set of calls and its price.  ``exact`` says that the search ended by itself, so that no set is better."""

    again: frozenset[int]
    cost: Cost
    exact: bool


class _Item:
    __slots__ = ("flops", "index", "saves")

    def __init__(self, index: int, saves: int, flops: int) -> None:
        self.index, self.saves, self.flops = index, saves, flops


class Knapsack:
    """The problem: the calls, and the price of each set of them.

    Args:
        calls: the indices of the calls that may run twice.
        price: returns the price of a set, or None if the set is not possible.
    """

    def __init__(self, calls: Iterable[int], price: Price) -> None:
        self._price, self._known = price, dict[frozenset[int], Cost | None]()
        nothing = price(frozenset())
        assert nothing is not None
        self.nothing = nothing
        items = []
        for i in calls:
            alone = self.cost(frozenset((i,)))
            if alone is not None and alone.kept < nothing.kept:
                items.append(_Item(i, nothing.kept - alone.kept, alone.flops - nothing.flops))
        self._items = sorted(items, key=lambda item: item.flops / item.saves)

    def cost(self, again: frozenset[int]) -> Cost | None:
        if again not in self._known:
            self._known[again] = self._price(again)
        return self._known[again]

    def solve(self, most_bytes: int | None, most_flops: float) -> Found:
        """The cheapest set within ``most_bytes``; without one, the set that keeps least.

        Neither repeats more arithmetic than ``most_flops``.  Among equals, the other number decides.
        """
        if most_bytes is not None:
            found = self._search(most_bytes, most_flops)
            if found is not None:
                return found
        return self._fewest(most_flops)

    def _search(self, most_bytes: int, most_flops: float) -> Found | None:
        """Minimises arithmetic within the bytes; None if no set is found."""
        best = self._improved(most_bytes, most_flops)
        items, need = self._items, self.nothing.kept - most_bytes
        # The bytes that all later items can save.
        left = [0] * (len(items) + 1)
        for at in reversed(range(len(items))):
            left[at] = left[at + 1] + items[at].saves
        prices = steps = 0

        def limit() -> float:
            return most_flops if best is None else min(most_flops, best[1].flops)

        # (position, set, bytes saved at most, arithmetic at least); the last one is looked at first.
        stack = [(0, frozenset[int](), 0, 0)]
        while stack and prices < MOST_PRICES and steps < MOST_STEPS:
            at, again, saves, flops = stack.pop()
            steps += 1
            if saves >= need:
                new = again not in self._known
                cost = self.cost(again)
                prices += new
                if cost is not None and cost.kept <= most_bytes and cost.flops <= most_flops:
                    if best is None or (cost.flops, cost.kept) < (best[1].flops, best[1].kept):
                        best = again, cost
                    continue
            if at == len(items) or saves + left[at] < need:
                continue
            if flops + self._least(at, need - saves) >= limit() and best is not None:
                continue
            item = items[at]
            stack.append((at + 1, again, saves, flops))
            if flops + item.flops <= limit():
                stack.append((at + 1, again | {item.index}, saves + item.saves, flops + item.flops))
        return None if best is None else Found(*best, exact=not stack)

    def _least(self, at: int, need: int) -> float:
        """The least arithmetic by which the items from ``at`` on save ``need`` bytes, in parts if necessary."""
        flops = 0.0
        for item in self._items[at:]:
            if need <= 0:
                break
            flops += item.flops * min(1.0, need / item.saves)
            need -= item.saves
        return flops

    def _improved(self, most_bytes: int, most_flops: float) -> tuple[frozenset[int], Cost] | None:
        """A good first set: items by their price per byte until the bytes are reached, and then exchanges."""
        again: frozenset[int] = frozenset()
        cost: Cost | None = self.nothing
        for item in self._items:
            if cost is not None and cost.kept <= most_bytes:
                break
            again |= {item.index}
            cost = self.cost(again)
        if cost is None or cost.kept > most_bytes:
            return None
        best = again, cost
        better = True
        while better and len(self._known) < MOST_PRICES:
            better = False
            for changed in self._neighbours(best[0]):
                cost = self.cost(changed)
                if cost is not None and cost.kept <= most_bytes and cost.flops < best[1].flops:
                    best, better = (changed, cost), True
                    break
        return best if best[1].flops <= most_flops else None

    def _neighbours(self, again: frozenset[int]) -> Iterable[frozenset[int]]:
        """Sets without one of the calls, and sets with another call in its place."""
        for i in again:
            yield again - {i}
        for i in again:
            for item in self._items:
                if item.index not in again:
                    yield again - {i} | {item.index}

    def _fewest(self, most_flops: float) -> Found:
        """Minimises bytes within the arithmetic."""
        items = self._items
        best: tuple[frozenset[int], Cost] = frozenset(), self.nothing
        prices = steps = 0
        stack = [(0, frozenset[int](), 0, 0)]
        while stack and prices < MOST_PRICES and steps < MOST_STEPS:
            at, again, saves, flops = stack.pop()
            steps += 1
            # Every part of the way is a set, and may be the best one.
            new = again not in self._known
            cost = self.cost(again)
            prices += new
            if cost is None or cost.flops > most_flops:
                continue
            if (cost.kept, cost.flops) < (best[1].kept, best[1].flops):
                best = again, cost
            if at == len(items) or self.nothing.kept - saves - self._most(at, most_flops - flops) >= best[1].kept:
                continue
            item = items[at]
            stack.append((at + 1, again, saves, flops))
            if flops + item.flops <= most_flops:
                stack.append((at + 1, again | {item.index}, saves + item.saves, flops + item.flops))
        return Found(*best, exact=not stack)

    def _most(self, at: int, flops: float) -> float:
        """The most bytes that the items from ``at`` on save within the arithmetic, in parts if necessary."""
        saves = 0.0
        for item in self._items[at:]:
            if item.flops > flops:
                return saves + (item.saves * flops / item.flops if item.flops else 0.0)
            saves += item.saves
            flops -= item.flops
        return saves
