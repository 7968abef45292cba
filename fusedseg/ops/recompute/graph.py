"""What a step keeps and rebuilds, as plain numbers, and the price of each choice of calls that run twice.

``Graph`` is written while one forward runs in a scope with a budget.  A node stands for a tensor: data that is kept
anyway, the result of a cheap recipe, or the output of a call that may run twice.  ``Replay`` (``replay.py``) then goes
through backward.  So bytes, arithmetic and peak of a choice are known without another step.
"""

from collections.abc import Callable, Collection
from functools import partial
from math import inf
from typing import NamedTuple

from .choice import Call
from .replay import Cost, Node, Others, Replay, TooMuch

# The longest chain of recipes that may rebuild one tensor.  Each of them needs two calls of Python inside each other.
DEEPEST = 200
# The number of values that ``Graph.cost`` tries to hold one by one, and how often a call may run on average without it.
MOST_HELD = 6
MOST_RUNS = 5


class Moment(NamedTuple):
    """A moment of the step in which no call runs twice: the bytes then, and the outputs of calls among them.

    outputs: for each call whose output is kept at this moment and not read, the bytes of the output.
    """

    nbytes: int
    outputs: dict[int, int]


class Graph:
    """The nodes of one forward, and the saved tensors in the order in which autograd saved them.

    Attributes:
        nodes: all nodes; the inputs of a node come before it.
        calls: the calls that may run twice, in the order of forward.
        of_call: for each call, its node, or None if the call may not run twice.
        packs: the node of each saved tensor.
        groups: for each saved tensor, the number of the operation that saved it.
        eager: the bytes that autograd was about to save.
        others: for each saved tensor, the other bytes that live beside it; empty if they were not observed.
        tops: the most bytes before the first call, between each two calls, and after the last one, if the output of
            every call is freed as soon as forward no longer needs it; empty if they were not observed.
        dies: for each output of a call, and each tensor that is kept in its place, by its node: the number of calls
            that had begun when forward freed it.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.of_call: list[int | None] = []
        self.packs: list[int] = []
        self.groups: list[int] = []
        self.eager = 0
        self.others: list[Others] = []
        self.tops: list[int] = []
        self.dies: dict[int, int] = {}

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def save(self, node: int, group: int) -> int:
        """Notes that an operation saves a tensor; returns the tensor's number."""
        self.packs.append(node)
        self.groups.append(group)
        return len(self.packs) - 1

    @property
    def choosable(self) -> list[int]:
        """The calls that may run twice."""
        return [i for i, node in enumerate(self.of_call) if node is not None]

    def cost(self, again: Collection[int], *, hold_all: bool = False) -> Cost | None:
        """The price of running these calls twice; None if a tensor would need too long a chain of recipes.

        A value that backward needs several times is held where that does not raise the peak, or where the calls would
        run more than ``MOST_RUNS`` times otherwise.  With ``hold_all`` all such values are held.
        """
        if hold_all:
            held = self._replayed(again, frozenset(again))
            return None if held is None else held.cost()
        most = MOST_RUNS * sum(self.calls[i].flops for i in again)
        best = self._replayed(again, frozenset(), most)
        if best is None:
            best = self._replayed(again, frozenset(again), most)
            return None if best is None else best.cost()
        repeated = [i for i, count in best.runs.items() if count > 1]
        if repeated:
            # A run of a call may need runs of calls before it, so several values may save more than each by itself.
            runs = best.runs
            order = sorted(repeated, key=lambda i: self.calls[i].flops * (1 - runs[i]))
            for hold in (frozenset(order), *(frozenset((i,)) for i in order[:MOST_HELD])):
                found = self._replayed(again, best.hold | hold, most)
                if found is not None and found.peak <= best.peak and found.flops < best.flops:
                    best = found
                    if len(hold) == len(order):
                        break
        return best.cost()

    def _replayed(self, again: Collection[int], hold: frozenset[int], most: float = inf) -> Replay | None:
        """The replay, or None if a chain is too long or the repeated arithmetic is more than ``most``."""
        replay = Replay(self, again, hold)
        if replay.depth > DEEPEST:
            return None
        replay.most = most
        try:
            replay.run()
        except TooMuch:
            return None
        return replay

    def moments(self) -> list[Moment]:
        """Moments at which the peak of a choice may lie: it needs the bytes of each, less the outputs not kept then."""
        replay, of_calls = Replay(self, ()), self._of_calls()

        def alive(lives: Callable[[int], bool]) -> dict[int, int]:
            outputs: dict[int, int] = {}
            for i, calls in of_calls.items():
                if lives(i):
                    for call in calls:
                        outputs[call] = outputs.get(call, 0) + self.nodes[i].nbytes
            return outputs

        found = []
        for at, nbytes in enumerate(replay.tops()):
            found.append(Moment(nbytes, alive(partial(self._freed_before, at))))
        live, released = 0, replay.released
        for number, node in enumerate(self.packs):
            live += sum(released.get(number, ()))
            rebuilt = self.nodes[node].nbytes if not replay.is_data(node) else 0
            others = self.others[number] if self.others else Others(0, 0)
            outputs = alive(partial(replay.is_used_before, number))
            found.append(Moment(live + max(others.before, rebuilt + others.after), outputs))
        return found

    def _freed_before(self, at: int, node: int) -> bool:
        return self.dies.get(node, inf) < at

    def _of_calls(self) -> dict[int, frozenset[int]]:
        """The outputs of calls and what is kept in their place, by their nodes, each with these calls."""
        found: dict[int, frozenset[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.call >= 0:
                found[i] = frozenset((node.call,))
            elif node.instead:
                found[i] = frozenset().union(*(found[j] for j in node.instead))
        return found
