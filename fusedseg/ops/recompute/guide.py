"""The registry of a scope with a budget, and the guides that tell it which calls run twice.

``Observe`` lets every call run twice, and writes the graph of the step (``graph.py``); ``fusedseg.convert`` uses it on
tensors without values.  ``Follow`` has a choice that was made before.  ``Learn`` serves a scope without a model: it
remembers the choices of earlier scopes, and makes one at the end of a scope whose calls it has not met.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from . import recipes, twice
from .choice import Budget, Call, Choice
from .graph import Graph, Node, Others, Replay
from .knapsack import Knapsack
from .offers import Held, Input, Linked, Offer
from .plain import Place, is_trained_leaf
from .registry import Registry
from .saved import AsItIs, Autocast, Data, Handle, Hooks, Recipe, unpack
from .stock import RULES

# The number of choices that bare scopes remember.
REMEMBERED = 32


class Guide(Protocol):
    """Decides for each call, in their order, whether it runs twice."""

    def wants(self, index: int, call: Call) -> bool: ...

    def made(self, index: int, out: Tensor) -> None:
        """Called with the output of each call."""

    def saved(self, number: int, packed: Data | Handle) -> None:
        """Called with each saved tensor and its number in ``Graph.packs``."""

    def unpack(self, packed: AsItIs | Data | Handle) -> Tensor:
        """The hook that autograd calls in backward."""

    def ends(self, graph: Graph) -> None:
        """Called at the end of a forward that raised no exception."""


class _Quiet:
    """A guide that does not look at tensors."""

    def made(self, index: int, out: Tensor) -> None:
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
        self._dies: dict[int, int] = {}

    def wants(self, index: int, call: Call) -> bool:
        return True

    def made(self, index: int, out: Tensor) -> None:
        if self._live is not None:
            self._tops.append(self._live.peak)
            self._live.peak = self._live.current
            weakref.finalize(out.untyped_storage(), self._freed, index).atexit = False

    def _freed(self, index: int) -> None:
        self._dies[index] = len(self._tops)

    def ends(self, graph: Graph) -> None:
        self.graph = graph
        if self._live is not None:
            self._tops.append(self._live.peak)
            # What is freed after forward has no part in its peak.
            graph.tops, graph.dies = self._tops, dict(self._dies)


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


_remembered: list[tuple[Budget, Choice]] = []
_lock = threading.Lock()


class Learn(_Quiet):
    """Follows a remembered choice for the same calls of the same sizes, and remembers a new one for new calls."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        with _lock:
            self._fits = [choice for of, choice in _remembered if of == budget]

    def wants(self, index: int, call: Call) -> bool:
        self._fits = [
            choice
            for choice in self._fits
            if index < len(choice.calls) and choice.calls[index].signature == call.signature
        ]
        return bool(self._fits) and index in self._fits[0].again

    def ends(self, graph: Graph) -> None:
        if not graph.calls or any(len(choice.calls) == len(graph.calls) for choice in self._fits):
            return
        choice = choose(graph, self.budget, graph.eager)
        with _lock:
            _remembered.append((self.budget, choice))
            del _remembered[:-REMEMBERED]


def forget() -> None:
    """Drops all choices that bare scopes have remembered."""
    with _lock:
        _remembered.clear()


def choose(graph: Graph, budget: Budget, eager: int, kept: int | None = None) -> Choice:
    """The cheapest choice for a budget.

    Args:
        graph: the step.
        eager: bytes that the step keeps without fusedseg.
        kept: bytes that the step keeps in a scope without a budget, if they were measured; the graph may not know some.
    """
    knapsack = Knapsack(graph.choosable, graph.cost)
    unknown = 0 if kept is None else kept - knapsack.nothing.kept
    total, most = sum(call.flops for call in graph.calls), budget.bytes_of(eager)
    found = knapsack.descend(eager, -inf if most is None else most - unknown, budget.most_flops * total)
    return Choice(tuple(graph.calls), found.again, found.cost.kept + unknown, found.cost.flops)


