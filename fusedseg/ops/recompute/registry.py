"""What one scope knows about live tensors: which of them are kept, and how the others can be rebuilt.

A tensor's memory is identified by its storage, which is held weakly; an address is never trusted.  ``recipes.py`` has
the contract with the ops.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .offers import Held, Input, Linked, Offer
from .plain import is_trained_leaf, plain, unwrapped
from .saved import OFF, Autocast, Handle, Hooks, Kept, Place, Recipe, recomputing

# The most calls that may rebuild one tensor, its inputs included.  This is about five residual blocks of norm, add and
# activation.
MAX_STEPS = 16
# Keep the output if rebuilding it needs a recomputed input at least this many times its size.
LARGER = 4
# An input is copied if the output has at least this many times its elements.
SMALL = 16
# the most values that a vector with one value per channel may have
VECTOR = 2**12


class _Storage(weakref.ref):
    """A weak reference to a storage, and the key that the registry finds it by."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, storage: torch.UntypedStorage, gone: Callable[[Any], None]) -> "_Storage":
        self = super().__new__(cls, storage, gone)
        self.key = storage._cdata
        return self


class _Memory:
    """What is known about one live storage.

    offers: recipes of tensors in this storage, for its newest version.
    kept: saved tensors in this storage.
    made: the scope saw torch allocate the storage for a result.
    exposed: something may write to the storage without raising a version.
    named: a detached tensor gives the storage another name, and the scope may not see what is done with that name.
    """

    __slots__ = ("exposed", "kept", "made", "named", "offers", "storage")

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage
        self.offers: list[Offer] = []
        self.kept: list[weakref.ref[Kept]] = []
        self.made = self.exposed = self.named = False

    def keepers(self) -> Iterator[Kept]:
        """Yields the saved tensors that still share the memory and still have the values that were saved."""
        for ref in self.kept:
            kept = ref()
            if kept is not None and not (kept.copied or kept.changed()):
                yield kept

    def kept_at(self, at: Place, version: int) -> Kept | None:
        for kept in self.keepers():
            if kept.version == version and kept.at.holds(at):
                return kept
        return None

    def offer_of(self, at: Place, version: int) -> Offer | None:
        for offer in self.offers:
            if offer.version == version and offer.at.holds(at):
                return offer
        return None


