"""The knowledge of one scope about live tensors: which tensors are kept, and how other tensors can be rebuilt.

A tensor's memory is identified by its storage, which is held weakly; an address is never trusted.
``ops/observer.py`` has the contract with the ops.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import _torch
from ..ops.observer import LARGER, MAX_STEPS, SMALL, Observer, OpCall
from .memory import Memories, Memory
from .offers import Held, Input, Linked, Offer
from .plain import Place, is_trained_leaf, plain
from .saved import AsItIs, Autocast, Data, Handle, Hooks, Recipe, as_it_is

# The largest number of values of a vector with one value per channel.
VECTOR = 2**12


class Registry(Memories, Observer):
    """The registry of one scope.  ``outer``: the hooks around the scope, which get the data that is kept, or None."""

    def __init__(self, outer: Hooks | None) -> None:
        super().__init__()
        self.outer = outer
        self._in_checkpoint = outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
        # Set during a call that makes tensors which it saves: it decides what to save for such a tensor.
        self.claim: Callable[[Tensor], Data | Handle | None] | None = None
        # True during a call that saves tensors which eager mode would not have kept.
        self.saves_sources = False
        # Whether a converted model runs, whose convolutions read notes and whose functions keep channels_last.
        self.converted = False
        # Notes of ``joins.py``: the sources of each concatenation while it lives.
        self.notes = WeakIdKeyDictionary()

    def pack(self, t: Tensor) -> AsItIs | Data | Handle:
        """The hook that autograd calls in forward.  In backward it calls ``saved.unpack``."""
        with _torch.DisableTorchFunction():
            # Parameters and vectors of statistics are saved unchanged, because recipes have copies of them.
            if (t.dim() < 2 and t.numel() <= VECTOR) or is_trained_leaf(t) or not plain(t):
                return as_it_is(t, self.outer)
            if self.claim is not None:
                claimed = self.claim(t)
                if claimed is not None:
                    return self._counted(claimed)
            at, memory, version = Place.of(t), self._memory(t.untyped_storage()), t._version
            offer = memory.offer_of(at, version)
            if offer is not None and memory.kept_at(at, version) is None:
                recipe = offer.source(self)
                if recipe is not None:
                    return self._counted(Handle(recipe, at))
            return self._keep(t, at, memory)

    def _counted(self, saved: Data | Handle) -> Data | Handle:
        """Lets a checkpoint around the scope count a saved tensor that has a recipe.

        A checkpoint computes its forward again and stops, by an exception, at the last tensor that it has counted.
        Because every tensor is counted, this is the same tensor as without the scope.
        """
        if self._in_checkpoint and self.outer is not None and type(saved) is Handle:
            self.outer[0](torch.empty(0))
        return saved

    def keep(self, t: Tensor) -> Data:
        return self._keep(t, Place.of(t), self._memory(t.untyped_storage()))

    def _keep(self, t: Tensor, at: Place, memory: Memory) -> Data:
        kept = Data(t, self.outer, at)
        if memory.exposed:
            kept.exposed = True
        if self.saves_sources:
            kept.in_recipe = True
        others = [ref for ref in memory.kept if ref() is not None]
        # The newest one is found first.
        memory.kept = (weakref.ref(kept), *others)
        return kept

    def observe(self, call: OpCall) -> Tensor:
        """Makes the call of an op of this package, and records how to rebuild its output."""
        z, inputs = call.run(), call.inputs
        if inputs:
            with _torch.DisableTorchFunction():
                self.offer(z, call.rebuild(), inputs)
        return z

    def offer(
        self,
        output: Tensor,
        rebuild: Callable[..., Tensor],
        inputs: Sequence[Tensor | Data | Recipe],
        overwrite: Callable[..., Tensor] | None = None,
    ) -> Offer | None:
        """Records the recipe of ``output``, whose memory a call has just allocated."""
        if not (output.is_floating_point() and plain(output)):
            return None
        own = output.untyped_storage()
        for t in inputs:
            # If an argument lies in the same memory, another call has allocated it.
            if isinstance(t, Tensor) and not (plain(t) and t.untyped_storage() is not own):
                return None
        memory = self._memory(own)
        memory.made = True
        return self._record(output, Place.of(output), memory, None, rebuild, inputs, overwrite)

    def overwriting(
        self,
        x: Tensor,
        rebuild: Callable[..., Tensor],
        others: Sequence[Tensor],
        overwrite: Callable[..., Tensor] | None,
    ) -> tuple[Offer | None, Offer | None]:
        """Prepares for a call that overwrites ``x`` by ``rebuild(x, *others)``, and raises its version by one.

        Returns the offers of the present values of ``x`` and of the new values.
        """
        memory = self.before_change(x)
        if memory is None:
            return None, None
        at = Place.of(x)
        version = x._version
        before = memory.offer_of(at, version)
        if before is None or not (x.is_floating_point() and all(map(plain, others))):
            return before, None
        if memory.exposed or memory.kept_at(at, version) is not None:
            # The data of x is kept, and is about to be overwritten.
            return before, None
        return before, self._record(x, at, memory, before, rebuild, others, overwrite)

    def _record(
        self,
        output: Tensor,
        at: Place,
        memory: Memory,
        before: Offer | None,
        rebuild: Callable[..., Tensor],
        inputs: Sequence[Tensor | Data | Recipe],
        overwrite: Callable[..., Tensor] | None,
    ) -> Offer | None:
        """Records a recipe, unless an input is not certain, or the recipe does not pay.

        If the call is about to overwrite ``output``, then ``output`` is its own first input, and ``before`` is the
        offer of its present values.
        """
        links = self._links(inputs, output)
        if links is None:
            return None
        version = output._version
        if before is not None:
            links.insert(0, (before, at))
        elif overwrite is not None and (not links or links[0][1].layout() != at.layout()):
            # The result would differ if it were written over an input of another size, layout or dtype.
            overwrite = None
        new = version if before is None else version + 1
        offer = Offer(at, new, output.device, rebuild, overwrite, Autocast.of(output), links)
        if memory.exposed or offer.steps > MAX_STEPS or (offer.extra and offer.extra >= output.nbytes):
            return None
        # The newest one comes first, because it is the one that is asked for.
        others = [other for other in memory.offers if other.version >= version]
        memory.offers = (offer, *others)
        return offer

    def _links(self, inputs: Sequence[Tensor | Data | Recipe], output: Tensor) -> list[tuple[Input, Place]] | None:
        """The sources of all inputs, and their places; None if one is not certain, or too large."""
        links: list[tuple[Input, Place]] = []
        for t in inputs:
            if not isinstance(t, Tensor):
                links.append((Linked(t), t.at))
                continue
            link, place = self._link(t, output)
            # A tensor that is rebuilt from a much larger tensor, such as a pool's output, is better kept, because the
            # large tensor would lie beside it.
            if link is None or (link.steps and t.nbytes >= LARGER * output.nbytes):
                return None
            links.append((link, place))
        return links

    def withdraw(self, output: Tensor, offer: Offer) -> None:
        memory = self._find(output.untyped_storage())
        if memory is not None:
            memory.offers = tuple(other for other in memory.offers if other is not offer)

    def before_change(self, x: Tensor) -> Memory | None:
        """Copies the values that recipes read from the memory of ``x``, before ``x`` is written to.

        Returns the memory if ``x`` is plain and the registry knows it, so that ``x`` may have a recipe.
        """
        if not plain(x):
            return None
        storage = x.untyped_storage()
        memory = self._find(storage)
        # After the change, the version of x no longer shows that x's node in the graph has allocated its memory.
        if (memory is None or not memory.made) and self.is_computed(x):
            memory = self._memory(storage)
            memory.made = True
        if memory is None:
            return None
        # Versions are not compared with the version of x, which may be another name of the memory with its own count.
        for kept in memory.keepers():
            if kept.in_recipe:
                kept.copy_before_change(storage)
        return memory

    def expose(self, t: Tensor) -> None:
        """Notes that from now on something may write to the memory of ``t`` without raising a version.

        What recipes read from this memory is copied now, and no recipe will read from it.
        """
        if not plain(t):
            return
        memory = self._memory(t.untyped_storage())
        if memory.exposed:
            return
        for kept in memory.keepers():
            if kept.in_recipe:
                kept.copy_before_change(t.untyped_storage())
            else:
                kept.exposed = True
        memory.offers = ()
        memory.exposed = True

    def certain(self, t: Tensor) -> bool:
        """Whether ``t`` may be saved in place of a tensor that is computed from it."""
        if not plain(t):
            return False
        at, memory = Place.of(t), self._find(t.untyped_storage())
        if memory is None or memory.exposed:
            return self.is_computed(t)
        known = memory.kept_at(at, t._version) or memory.offer_of(at, t._version)
        return known is not None or self.is_computed(t)

    def close(self) -> None:
        self._memories.clear()
        self.notes.clear()

    def _link(self, t: Tensor, output: Tensor) -> "tuple[Input | None, Place]":
        """The source of the value of ``t`` in backward, or None if that is not certain; and the place in the source."""
        small, at = t.numel() * SMALL <= output.numel(), Place.of(t)
        # Small leaves, such as parameters and running statistics, are copied instead.
        if not (small and t.is_leaf):
            memory = self._find(t.untyped_storage())
            if memory is not None and not memory.exposed:
                kept = memory.kept_at(at, t._version)
                if kept is not None:
                    return Linked(kept), at
                offer = memory.offer_of(at, t._version)
                if offer is not None:
                    return offer, at
            if not small and self.is_computed(t):
                return Held(t.detach(), t.nbytes), at
            if not small and t.numel() > VECTOR:
                return None, at
        # A copy of a part of a larger memory has a place of its own.
        copy = t.detach().clone()
        return Held(copy, 0 if small else copy.nbytes), Place.of(copy)
