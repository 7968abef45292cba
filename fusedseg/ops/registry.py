"""What is known of the live tensors of one scope: who keeps them, and how they can be rebuilt.

Memory is told apart by its storage, weakly: an address is never trusted.  ``recipe.py`` holds the contract.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rebuild import OFF, Autocast, Handle, Hooks, Kept, Place, Recipe

# calls of rebuild to get one tensor back, those of its inputs included: five residual blocks of norm, add, activation
MAX_STEPS = 16
# times the output: an input that is not rebuilt for it
LARGER = 4
# of the output's elements: what an input may have to be copied
SMALL = 16
# values, of one for each channel at most
VECTOR = 2**12
_KINDS = (torch.nn.Parameter, torch.nn.Buffer)


def plain(t: Tensor) -> bool:
    """Strided, its values are those that lie in its memory, and no subclass gives it another meaning."""
    kind = type(t)
    if kind is not Tensor and kind not in _KINDS and kind.__module__ != "torch._subclasses.fake_tensor":
        return False
    return t.layout == torch.strided and not (t.is_conj() or t.is_neg() or t.is_quantized)


class _Held:
    """An input that is there for the offer alone: a copy of a small one, or a large one that nobody else keeps."""

    __slots__ = ("_kept", "extra", "tensor", "version")
    steps: int = 0

    def __init__(self, t: Tensor, extra: int) -> None:
        self.tensor, self.version, self.extra = t, t._version, extra
        self._kept: Callable[[], Kept | None] = lambda: None

    def source(self, registry: "Registry") -> Kept | None:
        if self.tensor._version != self.version:
            return None
        kept = self._kept()
        if kept is None:
            kept = registry.keep(self.tensor)
            self._kept = weakref.ref(kept)
        return kept


class _Weakly:
    """An input that somebody's backward keeps, or rebuilds."""

    __slots__ = ("_source", "steps")
    extra: int = 0

    def __init__(self, source: Kept | Recipe) -> None:
        self._source = weakref.ref(source)
        self.steps = int(isinstance(source, Recipe))

    def source(self, registry: "Registry") -> Kept | Recipe | None:
        source = self._source()
        return None if isinstance(source, Kept) and source.changed() else source


class Offer:
    """A recipe that nobody has asked for yet."""

    __slots__ = ("_recipe", "at", "autocast", "extra", "inputs", "overwrite", "rebuild", "steps", "version")

    def __init__(
        self,
        at: Place,
        version: int,
        rebuild: Callable[..., Tensor],
        overwrite: Callable[..., Tensor] | None,
        autocast: Autocast,
        inputs: "list[tuple[_Input, Place]]",
    ) -> None:
        self.at, self.version, self.rebuild, self.overwrite, self.autocast = at, version, rebuild, overwrite, autocast
        self.inputs = inputs
        # calls to rebuild it, and bytes that are kept for it alone
        self.steps, self.extra = 1, 0
        for source, _ in inputs:
            self.steps += source.steps
            self.extra += source.extra
        self._recipe: Callable[[], Recipe | None] = lambda: None

    def source(self, registry: "Registry") -> Recipe | None:
        """The one recipe of all who ask; None where an input is gone or has changed."""
        recipe = self._recipe()
        if recipe is not None:
            return recipe
        inputs: list[tuple[Kept | Recipe, Place]] = []
        for link, at in self.inputs:
            source = link.source(registry)
            if source is None:
                return None
            if isinstance(source, Kept):
                source.in_recipe = True
            inputs.append((source, at))
        recipe = Recipe(self.at, self.rebuild, self.overwrite, self.autocast, inputs)
        self._recipe = weakref.ref(recipe)
        return recipe


_Input = _Held | _Weakly | Offer