class BudgetRegistry(Registry):
    """The registry of a scope with a budget."""

    def __init__(self, outer: Hooks | None, guide: Guide) -> None:
        super().__init__(outer)
        self.guide, self.graph = guide, Graph()
        # What the present call has saved, or None outside of a call.
        self.packed: list[AsItIs | Data | Handle] | None = None

    def called(
        self,
        call: Call,
        out: Tensor,
        again: Callable[..., Tensor] | None,
        tensors: Sequence[Tensor],
        sources: Sequence[Tensor | Data] | None = None,
    ) -> None:
        """Called after each call that may run twice, or that may not because ``again`` is None.

        ``sources`` are the tensors to run it from in backward, if some of them are not ``tensors``.
        """
        graph, index = self.graph, len(self.graph.calls)
        graph.calls.append(call)
        graph.of_call.append(None)
        memory = self._memory(out.untyped_storage())
        memory.made = True
        self.guide.made(index, out)
        wanted = self.guide.wants(index, call)
        if again is None or memory.exposed:
            return
        links = [self._link_of_call(t, out) for t in sources or tensors]
        if any(link is None for link, _ in links):
            return
        known: list[tuple[Input, Place]] = links  # type: ignore[assignment]
        at, version, autocast = Place.of(out), out._version, Autocast.of(out)
        offer = Offer(at, version, out.device, again, None, autocast, known)
        if offer.extra and offer.extra >= out.nbytes:
            return
        # Cheap recipes that follow are recorded or refused as if the output were kept, whatever was chosen.
        offer.steps, offer.is_call = 0, True
        inputs = tuple(node for source, _ in known if (node := self._node_of(source)) >= 0)
        offer.node = memory.node = graph.of_call[index] = graph.add(Node(call.nbytes, inputs, index))
        if wanted and twice.same_bits(call, out, again, tensors):
            memory.offers.append(offer)

    def called_ours(self, *call: Any) -> None:
        name, options, out, again, tensors, flops = call
        self.called(twice.described(name, options, {}, tensors, out, flops), out, again, tensors)

    def _link_of_call(self, t: Tensor | Data, out: Tensor) -> tuple[Input | None, Place]:
        """The source of an argument in backward.  What autograd has saved for the call itself is neither copied."""
        if isinstance(t, Data):
            return Linked(t), t.at
        at, memory = Place.of(t), self._find(t.untyped_storage())
        if t.dim() >= 2 and is_trained_leaf(t):
            # Autograd saves the parameter too.
            return Held(t.detach(), 0), at
        if memory is not None and not memory.exposed:
            kept = memory.kept_at(at, t._version)
            if kept is not None:
                return Linked(kept), at
            offer = memory.offer_of(at, t._version)
            if offer is not None:
                return offer, at
        return self._link(t, out)

    def has_recipe(self, x: Tensor) -> bool:
        memory = self._find(x.untyped_storage())
        return memory is not None and memory.offer_of(Place.of(x), x._version) is not None

    @contextmanager
    def rewriting(
        self, x: Tensor, rebuild: Callable[..., Tensor], others: Sequence[Tensor], overwrite: Callable[..., Tensor]
    ) -> Iterator[None]:
        """Surrounds an op that overwrites ``x``, in any number of writes, and saves the result while it runs."""
        if not self.before_change(x):
            yield
            return
        memory, at, version, storage = self._memory(x.untyped_storage()), Place.of(x), x._version, x.untyped_storage()
        before = memory.offer_of(at, version)
        if before is None or memory.kept_at(at, version) is not None or before.source(self) is None:
            yield
            return
        offer = self._record(x, at, memory, [(before, at)], rebuild, others, overwrite)
        if offer is None:
            yield
            return

        def result(t: Tensor) -> Handle | None:
            recipe = offer.source(self) if t.untyped_storage() is storage and Place.of(t) == at else None
            return None if recipe is None else Handle(recipe, at)

        with recipes.claimed(self, result):
            yield
        if x._version == version:
            # The op has computed into other memory.
            self.withdraw(x, offer)
        offer.version = x._version

    # -- the graph ----------------------------------------------------------------------------------------------------

    def _node_of(self, source: Any) -> int:
        """The node of an input; -1 for small copies, which are not counted."""
        if isinstance(source, Offer):
            return source.node
        if isinstance(source, Held):
            return self.graph.add(Node(source.extra)) if source.extra else -1
        data = source._source()
        return -1 if data is None else data.node

    def _record(self, output: Tensor, at: Place, memory: Any, links: Any, *rest: Any) -> Offer | None:
        offer = super()._record(output, at, memory, links, *rest)
        if offer is not None:
            inputs = tuple(node for source, _ in offer.inputs if (node := self._node_of(source)) >= 0)
            overwrites = offer.overwrite is not None
            offer.node = self.graph.add(Node(output.untyped_storage().nbytes(), inputs, overwrites=overwrites))
        return offer

    def _keep(self, t: Tensor, at: Place, memory: Any) -> Data:
        kept = super()._keep(t, at, memory)
        if memory.node < 0:
            memory.node = self.graph.add(Node(t.untyped_storage().nbytes()))
        kept.node = memory.node
        return kept

    def pack(self, t: Tensor) -> AsItIs | Data | Handle:
        saved = super().pack(t)
        if self.packed is not None:
            self.packed.append(saved)
        if type(saved) is Handle:
            node = saved.recipe.node
        elif type(saved) is Data and t.dim() >= 2 and not is_trained_leaf(t):
            node = saved.node
        else:
            return saved
        with torch._C.DisableTorchFunction():
            memory = self._memory(t.untyped_storage()) if t.layout == torch.strided else None
            if memory is not None and not memory.counted:
                memory.counted = True
                self.graph.eager += t.untyped_storage().nbytes()
        if node >= 0:
            number = self.graph.save(node, torch.autograd._get_sequence_nr())
            self.guide.saved(number, saved)
        return saved

    def finish(self) -> None:
        """Ends a forward that raised no exception."""
        with torch._C.DisableTorchFunction():
            self.guide.ends(self.graph)


# The rules of a scope with a budget.
BUDGET_RULES: dict[Any, Any] = RULES | {func: partial(twice.rule, stock=RULES.get(func)) for func in twice.FUNCTIONS}
# The type of each recipe's node is an index of ``Graph.nodes``; a recipe that the graph does not know has -1.
assert Recipe.node == Offer.node == Data.node == -1
