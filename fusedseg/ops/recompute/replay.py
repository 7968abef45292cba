"""Backward under one choice of calls that run twice, as plain numbers.

It goes through the saved tensors as the scope does (``saved.py``): the operations in reverse order, the tensors of each
in the order in which it has saved them, with rebuilt values held while a saved tensor nearby asks for them.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, groupby
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from .parts import turns_of
from .saved import NEAR

if TYPE_CHECKING:
    from .graph import Graph


class Node(NamedTuple):
    """A tensor of the forward pass.

    nbytes: bytes of its memory.
    inputs: the nodes that it is rebuilt from; empty for data.
    call: the index of the call that computes it, or -1.
    overwrites: whether it may be rebuilt over the memory of its first input.
    alias: whether it lies in the memory of its first input, which forward has overwritten.  If that input is kept, so
        is this tensor, in its place.
    in_parts: whether its inputs are made and freed one after the other (``parts.py``).
    instead: the inputs that nobody else keeps.  If those of them that are data have as many bytes as this tensor, then
        it has no recipe and is kept in their place.
    """

    nbytes: int
    inputs: tuple[int, ...] = ()
    call: int = -1
    overwrites: bool = False
    alias: bool = False
    in_parts: bool = False
    instead: tuple[int, ...] = ()


class Cost(NamedTuple):
    """The bytes that a choice keeps, the arithmetic that backward repeats for it, and the bytes at the peak.

    The peak is that of the kept and rebuilt tensors, plus what ``Graph.others`` adds.  ``hold`` has the calls whose
    values are held from the first use in backward to the last one.
    """

    kept: int
    flops: int
    peak: int
    hold: frozenset[int] = frozenset()


class Others(NamedTuple):
    """The bytes that are neither kept nor rebuilt tensors, when a saved tensor is asked for and until the next is.

    These are gradients, and memory that backward functions allocate.  They do not depend on the choice.
    """

    before: int
    after: int


class TooMuch(Exception):
    """The repeated arithmetic is above the limit."""


class Replay:
    """Backward under one choice.

    Args:
        graph: the step.
        again: the calls that run twice.
        hold: those whose values are held from the first use in backward to the last one.

    Attributes:
        kept: bytes that are kept at the end of forward.
        flops: arithmetic of the calls that run again, each time that it runs.
        peak: the most bytes at once.
        runs: for each call, how often it runs again.
        depth: the longest chain of recipes.
        most: the arithmetic at which ``run`` ends with an exception.
        own: for each saved tensor, the bytes of kept and rebuilt tensors when it is asked for, and when it is returned.
    """

    most: float = inf

    def __init__(self, graph: "Graph", again: Collection[int], hold: frozenset[int] = frozenset()) -> None:
        self._graph, self._nodes, self.hold = graph, graph.nodes, hold
        self.runs: dict[int, int] = {}
        self._data: list[bool] = []
        for node in graph.nodes:
            kept = not node.inputs or (node.call >= 0 and node.call not in again)
            others = [graph.nodes[i].nbytes for i in node.instead if self._data[i]]
            kept = kept or (bool(others) and sum(others) >= node.nbytes)
            self._data.append(kept or (node.alias and self._data[node.inputs[0]]))
        # For each rebuilt node, the order of its inputs, and the most tensors that live at once (``parts.turns_of``).
        self._turns: list[tuple[Sequence[int], int]] = []
        for node, kept in zip(graph.nodes, self._data, strict=True):
            needs = () if kept else [self._turns[j][1] for j in node.inputs]
            self._turns.append(turns_of(needs, node.overwrites) if needs else ((), 0))
        # For data, the number of the first saved tensor that needs it, which is the last one in backward; -1 for none.
        self._last = [-1] * len(graph.nodes)
        self.kept, self.flops, self.peak, self._live, self._top = 0, 0, 0, 0, 0
        self.depth = 0
        self._find_kept()
        self.own: list[tuple[int, int]] = [(0, 0)] * len(graph.packs)
        # The numbers of the handles of each node, in ascending order.
        self._orders: dict[int, list[int]] = {}
        self._order_of: list[int] = []
        count = 0
        for i in graph.packs:
            if self._data[i]:
                self._order_of.append(-1)
                continue
            self._orders.setdefault(i, []).append(count)
            self._order_of.append(count)
            count += 1
        self._held: list[int] = []

    def _find_kept(self) -> None:
        nodes, data, last = self._nodes, self._data, self._last
        for number, start in enumerate(self._graph.packs):
            stack = [start]
            while stack:
                i = stack.pop()
                while data[i] and nodes[i].alias:
                    # The memory is that of the first input.
                    i = nodes[i].inputs[0]
                if last[i] >= 0:
                    continue
                last[i] = number
                if data[i]:
                    self.kept += nodes[i].nbytes
                else:
                    stack.extend(nodes[i].inputs)
        depth = [0] * len(nodes)
        for i, node in enumerate(nodes):
            if not data[i] and last[i] >= 0:
                depth[i] = 1 + max(depth[j] for j in node.inputs)
        self.depth = max(depth, default=0)

    def cost(self) -> Cost:
        return Cost(self.kept, self.flops, self.peak, self.hold)

    def is_data(self, i: int) -> bool:
        """Whether a node is kept and not rebuilt."""
        return self._data[i]

    def is_used_before(self, number: int, i: int) -> bool:
        """Whether a saved tensor before this one needs this data."""
        return 0 <= self._last[i] < number

    def _is_held(self, i: int) -> bool:
        """Whether a node is the value of a call that is held, perhaps overwritten in forward."""
        nodes = self._nodes
        while nodes[i].alias:
            i = nodes[i].inputs[0]
        return nodes[i].call in self.hold

    def _near(self, i: int, order: int) -> bool:
        own = self._orders.get(i)
        if own is None:
            return False
        at = bisect_left(own, order)
        return at > 0 and (own[at - 1] >= order - NEAR or (bool(self.hold) and self._is_held(i)))

    def _load(self, i: int, order: int, for_call: bool = False) -> bool:
        """Rebuilds a tensor unless it is held; returns whether the caller alone has it."""
        held, node = i in self._held, self._nodes[i]
        if not held:
            is_call = node.call >= 0
            makes = [j for j in node.inputs if not self._data[j]]
            in_turn = [j for i in self._turns[i][0] if not self._data[j := node.inputs[i]]]
            if node.in_parts:
                self._load_in_parts(node, makes, order, for_call)
                mine = []
            else:
                mine = [j for j in in_turn if self._load(j, order, for_call or is_call)]
            if is_call:
                self.flops += self._graph.calls[node.call].flops
                self.runs[node.call] = self.runs.get(node.call, 0) + 1
                if self.flops > self.most:
                    raise TooMuch
            if node.overwrites and node.inputs[0] in mine:
                mine.remove(node.inputs[0])
            elif not node.in_parts:
                self._live += node.nbytes
                self._top = max(self._top, self._live + (self._graph.calls[node.call].workspace if is_call else 0))
            for j in mine:
                self._live -= self._nodes[j].nbytes
        if self._near(i, order) and (held or not for_call or node.call >= 0 or (self.hold and self._is_held(i))):
            if not held:
                self._held.append(i)
            return False
        if held:
            self._held.remove(i)
        return True

    def _load_in_parts(self, node: Node, makes: list[int], order: int, for_call: bool) -> None:
        """Rebuilds the inputs one after the other; the memory of the result is there from the second one on."""
        # If the first input is data, the result is allocated before all others.
        allocated = makes[:1] != list(node.inputs[:1])
        self._live += node.nbytes if allocated else 0
        for j in makes or [-1]:
            mine = j >= 0 and self._load(j, order, for_call)
            if not allocated:
                allocated = True
                self._live += node.nbytes
            self._top = max(self._top, self._live)
            self._live -= self._nodes[j].nbytes if mine else 0

    def tops(self) -> list[int]:
        """``Graph.tops``, where an output that is kept stays alive when forward no longer needs it."""
        graph = self._graph
        stays = [0] * (len(graph.tops) + 1)
        for i, at in graph.dies.items():
            if self._data[i] and self._last[i] >= 0:
                stays[at + 1] += self._nodes[i].nbytes
        return list(map(sum, zip(graph.tops, accumulate(stays), strict=False)))

    @property
    def released(self) -> dict[int, list[int]]:
        """For each saved tensor, the sizes of the data that is freed after it."""
        found: dict[int, list[int]] = {}
        for i, number in enumerate(self._last):
            if number >= 0 and self._data[i]:
                found.setdefault(number, []).append(self._nodes[i].nbytes)
        return found

    def run(self) -> None:
        """Goes through backward."""
        graph, nodes = self._graph, self._nodes
        self.peak, released = max(self.tops(), default=0), self.released
        self._live, group, returned = self.kept, -1, 0
        operations = [list(numbers) for _, numbers in groupby(range(len(graph.packs)), graph.groups.__getitem__)]
        for number in chain.from_iterable(reversed(operations)):
            if graph.groups[number] != group:
                # The operation before has ended, and frees what it was given and what only it has kept.
                self._live -= returned
                group, returned = graph.groups[number], 0
            before = self._top = self._live
            i, order = graph.packs[number], self._order_of[number]
            if order >= 0:
                for j in [j for j in self._held if not self._near(j, order + 1)]:
                    self._held.remove(j)
                    self._live -= nodes[j].nbytes
                if self._load(i, order):
                    returned += nodes[i].nbytes
            returned += sum(released.get(number, ()))
            self.own[number] = before, self._live
            others = graph.others[number] if graph.others else Others(0, 0)
            self.peak = max(self.peak, self._top + others.before, self._live + others.after)