class Registry:
    """The registry of one scope.

    Args:
        outer: the saved-tensor hooks around the scope, which get the data that is kept; None if there are none.
    """

    def __init__(self, outer: Hooks | None) -> None:
        self.outer = outer
        self._in_checkpoint = outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
        # Set during a call that makes tensors for itself: decides what to save for such a tensor.
        self.claim: Callable[[Tensor], Kept | Handle | None] | None = None
        # Set during a call of a norm: collects the parameters and statistics that the call saves.
        self.vectors: list[Tensor] | None = None
        # True during a call that saves tensors which eager mode would not have kept.
        self.saves_sources = False
        # Notes of ``joins.py``: the sources of a concatenation, by the concatenation, as long as that lives.
        self.notes: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._memories: dict[int, _Memory] = {}
        registry = weakref.ref(self)

        def gone(storage: _Storage) -> None:
            own = registry()
            if own is not None and storage.key in own._memories and own._memories[storage.key].storage is storage:
                del own._memories[storage.key]

        self._gone = gone

    def pack(self, t: Tensor) -> Kept | Handle:
        """The hook that autograd calls in forward.  In backward it calls ``saved.unpack``."""
        with torch._C.DisableTorchFunction():
            # Parameters and vectors of statistics are saved as they are; recipes have copies of them.
            if (t.dim() < 2 and t.numel() <= VECTOR) or is_trained_leaf(t) or not plain(t):
                if self.vectors is not None:
                    self.vectors.append(t.detach())
                return Kept(t, self.outer)
            claimed = None if self.claim is None else self.claim(t)
            if claimed is not None:
                return claimed
            at, recipe, memory = Place.of(t), None, self._find(t)
            if memory is not None and memory.offers and memory.kept_at(at, t._version) is None:
                offer = memory.offer_of(at, t._version)
                recipe = None if offer is None else offer.source(self)
            return self.keep(t, at) if recipe is None else Handle(recipe, at)

    def keep(self, t: Tensor, at: Place | None = None) -> Kept:
        kept = Kept(t, self.outer, Place.of(t) if at is None else at)
        memory = self._memory(t.untyped_storage())
        kept.exposed = memory.exposed
        kept.in_recipe = self.saves_sources
        kept.in_graph = not self.saves_sources
        if memory.kept:
            memory.kept = [ref for ref in memory.kept if ref() is not None]
        memory.kept.append(weakref.ref(kept))
        return kept

    def offer(
        self,
        output: Tensor,
        rebuild: Callable[..., Tensor],
        inputs: Sequence[Tensor | Kept | Recipe],
        overwrite: Callable[..., Tensor] | None = None,
        changes: int = 0,
    ) -> Offer | None:
        """Records the recipe of ``output`` as it is now, or will be after so many changes in place."""
        if not (output.is_floating_point() and plain(output)):
            return None
        if not all(not isinstance(t, Tensor) or plain(t) for t in inputs):
            return None
        own = output.untyped_storage()
        # Memory that an argument lies in was made by another call, unless this call writes to it.
        if not changes and any(isinstance(t, Tensor) and t.untyped_storage() is own for t in inputs):
            return None
        memory, at, links = self._memory(own), Place.of(output), list[tuple[Input, Place]]()
        memory.made |= not changes
        for t in inputs:
            if not isinstance(t, Tensor):
                links.append((Linked(t), t.at))
                continue
            link, place = self._link(t, output)
            # A tensor that is rebuilt from one that is much larger, such as a pool's output, is better kept: the large
            # one would stand beside it.
            if link is None or (link.steps and t.nbytes >= LARGER * output.nbytes):
                return None
            links.append((link, place))
        if changes and not isinstance(links[0][0], Offer):
            # its data is about to be overwritten
            return None
        if overwrite is not None and (not links or links[0][1].layout() != at.layout()):
            # Written over an input of another size, layout or dtype, the result would be another one.
            overwrite = None
        version = output._version + changes
        autocast = Autocast.now(output.device.type)
        offer = Offer(at, version, output.device, rebuild, overwrite, autocast, links)
        if memory.exposed or offer.steps > MAX_STEPS or (offer.extra and offer.extra >= output.nbytes):
            return None
        memory.offers = [other for other in memory.offers if other.version >= output._version]
        memory.offers.append(offer)
        return offer

    def offer_cast(self, t: Tensor, parameter: Tensor) -> Handle | None:
        """What to save for ``t``, which is ``parameter`` in another dtype: the parameter is kept anyway."""
        if not plain(t) or self.is_exposed(parameter):
            return None
        memory, at, whole = self._memory(t.untyped_storage()), Place.of(t), parameter.detach()
        offer = memory.offer_of(at, t._version)
        if offer is None:
            links: list[tuple[Input, Place]] = [(Held(whole, 0), Place.of(whole))]
            offer = Offer(at, t._version, t.device, partial(Tensor.to, dtype=t.dtype), None, OFF, links)
            memory.offers.append(offer)
        recipe = offer.source(self)
        return None if recipe is None else Handle(recipe, at)

    def source(self, t: Tensor) -> Recipe | None:
        """The recipe of ``t`` as it is, if it has one."""
        memory = self._find(t)
        offer = None if memory is None else memory.offer_of(Place.of(t), t._version)
        return None if offer is None else offer.source(self)

    def withdraw(self, output: Tensor, offer: Offer) -> None:
        memory = self._find(output)
        if memory is not None:
            memory.offers = [other for other in memory.offers if other is not offer]

    def before_change(self, t: Tensor) -> None:
        """``t`` is about to be written to: copies what recipes read from its memory."""
        t = unwrapped(t)
        if not plain(t):
            return
        memory = self._find(t)
        # The version of t will no longer tell that its node in the graph is the one that made its memory.
        if (memory is None or not memory.made) and self.is_computed(t):
            self.note_made(t)
        # Versions are not compared with that of t, which may be another name of the memory with its own count.
        for kept in memory.keepers() if memory is not None else ():
            if kept.in_recipe:
                kept.copy_before_change(t.untyped_storage())

    def expose(self, t: Tensor) -> None:
        """From now on, something may write to the memory of ``t`` without raising a version.

        What recipes read from it is copied now.  What was saved of it shows such a write as it does in eager mode: a
        recipe of ``t`` itself gives way to the data.
        """
        t = unwrapped(t)
        if not plain(t):
            return
        memory = self._memory(t.untyped_storage())
        if memory.exposed:
            return
        for kept in memory.keepers():
            if not kept.in_recipe:
                kept.exposed = True
            elif kept.in_graph:
                kept.copy_for_recipes(t.untyped_storage())
            else:
                kept.copy_before_change(t.untyped_storage())
        for offer in memory.offers:
            recipe = offer.recipe()
            # Saved tensors of an older version have the values of that version in eager mode as well, or raise.
            if recipe is not None and recipe.orders and offer.version == t._version and offer.at.dtype == t.dtype:
                recipe.data = Kept(t.detach().as_strided(*offer.at[:3]), self.outer, offer.at)
        memory.offers.clear()
        memory.exposed = True

    def secure(self, t: Tensor) -> None:
        """``t`` gets another name, with which calls that the scope does not see could change it.

        What is kept of its memory for recipes alone is copied, and nothing more is kept so.
        """
        if not plain(t):
            return
        memory = self._memory(t.untyped_storage())
        memory.named = True
        for kept in memory.keepers():
            if kept.in_recipe and not kept.in_graph:
                kept.copy_before_change(t.untyped_storage())

    def is_source(self, t: Tensor) -> bool:
        memory = self._find(t) if plain(t) else None
        return memory is not None and any(kept.in_recipe for kept in memory.keepers())

    def is_exposed(self, t: Tensor) -> bool:
        memory = self._find(t)
        return memory is not None and memory.exposed

    def note_made(self, t: Tensor) -> None:
        """``t`` is the result of a call that has just allocated its memory."""
        if plain(t):
            self._memory(t.untyped_storage()).made = True

    def is_computed(self, t: Tensor) -> bool:
        """Whether the memory of ``t`` was allocated for a result, by torch.

        It is the result of a call that this scope saw, or of one with a node in the graph.  False for the caller's own
        memory, such as images, parameters and buffers, which may change in ways that no version shows.
        """
        # false for memory of numpy and other libraries, and for what was handed to them
        if not t.untyped_storage().resizable():
            return False
        memory = self._find(t)
        if memory is not None and (memory.made or memory.exposed or memory.named):
            return not (memory.exposed or memory.named)
        if self._in_checkpoint or recomputing():
            # A checkpoint keeps its inputs, and the graph of what it computes again lives no longer than one backward.
            return True
        whole = t._base if t._is_view() else t
        # after a change in place, the node is that of the change, and does not tell where the memory comes from
        return whole is not None and whole.grad_fn is not None and not whole._version

    def certain(self, t: Tensor) -> bool:
        """Whether ``t`` may be saved in place of something that is computed from it."""
        if not plain(t):
            return False
        at, memory = Place.of(t), self._find(t)
        if memory is None or memory.exposed:
            return self.is_computed(t)
        known = memory.kept_at(at, t._version) or memory.offer_of(at, t._version)
        return known is not None or self.is_computed(t)

    def close(self) -> None:
        self._memories.clear()
        self.notes.clear()

    def _link(self, t: Tensor, output: Tensor) -> "tuple[Input | None, Place]":
        """How the value of ``t`` will be had in backward; None where that is not certain."""
        small, at = t.numel() * SMALL <= output.numel(), Place.of(t)
        # not parameters and running statistics
        if not (small and t.is_leaf):
            memory = self._find(t)
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
        # The copy of a part of a larger memory has a place of its own.
        copy = t.detach().clone()
        return Held(copy, 0 if small else copy.nbytes), Place.of(copy)

    def _find(self, t: Tensor) -> _Memory | None:
        storage = t.untyped_storage()
        memory = self._memories.get(storage._cdata)
        return memory if memory is not None and memory.storage() is storage else None

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.storage() is not storage:
            memory = self._memories[storage._cdata] = _Memory(_Storage(storage, self._gone))
        return memory