class _Storage(weakref.ref):
    """A live storage, and the address that it is looked up by."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, storage: torch.UntypedStorage, gone: Callable[[Any], None]) -> "_Storage":
        self = super().__new__(cls, storage, gone)
        self.key = storage._cdata
        return self


class _Memory:
    """What is known of one live storage: offers of its newest version, and who keeps it."""

    __slots__ = ("kept", "offers", "storage")

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage
        self.offers: list[Offer] = []
        self.kept: list[weakref.ref[Kept]] = []

    def keepers(self, version: int) -> Iterator[Kept]:
        for ref in self.kept:
            kept = ref()
            if kept is not None and kept.version == version and not kept.copied:
                yield kept

    def kept_at(self, at: Place, version: int) -> Kept | None:
        for kept in self.keepers(version):
            if kept.at.holds(at):
                return kept
        return None

    def offer_of(self, at: Place, version: int) -> Offer | None:
        for offer in self.offers:
            if offer.version == version and offer.at.holds(at):
                return offer
        return None


class Registry:
    """Of one scope.  ``outer``: the saved-tensor hooks around it, which get the data that is kept."""

    def __init__(self, outer: Hooks | None) -> None:
        self.outer = outer
        # during a call: what to save for a tensor that it makes for itself
        self.claim: Callable[[Tensor], Kept | Handle | None] | None = None
        # during a call whose caller asks for them: what it saves of parameters and statistics
        self.vectors: list[Tensor] | None = None
        self._memories: dict[int, _Memory] = {}
        registry = weakref.ref(self)

        def gone(storage: _Storage) -> None:
            own = registry()
            if own is not None and storage.key in own._memories and own._memories[storage.key].storage is storage:
                del own._memories[storage.key]

        self._gone = gone

    def pack(self, t: Tensor) -> Kept | Handle:
        """The hook of forward; that of backward is ``unpack``."""
        with torch._C.DisableTorchFunction():
            # parameters, and vectors of statistics, of which recipes have copies anyway
            if (t.dim() < 2 and t.numel() <= VECTOR) or (t.is_leaf and t.requires_grad) or not plain(t):
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
        if not (plain(output) and output.is_floating_point()):
            return None
        own = output.untyped_storage()
        links: list[tuple[_Input, Place]] = []
        for t in inputs:
            if not isinstance(t, Tensor):
                links.append((_Weakly(t), t.at))
                continue
            # what lies in an argument's memory was made by another call, unless this one writes there
            if not plain(t) or (not changes and t.untyped_storage() is own):
                return None
            link, at = self._link(t, output)
            if link.steps and t.nbytes >= LARGER * output.nbytes:
                # such as a pool of an activation: to keep it is less than what stands there while it is rebuilt
                return None
            links.append((link, at))
        if changes and not isinstance(links[0][0], Offer):
            # its data is about to be overwritten
            return None
        version, autocast = output._version + changes, Autocast.now(output.device.type)
        offer = Offer(Place.of(output), version, rebuild, overwrite, autocast, links)
        if offer.steps > MAX_STEPS or (offer.extra and offer.extra >= output.nbytes):
            return None
        memory = self._memory(own)
        memory.offers = [other for other in memory.offers if other.version >= output._version]
        memory.offers.append(offer)
        return offer

    def offer_cast(self, t: Tensor, parameter: Tensor) -> Handle | None:
        """What to save for ``t``, which is ``parameter`` in another dtype: the parameter is kept anyway."""
        memory, at, whole = self._memory(t.untyped_storage()), Place.of(t), parameter.detach()
        offer = memory.offer_of(at, t._version)
        if offer is None:
            links: list[tuple[_Input, Place]] = [(_Held(whole, 0), Place.of(whole))]
            offer = Offer(at, t._version, partial(Tensor.to, dtype=t.dtype), None, OFF, links)
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
        """``t`` is about to be written to: what others are rebuilt from is copied."""
        memory = self._find(t) if self._memories and plain(t) else None
        for kept in memory.keepers(t._version) if memory is not None else ():
            if kept.in_recipe:
                kept.copy_before_change(t)

    def forget(self, t: Tensor) -> None:
        """Of ``t``'s memory, which may be written to from now on without being noticed."""
        memory = self._find(t) if plain(t) else None
        if memory is not None:
            memory.offers.clear()

    def close(self) -> None:
        self._memories.clear()

    def _link(self, t: Tensor, output: Tensor) -> "tuple[_Input, Place]":
        small = t.numel() * SMALL <= output.numel()
        # not parameters and running statistics
        if not (small and t.is_leaf):
            at, memory = Place.of(t), self._find(t)
            if memory is not None:
                kept = memory.kept_at(at, t._version)
                if kept is not None:
                    return _Weakly(kept), at
                offer = memory.offer_of(at, t._version)
                if offer is not None:
                    return offer, at
            if not small:
                return _Held(t.detach(), t.nbytes), at
        # which, being part of a larger memory, lies elsewhere as a copy
        copy = t.detach().clone()
        return _Held(copy, 0), Place.of(copy)

    def _find(self, t: Tensor) -> _Memory | None:
        storage = t.untyped_storage()
        memory = self._memories.get(storage._cdata)
        return memory if memory is not None and memory.storage() is storage else None

    def _memory(self, storage: torch.UntypedStorage) -> _Memory:
        memory = self._memories.get(storage._cdata)
        if memory is None or memory.storage() is not storage:
            memory = self._memories[storage._cdata] = _Memory(_Storage(storage, self._gone))
        return memory
