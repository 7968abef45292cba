"""Which values forward keeps at the least price of bytes and of what runs again: a minimum cut.

A value of forward that backward reads is kept, which costs its bytes, or recomputed, which costs its arithmetic, or the
bytes that it moves if it is cheap, and then backward reads the values from which it follows.  For one price of these in
kept bytes the best choice is a minimum cut of a network with two vertices for each value: the value is available to
backward, and it is recomputed.  With a lower price more values are recomputed, and all that was before still is.
"""

from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

import torch
from torch import fx

from ..graph import Joint, is_compute_intensive, size_of, tensors_of
from . import recompute
from .decision import call_node, is_available, is_view, read_of_forward, readers_of_forward, sources_of

# Capacities are whole numbers: this many for a byte.
UNIT = 1 << 10
ENDLESS = 1 << 80
# Without a budget a value is kept if one of this many times its size would have to be recomputed for it.
LARGER = 4
# The prices of arithmetic, and of bytes that cheap calls move, in kept bytes: each is this share of the one before it.
FIRST_PRICE = 1 / 4
NEXT_PRICE = 0.85
PRICES = 90
# The price without a budget: cheap calls run again if they move less than sixteen bytes for each that is kept less.
DEFAULT_PRICE = 1 / 16


class Flow:
    """A network from vertex 0 to vertex 1, and a maximum flow in it, which grows with the capacities (Dinic)."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.left: list[int] = []
        self.edges: list[list[int]] = [[], []]

    def vertex(self) -> int:
        self.edges.append([])
        return len(self.edges) - 1

    def edge(self, tail: int, head: int, capacity: int) -> int:
        """An edge, whose twin of the other direction is the next one."""
        for one, other, left in ((tail, head, capacity), (head, tail, 0)):
            self.edges[one].append(len(self.heads))
            self.heads.append(other)
            self.left.append(left)
        return len(self.heads) - 2

    def augment(self) -> None:
        while (levels := self._levels())[1] >= 0:
            self._block(levels)

    def _levels(self) -> list[int]:
        """For each vertex its distance from vertex 0; -1 where there is no way."""
        levels = [-1] * len(self.edges)
        levels[0] = 0
        queue = deque([0])
        while queue:
            tail = queue.popleft()
            for edge in self.edges[tail]:
                head = self.heads[edge]
                if self.left[edge] and levels[head] < 0:
                    levels[head] = levels[tail] + 1
                    queue.append(head)
        return levels

    def _block(self, levels: list[int]) -> None:
        """Fills all shortest ways."""
        heads, left, edges = self.heads, self.left, self.edges
        turn = [0] * len(edges)
        path: list[int] = []
        at = 0
        while True:
            if at == 1:
                most = min(left[edge] for edge in path)
                for edge in path:
                    left[edge] -= most
                    left[edge ^ 1] += most
                full = next(place for place, edge in enumerate(path) if not left[edge])
                at = heads[path[full] ^ 1]
                del path[full:]
            while turn[at] < len(edges[at]):
                edge = edges[at][turn[at]]
                if left[edge] and levels[heads[edge]] == levels[at] + 1:
                    break
                turn[at] += 1
            else:
                if not path:
                    return
                at = heads[path.pop() ^ 1]
                turn[at] += 1
                continue
            path.append(edge)
            at = heads[edge]

    def after_the_start(self) -> list[bool]:
        """For each vertex whether more could flow to it from vertex 0."""
        return [level >= 0 for level in self._levels()]

    def before_the_end(self) -> list[bool]:
        """For each vertex whether more could flow from it to vertex 1."""
        found = [False] * len(self.edges)
        found[1] = True
        stack = [1]
        while stack:
            head = stack.pop()
            for edge in self.edges[head]:
                tail = self.heads[edge]
                if self.left[edge ^ 1] and not found[tail]:
                    found[tail] = True
                    stack.append(tail)
        return found


class Cut:
    """The network of a joint graph.

    Args:
        joint: the graph.
        nbytes: the bytes that keeping a value costs.
        price: the arithmetic that a second run of a call costs, or the bytes that it moves if it is cheap.
        is_rounded: whether a value is rounded if it is kept; compute-intensive ops run again from exact values alone.
        from_larger: whether a value may be recomputed where one of ``LARGER`` times its size has to be recomputed for
            it too, and is alive at that time.
    """

    def __init__(
        self,
        joint: Joint,
        nbytes: Callable[[fx.Node], int],
        price: Callable[[fx.Node], int],
        is_rounded: Callable[[fx.Node], bool] | None = None,
        from_larger: bool = True,
    ) -> None:
        flow = self._flow = Flow()
        needed = read_of_forward(joint, readers_of_forward(joint))
        self.sources = _all_sources(needed, joint)
        if not from_larger:
            self.sources |= dict.fromkeys(filter(self._follows_larger, self.sources))
        # The vertices of a value: it is available to backward; it is recomputed.
        self._of_available: dict[fx.Node, int] = {}
        self._of_recomputed: dict[fx.Node, int] = {}
        for node, sources in self.sources.items():
            one = self._of_available[node] = self._of_recomputed[node] = flow.vertex()
            if not is_view(node) or sources is None:
                self._of_recomputed[node] = flow.vertex()
                flow.edge(self._of_recomputed[node], one, UNIT * nbytes(node))
        for node in needed:
            flow.edge(self._of_available[node], 1, ENDLESS)
        # The edges whose capacity grows with the price of arithmetic, and the arithmetic.
        self._priced: list[tuple[int, int]] = []
        # The places of compute-intensive ops among them.
        self._intensive: dict[fx.Node, int] = {}
        calls: dict[fx.Node, int] = {}
        for node, sources in self.sources.items():
            recomputed = self._of_recomputed[node]
            if sources is None:
                flow.edge(0, recomputed, ENDLESS)
                continue
            # Results of one call share its run.
            call = node if recompute.recomputation_of(node) is not None else call_node(node)
            if call not in calls:
                calls[call] = flow.vertex()
                if is_compute_intensive(call):
                    self._intensive[call] = len(self._priced)
                self._priced.append((flow.edge(0, calls[call], 0), 0 if is_view(node) else price(call)))
                for source in sources:
                    flow.edge(self._of_available[source], calls[call], ENDLESS)
            flow.edge(calls[call], recomputed, ENDLESS)
        self._paid = [0] * len(self._priced)
        if is_rounded is not None:
            self._from_exact_values(calls, is_rounded)
        self._start = flow.left.copy()

    def _follows_larger(self, node: fx.Node) -> bool:
        """Whether a value would be recomputed from a much larger one that is recomputed, too."""
        made = call_node(node)
        # Positions in int64 take more bytes than the values beside them.
        if is_view(node) or any(t.dtype == torch.int64 for t in tensors_of(made)):
            return False
        larger = (source for source in self.sources[node] or () if size_of(source) >= LARGER * size_of(made))
        return any(self.sources[source] and not is_compute_intensive(call_node(source)) for source in larger)

    def _from_exact_values(self, calls: dict[fx.Node, int], is_rounded: Callable[[fx.Node], bool]) -> None:
        """A compute-intensive op runs again only if its inputs are exact: recomputed from exact values."""
        flow = self._flow
        exact = {node: flow.vertex() for node in self.sources}
        for node, sources in self.sources.items():
            own = self._of_recomputed if is_rounded(node) else self._of_available
            flow.edge(own[node], exact[node], ENDLESS)
            for source in sources or ():
                if is_rounded(node):
                    flow.edge(exact[source], exact[node], ENDLESS)
                call = call_node(node)
                if is_compute_intensive(call):
                    flow.edge(exact[source], calls[call], ENDLESS)

    def steps(self) -> dict[frozenset[fx.Node], float]:
        """The values that are recomputed, for falling prices of arithmetic; each set has those before it."""
        flow = self._flow
        found: dict[frozenset[fx.Node], float] = {}
        vertices = [True] * len(flow.edges)
        for step in reversed(range(PRICES)):
            price, left, paid = UNIT * FIRST_PRICE * NEXT_PRICE**step, flow.left.copy(), self._paid.copy()
            later = self._at_price(price, range(len(self._priced)))
            changed = [
                place
                for place in self._intensive.values()
                if vertices[(head := flow.heads[self._priced[place][0]])] and not later[head]
            ]
            if found and len(changed) > 1:
                # Between both prices, one op after the other has the second one, the largest first.
                changed.sort(key=lambda place: -self._priced[place][1])
                after, flow.left, self._paid = (flow.left, self._paid), left, paid
                for place in changed[:-1]:
                    found.setdefault(self._recomputed(self._at_price(price, [place])), price)
                flow.left, self._paid = after
            found.setdefault(self._recomputed(later), price)
            vertices = later
        return dict(reversed(found.items()))

    def with_intensive(self, intensive: AbstractSet[fx.Node], price: float) -> frozenset[fx.Node]:
        """The values that are recomputed if these compute-intensive ops alone may be recomputed, for nothing."""
        self._flow.left, self._paid = self._start.copy(), [0] * len(self._priced)
        for call, place in self._intensive.items():
            if call not in intensive:
                self._flow.left[self._priced[place][0]] = ENDLESS
        cheap = set(range(len(self._priced))).difference(self._intensive.values())
        return self._recomputed(self._at_price(price, cheap))

    def all_cheap(self) -> frozenset[fx.Node]:
        """As many values as can be recomputed if cheap calls cost nothing, and no compute-intensive op runs again."""
        self.with_intensive(frozenset(), 0)
        kept = self._flow.after_the_start()
        return frozenset(node for node, vertex in self._of_recomputed.items() if not kept[vertex])

    def _at_price(self, price: float, places: Iterable[int]) -> list[bool]:
        """Raises the price of some calls, and returns the vertices from which more could flow to the end."""
        for place in places:
            edge, flops = self._priced[place]
            more = int(price * flops) - self._paid[place]
            self._flow.left[edge] += more
            self._paid[place] += more
        self._flow.augment()
        return self._flow.before_the_end()

    @property
    def compute_intensive(self) -> AbstractSet[fx.Node]:
        return self._intensive.keys()

    def _recomputed(self, after: list[bool]) -> frozenset[fx.Node]:
        return frozenset(node for node, vertex in self._of_recomputed.items() if after[vertex])

    def parts(self, more: frozenset[fx.Node]) -> list[set[fx.Node]]:
        """Divides values into parts, each of which may be recomputed without the other parts."""
        parts: list[set[fx.Node]] = []
        # In the order of the graph, so that equal graphs have equal choices.
        left = dict.fromkeys(node for node in self.sources if node in more)
        neighbours: dict[fx.Node, set[fx.Node]] = {node: set() for node in more}
        for node in more:
            for source in (*(self.sources[node] or ()), *_results(node)):
                if source in more:
                    neighbours[node].add(source)
                    neighbours[source].add(node)
        while left:
            part: set[fx.Node] = set()
            stack = [next(iter(left))]
            while stack:
                node = stack.pop()
                if node in left:
                    del left[node]
                    part.add(node)
                    stack += neighbours[node]
            parts.append(part)
        return parts


def _results(node: fx.Node) -> list[fx.Node]:
    """All results of the call, if a node is one of several results; otherwise none."""
    call = call_node(node)
    return [] if call is node else list(call.users)


def _all_sources(needed: list[fx.Node], joint: Joint) -> dict[fx.Node, list[fx.Node] | None]:
    """For each value that backward may have, the values from which it follows; None if it cannot be recomputed."""
    found: dict[fx.Node, list[fx.Node] | None] = {}
    stack = list(needed)
    while stack:
        node = stack.pop()
        if node not in found:
            sources = sources_of(node, joint)
            found[node] = None if sources is None else [source for source in sources if not is_available(source)]
            stack += found[node] or ()
    return found
