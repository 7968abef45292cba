"""The guides that tell a scope with a budget which calls run twice.

``Observe`` lets every call run twice, and writes the graph of the step (``graph.py``); ``fusedseg.convert`` uses it on
tensors without values.  ``Follow`` has a choice that was made before.  ``Learn`` serves a scope without a model: it
remembers the choices of earlier scopes, and makes one at the end of a scope whose calls it has not met.
"""

import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from .choice import Budget, Call, Choice
from .graph import Graph
from .knapsack import Found, Knapsack, Limits
from .replay import Others, Replay
from .saved import AsItIs, Data, Handle, unpack

# The number of choices that bare scopes remember, and that each model remembers: one for each input size.
REMEMBERED = 256
# The share by which another size may keep more than the budget before the model gets another choice for it.
CLOSE = 0.01


class Guide(Protocol):
    """Decides for each call, in their order, whether it runs twice."""

    def wants(self, index: int, call: Call) -> bool: ...

    def holds(self, index: int) -> bool:
        """Whether backward holds the value of a call that runs twice from the first use to the last one."""

    def made(self, index: int, out: Tensor) -> None:
        """Called with the output of each call."""

    def replaces(self, node: int, out: Tensor) -> None:
        """Called with each tensor that may be kept in the place of outputs of calls, and its node."""

    def saved(self, number: int, packed: Data | Handle) -> None:
        """Called with each saved tensor and its number in ``Graph.packs``."""

    def unpack(self, packed: AsItIs | Data | Handle) -> Tensor:
        """The hook that autograd calls in backward."""

    def ends(self, graph: Graph) -> None:
        """Called at the end of a forward that raised no exception."""


class _Quiet:
    """A guide that does not look at tensors, and holds no values."""

    def holds(self, index: int) -> bool:
        return False

    def made(self, index: int, out: Tensor) -> None:
        pass

    def replaces(self, node: int, out: Tensor) -> None:
        pass

    def saved(self, number: int, packed: Data | Handle) -> None:
        pass

    def unpack(self, packed: AsItIs | Data | Handle) -> Tensor:
        return unpack(packed)

    def ends(self, graph: Graph) -> None:
        pass


class Observe(_Quiet):
    """Lets every call run twice, and keeps the graph; ``live`` counts bytes for its ``tops``, if there is one."""

    graph: Graph | None = None

    def __init__(self, live: "Live | None" = None) -> None:
        self._live = live
        self._tops: list[int] = []
        # Calls by their numbers, and tensors that replace their outputs by their nodes.
        self._calls: dict[int, int] = {}
        self._others: dict[int, int] = {}

    def wants(self, index: int, call: Call) -> bool:
        return True

    def made(self, index: int, out: Tensor) -> None:
        if self._live is not None:
            self._tops.append(self._live.peak)
            self._live.peak = self._live.current
            self._notice(out, self._calls, index)

    def replaces(self, node: int, out: Tensor) -> None:
        if self._live is not None:
            self._notice(out, self._others, node)

    def _notice(self, out: Tensor, dies: dict[int, int], key: int) -> None:
        def freed() -> None:
            dies[key] = len(self._tops)

        weakref.finalize(out.untyped_storage(), freed).atexit = False

    def ends(self, graph: Graph) -> None:
        self.graph = graph
        if self._live is not None:
            self._tops.append(self._live.peak)
            # What is freed after forward has no part in its peak.
            of_call = graph.of_call
            calls = {node: at for i, at in self._calls.items() if (node := of_call[i]) is not None}
            graph.tops, graph.dies = self._tops, calls | self._others


class Live(Protocol):
    """A count of the bytes that are alive: ``fusedseg.memory.LiveBytes``."""

    current: int
    peak: int


