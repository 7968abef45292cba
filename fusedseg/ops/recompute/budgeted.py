"""The registry and the rules of a scope with a budget.

The registry writes the graph of the step (``graph.py``), and asks a guide (``guide.py``) which calls run twice.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from . import recipes, twice
from .choice import Call
from .graph import Graph
from .guide import Guide
from .offers import Held, Input, Linked, Offer
from .parts import in_parts
from .plain import Place, is_trained_leaf, plain
from .registry import Registry
from .replay import Node
from .saved import AsItIs, Autocast, Data, Handle, Hooks
from .stock import RULES


class BudgetRegistry(Registry):
    """The registry of a scope with a budget.  Each call is a node of the graph, and so a recipe of its own."""

    chains, budgeted = False, True

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
        known: list[tuple[Input, Place]] = [(link, place) for link, place in links if link is not None]
        if len(known) < len(links):
            return
        at, version, autocast = Place.of(out), out._version, Autocast.of(out)
        offer = Offer(at, version, out.device, again, None, autocast, known)
        if offer.extra and offer.extra >= out.nbytes:
            return
        # Cheap recipes that follow are recorded or refused as if the output were kept, whatever was chosen.
        offer.steps, offer.is_call, offer.is_held = 0, True, self.guide.holds(index)
        inputs = tuple(node for source, _ in known if (node := self._node_of(source)) >= 0)
        offer.node = memory.node = graph.of_call[index] = graph.add(Node(call.nbytes, inputs, index))
        if wanted and twice.same_bits(call, out, again, tensors):
            memory.offers = (offer, *memory.offers)

    def called_ours(self, *call: Any) -> None:
        name, options, out, again, tensors, flops, workspace = call
        described = twice.described(name, options, {}, tensors, out, flops)
        self.called(replace(described, workspace=workspace), out, again, tensors)

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
        memory = self.before_change(x)
        if memory is None:
            yield
            return
        at, version, storage = Place.of(x), x._version, x.untyped_storage()
        before = memory.offer_of(at, version)
        if before is None or memory.kept_at(at, version) is not None or before.source(self) is None:
            yield
            return
        offer = self._record(x, at, memory, before, rebuild, others, overwrite)
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

    def _record(self, output: Tensor, at: Place, memory: Any, before: Offer | None, *rest: Any) -> Offer | None:
        # The call overwrites its output if that is its own first input.
        alias = before is not None
        instead = () if alias else self._unkept(output, rest[1])
        offer = super()._record(output, at, memory, before, *rest)
        if offer is None and instead:
            self._foresee(output, memory, instead, *rest)
        if offer is not None:
            inputs = tuple(node for source, _ in offer.inputs if (node := self._node_of(source)) >= 0)
            if instead or (before is not None and before.steps == 0):
                # If the call is not chosen, this tensor is kept; see ``called``.
                offer.steps = 0
            # The value of a call that forward overwrites is held in the place of the output.
            offer.is_held = before is not None and before.is_held
            overwrites, nbytes = offer.overwrite is not None, output.untyped_storage().nbytes()
            parts = in_parts(offer.rebuild, at) and bool(inputs)
            offer.node = self.graph.add(
                Node(nbytes, inputs, -1, overwrites, alias and bool(inputs), in_parts=parts, instead=instead)
            )
            if instead:
                self._replaces(output, memory, offer.node)
        return offer

    def _unkept(self, output: Tensor, inputs: Sequence[Any]) -> tuple[int, ...]:
        """The inputs that calls have made and nobody has saved, by their nodes, if ``output`` is kept in their place.

        An example is ReLU, which saves its result, of the output of a convolution, which nobody saves.  If the
        convolution runs once, a recipe would keep its output, and none is recorded (``Registry._record``).
        """
        nodes, found = self.graph.nodes, set()
        for t in inputs:
            memory = self._find(t.untyped_storage()) if isinstance(t, Tensor) and plain(t) else None
            if memory is None or memory.node < 0 or memory.counted:
                continue
            if nodes[memory.node].call >= 0 or nodes[memory.node].instead:
                found.add(memory.node)
        return tuple(sorted(found)) if sum(nodes[i].nbytes for i in found) >= output.untyped_storage().nbytes() else ()

    def _replaces(self, output: Tensor, memory: Any, node: int) -> None:
        memory.node = node
        self.guide.replaces(node, output)

    def _foresee(
        self, output: Tensor, memory: Any, instead: tuple[int, ...], rebuild: Any, inputs: Sequence[Any], overwrite: Any
    ) -> None:
        """Writes the node of a recipe that is refused now, but not if the calls of some of its inputs run twice."""
        nodes: list[int] = []
        for t in inputs:
            source = self._find(t.untyped_storage()) if isinstance(t, Tensor) else None
            if source is not None and source.node in instead:
                nodes.append(source.node)
                continue
            link = self._link(t, output)[0] if isinstance(t, Tensor) else Linked(t)
            if link is None or (isinstance(link, Held) and link.extra):
                return
            if (node := self._node_of(link)) >= 0:
                nodes.append(node)
        nbytes = output.untyped_storage().nbytes()
        node = self.graph.add(Node(nbytes, tuple(nodes), overwrites=overwrite is not None, instead=instead))
        self._replaces(output, memory, node)

    def before_change(self, x: Tensor) -> Any:
        memory = self._find(x.untyped_storage()) if plain(x) else None
        if memory is not None and memory.node >= 0 and self.graph.nodes[memory.node].instead:
            # What might be kept in the place of the outputs of calls is overwritten.
            memory.node = -1
        return super().before_change(x)

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
        with _torch.DisableTorchFunction():
            memory = self._memory(t.untyped_storage()) if t.layout == torch.strided else None
            if memory is not None and not memory.counted:
                memory.counted = True
                self.graph.eager += t.untyped_storage().nbytes()
        if node >= 0:
            number = self.graph.save(node, _torch.get_sequence_nr())
            self.guide.saved(number, saved)
        return saved

    def finish(self) -> None:
        """Ends a forward that raised no exception."""
        if self._in_checkpoint:
            # The checkpoint calls the forward again, which must save the same tensors.
            return
        with _torch.DisableTorchFunction():
            self.guide.ends(self.graph)


# The rules of a scope with a budget.
BUDGET_RULES: dict[Any, Any] = RULES | {func: partial(twice.rule, stock=RULES.get(func)) for func in twice.FUNCTIONS}
recipes.REGISTRIES.add(BudgetRegistry)
