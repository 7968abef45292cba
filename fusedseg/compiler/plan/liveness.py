"""Which bytes are alive at each node of a graph, in the order in which the nodes run.

The planner, the reports and the codegen count by it.
"""

import operator
from collections.abc import Callable
from functools import cached_property

from torch import fx

from ..graph import has_symbols, is_tensor, value_of

Over = list[tuple[int, int]]


class ScheduledNode:
    """One node in its turn; a node that is computed twice has two steps.

    reads: the steps of its inputs.  first: the step that has allocated the memory of its result.
    nbytes: the bytes of that memory, which later steps read.  made: the bytes of all results while the node runs.
    over: the places of those inputs over which the result may be written, and their bytes.
    """

    __slots__ = ("first", "made", "nbytes", "node", "over", "reads")

    def __init__(
        self, node: fx.Node, reads: list["ScheduledNode"], root: fx.Node, nbytes: int, made: int, over: Over
    ) -> None:
        self.node, self.reads, self.nbytes, self.made, self.over = node, reads, nbytes, made, over
        self.first: ScheduledNode = (
            self if root is node else next(step.first for step in reads if step.first.node is root)
        )

    def call(self) -> "ScheduledNode":
        """The step of the call of which this one picks a result, or the step itself."""
        return self.reads[0] if self.node.target is operator.getitem else self


class Liveness:
    """The bytes that are alive at each step.

    Attributes:
        steps: the steps.
        places: the place of each step.  last: for each memory the place of its last reader.
        bytes_at: the bytes at each place.
        top: the place of the peak.  peak: its bytes, and the number of places that have them.
        inlined: the steps without memory of their own, and the memory that is read in place of theirs.
        with_workspaces: the most bytes with those that a step needs besides while it runs.
    """

    def __init__(
        self,
        steps: list[ScheduledNode],
        inlined: dict[ScheduledNode, list[ScheduledNode]],
        workspace: Callable[[ScheduledNode], int] | None = None,
    ) -> None:
        self.steps, self.inlined = steps, inlined
        self.places = {step: place for place, step in enumerate(steps)}
        self.last = dict(self.places)
        for place, step in enumerate(steps):
            for read in step.reads:
                self.last[read.first] = place
            for read in memory_read(step, inlined):
                self.last[read] = place
        gone: list[list[ScheduledNode]] = [[] for _ in steps]
        for step in steps:
            if step.first is step:
                gone[self.last[step]].append(step)
        bytes_at = []
        alive = sum(step.nbytes for step in steps if step.node.op == "placeholder")
        for place, step in enumerate(steps):
            if step not in inlined:
                alive += step.nbytes * (step.node.op != "placeholder")
                alive_then = alive - step.nbytes + step.made - self._written_over(step, place)
            bytes_at.append(alive_then)
            alive -= sum(one.nbytes for one in gone[place] if one not in inlined)
        self.bytes_at = bytes_at
        most = max(bytes_at)
        self.top = bytes_at.index(most)
        self.peak = (most, bytes_at.count(most))
        self._workspaces = [0] * len(steps) if workspace is None else list(map(workspace, steps))
        self.with_workspaces = most if workspace is None else max(map(operator.add, bytes_at, self._workspaces))

    @cached_property
    def place_of(self) -> dict[fx.Node, int]:
        """The place of each node of a graph that computes nothing twice."""
        return {step.node: place for place, step in enumerate(self.steps)}

    @cached_property
    def _is_fixed(self) -> bool:
        return not any(is_tensor(step.node) and has_symbols(value_of(step.node)) for step in self.steps)

    def takes(self, *changes: tuple[int, int, int]) -> bool:
        """Makes these changes and returns True, if no peak becomes higher.  Otherwise it changes nothing.

        It changes nothing in a graph of several sizes: what fits one size may not fit another one.

        Args:
            changes: each a first and a last place, and the bytes that are alive besides from the one to the other; a
                negative number is bytes fewer.
        """
        if not self._is_fixed:
            return False
        bytes_at = list(self.bytes_at)
        for first, last, nbytes in changes:
            for place in range(first, last + 1):
                bytes_at[place] += nbytes
        if max(bytes_at) > self.peak[0] or max(map(operator.add, bytes_at, self._workspaces)) > self.with_workspaces:
            return False
        self.bytes_at = bytes_at
        return True

    def at_the_peak(self) -> tuple[int, int]:
        """The bytes at the peak that the graph is given, and those that it returns."""
        there = [step for step in self.steps[: self.top + 1] if step.first is step and self.last[step] >= self.top]
        there = [step for step in there if step not in self.inlined]
        given = [step for step in there if step.node.op == "placeholder"]
        now, end = self.steps[self.top], next(step for step in self.steps if step.node.op == "output")
        # Each of several results of a call has a step of its own, right after it.
        made = [step for step in self.steps if step.node.target is operator.getitem and now in step.reads]
        returned = {read.first for read in end.reads}.intersection((*there, *made)).difference(given)
        return sum(step.nbytes for step in given), sum(step.nbytes for step in returned)

    def _written_over(self, step: ScheduledNode, place: int) -> int:
        """The bytes of an input that the result is written over."""
        memory = [read.first for read in step.reads]
        for at, nbytes in step.over:
            first = memory[at]
            whole = first.nbytes == nbytes and first.node.op == "call_function"
            if whole and self.last[first] == place and memory.count(first) == 1:
                return first.nbytes
        return 0


def memory_read(step: ScheduledNode, inlined: dict[ScheduledNode, list[ScheduledNode]]) -> list[ScheduledNode]:
    """The steps whose memory a step reads."""
    return list(dict.fromkeys(one for read in step.reads for one in inlined.get(read.first, [read.first])))