class Weigh(_Quiet):
    """Lets no call run twice, and weighs the bytes beside the kept and rebuilt tensors (``Graph.others``)."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._number_of: dict[int, int] = {}
        # For each saved tensor: bytes when it is asked for, and the most until the next one is.
        self._seen: dict[int, list[int]] = {}
        self._now: list[int] | None = None

    def wants(self, index: int, call: Call) -> bool:
        return False

    def saved(self, number: int, packed: Data | Handle) -> None:
        # The tensor must not be held here, because that would change what is alive.
        self._number_of[packed.order if type(packed) is Handle else id(packed)] = number

    def unpack(self, packed: AsItIs | Data | Handle) -> Tensor:
        key = packed.order if type(packed) is Handle else id(packed)
        number = None if type(packed) is tuple else self._number_of.get(key)
        if number is None:
            return unpack(packed)
        live = self._live
        if self._now is not None:
            self._now[1] = live.peak
        before = live.current
        value = unpack(packed)
        live.peak = live.current
        self._now = self._seen[number] = [before, live.current]
        return value

    def others(self, graph: Graph) -> list[Others]:
        """The other bytes for each saved tensor of ``graph``, after backward."""
        if self._now is not None:
            self._now[1] = self._live.peak
        replay = Replay(graph, ())
        replay.run()
        others: list[Others] = []
        for number, (own_before, own_after) in enumerate(replay.own):
            seen = self._seen.get(number)
            if seen is None:
                others.append(others[-1] if others else Others(0, 0))
            else:
                others.append(Others(seen[0] - own_before, seen[1] - own_after))
        return others


class Follow(_Quiet):
    """Follows a choice for as long as the calls are those that were planned; after that, nothing runs twice."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._lost = False

    def wants(self, index: int, call: Call) -> bool:
        self._lost = self._lost or not self.choice.has(index, call)
        return not self._lost and index in self.choice.again

    def holds(self, index: int) -> bool:
        return not self._lost and index in self.choice.hold


class Sizes:
    """The choices of one model, by the sizes and dtypes of its calls.

    The choice that was planned serves other sizes too, where it keeps to the budget; bytes scale with the sizes.
    Elsewhere another choice is made at the end of the first forward with these sizes.

    Args:
        budget: the budget.
        planned: the choice for the example.
        eager: bytes that the model keeps without fusedseg on the example.
        seen: bytes that autograd was about to save on the example (``Graph.eager``).
    """

    def __init__(self, budget: Budget, planned: Choice, eager: int, seen: int) -> None:
        self.budget, self.planned, self.eager, self.seen = budget, planned, eager, seen
        self.known: tuple[Choice, ...] = ()

    def guide(self) -> "Follow":
        return _Sized(self)

    def learn(self, graph: Graph) -> None:
        """Remembers a choice for the calls of ``graph``, which has the calls of the planned choice in other sizes."""
        planned, eager = self.planned, int(self.eager * graph.eager / max(1, self.seen))
        most, cost = self.budget.bytes_of(eager), graph.cost(planned.again)
        if cost is None:
            return
        total = sum(call.flops for call in graph.calls)
        choice = Choice(tuple(graph.calls), planned.again, cost.kept, cost.flops, planned.hold)
        fits = (most is None or cost.kept <= most * (1 + CLOSE)) and cost.flops <= self.budget.most_flops * total
        if not fits:
            choice = choose(graph, self.budget, eager)
        # One assignment, because other threads may read it.
        self.known = (*self.known, choice)
        if len(self.known) == REMEMBERED:
            warn_of_sizes()


