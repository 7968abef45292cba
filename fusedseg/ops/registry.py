"""What is known of the live tensors of one scope: who keeps them, and how they can be rebuilt.

Memory is told apart by its storage, weakly: an address is never trusted.  ``recipe.py`` holds the contract.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .rebuild import Autocast, Handle, Hooks, Kept, Place, Recipe

# calls of rebuild to get one tensor back, those of its inputs included: five residual blocks of norm, add, activation
MAX_STEPS = 16
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
        self.steps: int = 1 + sum(source.steps for source, _ in inputs)
        self.extra: int = sum(source.extra for source, _ in inputs)
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


class _Memory:
    """What is known of one live storage: offers of its newest version, and who keeps it."""

    __slots__ = ("kept", "offers", "storage")

    def __init__(self, storage: "weakref.ref[torch.UntypedStorage]") -> None:
        self.storage = storage
        self.offers: list[Offer] = []
        self.kept: list[weakref.ref[Kept]] = []

    def keepers(self, version: int) -> Iterator[Kept]:
        for ref in self.kept:
            kept = ref()
            if kept is not None and kept.version == version and not kept.copied:
                yield kept

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
            if memory is not None and not any(kept.at.holds(at) for kept in memory.keepers(t._version)):
                offer = memory.offer_of(at, t._version)
                recipe = None if offer is None else offer.source(self)
            return self.keep(t, at) if recipe is None else Handle(recipe, at)

    def keep(self, t: Tensor, at: Place | None = None) -> Kept:
        kept, memory = Kept(t, self.outer, Place.of(t) if at is None else at), self._memory(t)
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
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        if not (output.is_floating_point() and plain(output) and all(map(plain, tensors))):
            return None
        links = [self._placed(t, output) if isinstance(t, Tensor) else (_Weakly(t), t.at) for t in inputs]
        if changes and not isinstance(links[0][0], Offer):
            # its data is about to be overwritten
            return None
        version, autocast = output._version + changes, Autocast.now(output.device.type)
        offer = Offer(Place.of(output), version, rebuild, overwrite, autocast, links)
        if offer.steps > MAX_STEPS or (offer.extra and offer.extra >= output.nbytes):
            return None
        memory = self._memory(output)
        memory.offers = [other for other in memory.offers if other.version >= output._version]
        memory.offers.append(offer)
        return offer

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

    def _placed(self, t: Tensor, output: Tensor) -> tuple[_Input, Place]:
        link = self._link(t, output)
        # a copy of part of a larger memory lies elsewhere
        return link, Place.of(link.tensor if isinstance(link, _Held) else t)

    def _link(self, t: Tensor, output: Tensor) -> _Input:
        small = t.numel() * SMALL <= output.numel()
        # parameters and running statistics
        if small and t.is_leaf:
            return _Held(t.detach().clone(), 0)
        memory, at = self._find(t), Place.of(t)
        if memory is not None:
            for kept in memory.keepers(t._version):
                if kept.at.holds(at):
                    return _Weakly(kept)
            offer = memory.offer_of(at, t._version)
            if offer is not None:
                return offer
        return _Held(t.detach().clone(), 0) if small else _Held(t.detach(), t.nbytes)

    def _find(self, t: Tensor) -> _Memory | None:
        storage = t.untyped_storage()
        memory = self._memories.get(storage._cdata)
        return memory if memory is not None and memory.storage() is storage else None

    def _memory(self, t: Tensor) -> _Memory:
        memory = self._find(t)
        if memory is None:
            storage, registry = t.untyped_storage(), weakref.ref(self)
            key = storage._cdata

            def gone(ref: "weakref.ref[torch.UntypedStorage]") -> None:
                own = registry()
                if own is not None and key in own._memories and own._memories[key].storage is ref:
                    del own._memories[key]

            memory = self._memories[key] = _Memory(weakref.ref(storage, gone))
        return memory
