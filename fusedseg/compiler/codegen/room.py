"""Memory that is free while a graph runs: what may live longer, so that fewer calls are made, without a higher peak."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from ..graph import has_symbols, is_tensor, value_of
from ..plan import peak, schedule


class More(NamedTuple):
    """Bytes that are alive besides, from one place of a graph to another one; a negative number is bytes fewer."""

    first: int
    last: int
    nbytes: int


class Room:
    """The bytes that are alive at each node of a graph of aten ops, counted as the schedule counts them.

    ``places`` has the place of each node.  There is no room in a graph of several sizes: what fits one size may not
    fit another one.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._is_fixed = not any(is_tensor(node) and has_symbols(value_of(node)) for node in graph.nodes)
        backward = schedule.BackwardGraph(graph)
        steps = backward.as_it_stands(graph.nodes)
        self.places = {node: place for place, node in enumerate(steps)}
        self._alive = backward.alive([*steps.values()]).bytes_at
        self._workspaces = [peak.workspace(node, fused=False) for node in steps]
        self._most = self._peaks()

    def _peaks(self) -> tuple[int, int]:
        """The most bytes, and the most with the workspaces that convolutions may need."""
        return max(self._alive), max(map(operator.add, self._alive, self._workspaces))

    def takes(self, changes: Sequence[More]) -> bool:
        """Makes these changes and returns True, if no peak becomes higher.  Otherwise it changes nothing."""
        if not self._is_fixed:
            return False
        before = list(self._alive)
        for first, last, nbytes in changes:
            for place in range(first, last + 1):
                self._alive[place] += nbytes
        if all(map(operator.le, self._peaks(), self._most)):
            return True
        self._alive = before
        return False