class _Sized(Follow):
    """Follows the choice for the sizes of the calls, or the planned one until these sizes are known."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.planned)
        self._sizes, self._fits = sizes, sizes.known
        # Whether all calls so far have the sizes of the example.
        self._planned = True

    def wants(self, index: int, call: Call) -> bool:
        self._lost = self._lost or not self.choice.has(index, call)
        if self._lost:
            return False
        signature = call.signature
        self._planned = self._planned and self._sizes.planned.calls[index].signature == signature
        self._fits = tuple(choice for choice in self._fits if choice.calls[index].signature == signature)
        self.choice = self._sizes.planned if self._planned or not self._fits else self._fits[-1]
        return index in self.choice.again

    def ends(self, graph: Graph) -> None:
        complete = not self._lost and len(graph.calls) == len(self._sizes.planned.calls)
        if complete and not self._planned and not self._fits and len(self._sizes.known) < REMEMBERED:
            self._sizes.learn(graph)


# Each with its budget, and the bits of the scope or None.
_remembered: list[tuple[tuple[Budget, int | None], Choice]] = []
_lock = threading.Lock()


class Learn(_Quiet):
    """Follows a remembered choice for the same calls of the same sizes, and remembers a new one for new calls."""

    def __init__(self, budget: Budget, bits: int | None = None) -> None:
        self.budget, self._of = budget, (budget, bits)
        with _lock:
            self._fits = [choice for of, choice in _remembered if of == self._of]

    def wants(self, index: int, call: Call) -> bool:
        self._fits = [
            choice
            for choice in self._fits
            if index < len(choice.calls) and choice.calls[index].signature == call.signature
        ]
        return bool(self._fits) and index in self._fits[0].again

    def holds(self, index: int) -> bool:
        return bool(self._fits) and index in self._fits[0].hold

    def ends(self, graph: Graph) -> None:
        if not graph.calls or any(len(choice.calls) == len(graph.calls) for choice in self._fits):
            return
        # Further sizes are not searched: to forget the first ones would mean to search in every step.
        if len(_remembered) >= REMEMBERED:
            return
        choice = choose(graph, self.budget, graph.eager)
        with _lock:
            _remembered.append((self._of, choice))
            is_full = len(_remembered) == REMEMBERED
        if is_full:
            warn_of_sizes()


def warn_of_sizes() -> None:
    warnings.warn(
        f"fusedseg: a budget has been planned for {REMEMBERED} input sizes, and is not planned for any other size; "
        "expected fewer sizes, for example images padded to multiples of 32",
        UserWarning,
        stacklevel=2,
    )


def forget() -> None:
    """Drops all choices that bare scopes have remembered."""
    with _lock:
        _remembered.clear()


def choose(graph: Graph, budget: Budget, eager: int, kept: int | None = None) -> Choice:
    """The cheapest choice for a budget: the first one of ``choices`` that keeps no more, or else the last one.

    If the budget limits the arithmetic too, and none of them is within both limits, a choice within both is searched
    whose peak may be higher than that of a larger budget.

    Args:
        graph: the step.
        eager: bytes that the step keeps without fusedseg.
        kept: bytes that the step keeps in a scope without a budget, if they were measured; the graph may not know some.
    """
    most, search = budget.bytes_of(eager), _Search(graph, eager, kept)
    for choice in search.down(budget.most_flops):
        assert choice.kept is not None
        if most is not None and choice.kept <= most:
            return choice
    within = None
    if most is not None and budget.extra_flops is not None:
        within = search.within(most, budget.extra_flops)
    return choice if within is None else within


def choices(graph: Graph, eager: int, kept: int | None = None, most_flops: float = Budget.MOST) -> Iterator[Choice]:
    """All choices that budgets lead to, by falling bytes; the first one lets no call run twice.

    The next choice is searched only when it is asked for.  ``most_flops`` is the largest share of the arithmetic that
    may run twice; the other arguments are those of ``choose``.
    """
    return _Search(graph, eager, kept).down(most_flops)


class _Search:
    """The search for choices; arguments as in ``choose``."""

    def __init__(self, graph: Graph, eager: int, kept: int | None) -> None:
        self._graph, self._knapsack, self._eager = graph, Knapsack(graph), eager
        self._unknown = 0 if kept is None else kept - self._knapsack.nothing.kept
        self._total = sum(call.flops for call in graph.calls)

    def down(self, most_flops: float) -> Iterator[Choice]:
        """``choices``."""
        return map(self._choice, self._knapsack.steps(self._eager, most_flops * self._total, self._unknown))

    def within(self, most_bytes: int, most_flops: float) -> Choice | None:
        """The choice with the least arithmetic within both limits, whatever its peak; None if none was found."""
        limits = Limits(most_bytes - self._unknown, most_flops * self._total)
        found = Knapsack(self._graph, hold_all=True).solve(limits)
        if found is None:
            return None
        # The same calls may fit with a lower peak.
        lower = self._knapsack.cost(found.again)
        return self._choice(found if lower is None or not limits.allow(lower) else Found(found.again, lower))

    def _choice(self, found: Found) -> Choice:
        cost, calls = found.cost, tuple(self._graph.calls)
        return Choice(calls, found.again, cost.kept + self._unknown, cost.flops, cost.hold, cost.peak)
