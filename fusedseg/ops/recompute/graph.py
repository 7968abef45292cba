"""What a step keeps and rebuilds, as plain numbers, and the price of each choice of calls that run twice.

``Graph`` is written while one forward runs in a scope with a budget.  A node stands for a tensor: data that is kept
anyway, the result of a cheap recipe, or the output of a call that may run twice.  ``cost`` then goes through backward as
the scope does (``saved.py``): in the reverse order of the saved tensors, with rebuilt values held while a saved tensor
nearby asks for them.  So the bytes and the arithmetic of a choice are known without another forward.
"""

from bisect import bisect_left
from collections.abc import Collection
from typing import NamedTuple

from .choice import Call
from .saved import NEAR

# The longest chain of recipes that may rebuild one tensor.  Each of them needs two calls of Python inside each other.
DEEPEST = 200


class Node(NamedTuple):
    """A tensor of the forward pass.

    nbytes: bytes that are kept if the tensor is kept.
    inputs: the nodes that it is rebuilt from; empty for data.
    call: the index of the call that computes it, or -1.
    """

    nbytes: int
    inputs: tuple[int, ...] = ()
    call: int = -1


class Cost(NamedTuple):
    """The bytes that a choice keeps, and the arithmetic that backward repeats for it."""

    kept: int
    flops: int


class Graph:
    """The nodes of one forward, and the saved tensors in the order in which autograd saved them.

    Attributes:
        nodes: all nodes.
        calls: the calls that may run twice, in the order of forward.
        of_call: for each call, its node, or None if the call may not run twice.
        packs: the node of each saved tensor.
        eager: the bytes that autograd was about to save.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.of_call: list[int | None] = []
        self.packs: list[int] = []
        self.eager = 0
        self._reads: dict[int, tuple[int, ...]] | None = None

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _compressed(self) -> dict[int, tuple[int, ...]]:
        """For each node that is saved or computed by a call: the nearest such nodes that it is rebuilt from.

        Only values of such nodes are ever held, so that all nodes between them need not be visited.
        """
        if self._reads is None:
            stops = set(self.packs) | {i for i, node in enumerate(self.nodes) if node.call >= 0 or not node.inputs}
            nearest: list[tuple[int, ...]] = []
            for node in self.nodes:
                # The inputs of a node come before it.
                found: dict[int, None] = {}
                for i in node.inputs:
                    found.update(dict.fromkeys((i,) if i in stops else nearest[i]))
                nearest.append(tuple(found))
            self._reads = {i: nearest[i] for i in stops}
        return self._reads

    def cost(self, again: Collection[int]) -> Cost | None:
        """The price of running these calls twice; None if a tensor would need too long a chain of recipes."""
        reads, nodes = self._compressed(), self.nodes
        data = {i for i in reads if not nodes[i].inputs or (nodes[i].call >= 0 and nodes[i].call not in again)}
        kept, flops, depth = self._kept(data), 0, self._depth(data)
        if depth > DEEPEST:
            return None
        handles = [i for i in self.packs if i not in data]
        orders: dict[int, list[int]] = {}
        for order, i in enumerate(handles):
            orders.setdefault(i, []).append(order)
        held: set[int] = set()

        def near(i: int, order: int) -> bool:
            own = orders.get(i)
            if own is None:
                return False
            at = bisect_left(own, order)
            return at > 0 and own[at - 1] >= order - NEAR

        def load(i: int, order: int) -> None:
            nonlocal flops
            if i not in held:
                for j in reads[i]:
                    if j not in data:
                        load(j, order)
                if nodes[i].call >= 0:
                    flops += self.calls[nodes[i].call].flops
            if near(i, order):
                held.add(i)
            else:
                held.discard(i)

        for order in reversed(range(len(handles))):
            for i in [i for i in held if not near(i, order + 1)]:
                held.discard(i)
            load(handles[order], order)
        return Cost(kept, flops)

    def _kept(self, data: set[int]) -> int:
        reads, seen, stack, kept = self._compressed(), set(), list(dict.fromkeys(self.packs)), 0
        while stack:
            i = stack.pop()
            if i in seen:
                continue
            seen.add(i)
            if i in data:
                kept += self.nodes[i].nbytes
            else:
                stack.extend(reads[i])
        return kept

    def _depth(self, data: set[int]) -> int:
        depth = [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            if i not in data and node.inputs:
                depth[i] = 1 + max(depth[j] for j in node.inputs)
        return max(depth, default=0)
