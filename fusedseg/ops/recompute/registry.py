"""The knowledge of one scope about live tensors: which tensors are kept, and how other tensors can be rebuilt.

A tensor's memory is identified by its storage, which is held weakly; an address is never trusted.  ``recipes.py`` has
the contract with the ops.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ... import _torch
from .memory import Memory, Storage
from .offers import Held, Input, Linked, Offer
from .plain import Place, is_trained_leaf, plain, unwrapped
from .saved import AsItIs, Autocast, Data, Handle, Hooks, Recipe, as_it_is

# The largest number of calls that may rebuild one tensor, including its inputs.  This is about five residual blocks of
# norm, add and activation.
MAX_STEPS = 16
# Keep the output if rebuilding it needs a recomputed input at least this many times its size.
LARGER = 4
# An input is copied if the output has at least this many times its elements.
SMALL = 16
_pop_hooks = _torch.pop_hooks
# The largest number of values of a vector with one value per channel.
VECTOR = 2**12


class Registry:
    """The registry of one scope.  ``outer``: the hooks around the scope, which get the data that is kept, or None."""

    # The fewest bits of a recipe that the present call may save; whether tensors are rounded, and by which recipes.
    needs, rounds, recipe = 0, False, Recipe
    # Whether a call that overwrites its input, and the call that computed the input, become one recipe.
    chains = True

    def __init__(self, outer: Hooks | None) -> None:
        self.outer = outer
        self._in_checkpoint = outer is not None and getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"
        # Set during a call that makes tensors which it saves: it decides what to save for such a tensor.
        self.claim: Callable[[Tensor], Data | Handle | None] | None = None
        # Set during a call of a norm: the parameters and statistics that the call saves; then those of the last norm.
        self.vectors: list[Tensor] | None = None
        self.collected: list[Tensor] = []
        # During a call of which only this plain tensor passes through ``pack`` (``stock_norm.py``); then what was saved.
        self.bare: Tensor | Data | Handle | None = None
        # True during a call that saves tensors which eager mode would not have kept.
        self.saves_sources = False
        # Notes of ``joins.py``: the sources of each concatenation while it lives, and whether anybody reads the notes.
        self.notes, self.joins = WeakIdKeyDictionary(), False
        self._memories: dict[int, Memory] = {}
        registry = weakref.ref(self)

        def gone(storage: Storage) -> None:
            own = registry()
            memory = None if own is None else own._memories.get(storage.key)
            if own is not None and memory is not None and memory.storage is storage:
                del own._memories[storage.key]

        self._gone = gone

    def pack(self, t: Tensor) -> AsItIs | Data | Handle:
        """The hook that autograd calls in forward.  In backward it calls ``saved.unpack``."""
        with _torch.DisableTorchFunction():
            if t is self.bare:
                _pop_hooks()
                self.bare = saved = self._pack(t)
                return saved
            # Parameters and vectors of statistics are saved unchanged, because recipes have copies of them.
            if (t.dim() < 2 and t.numel() <= VECTOR) or (t.requires_grad and is_trained_leaf(t)) or not plain(t):
                as_is = as_it_is(t, self.outer)
                if self.vectors is not None:
                    self.vectors.append(as_is[0] if type(as_is) is tuple else t.detach())
                return as_is
            if self.claim is not None:
                claimed = self.claim(t)
                if claimed is not None:
                    return self._counted(claimed)
            return self._pack(t)

    def _pack(self, t: Tensor) -> Data | Handle:
        """What is saved for an activation that is plain and that no call claims."""
        at, version, memory = Place.of(t), t._version, self._memory(t.untyped_storage())
        if memory.offers and (not memory.kept or memory.kept_at(at, version) is None):
            offer = memory.offer_of(at, version)
            recipe = None if offer is None else offer.source(self)
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

    def keep(self, t: Tensor, computed: bool | None = None) -> Data:
        return self._keep(t, Place.of(t), self._memory(t.untyped_storage()))

    def _keep(self, t: Tensor, at: Place, memory: Memory) -> Data:
        kept = Data(t, self.outer, at)
        if memory.exposed:
            kept.exposed = True
        if self.saves_sources:
            kept.in_recipe, kept.in_graph = True, False
        if memory.kept:
            memory.kept = [ref for ref in memory.kept if ref() is not None]
        memory.kept.append(weakref.ref(kept))
        return kept

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
        if memory is None or not memory.offers:
            return None, None
        at, version = Place.of(x), x._version
        before = memory.offer_of(at, version)
        if before is None or not (x.is_floating_point() and all(map(plain, others))):
            return before, None
        if memory.exposed or (memory.kept and memory.kept_at(at, version) is not None):
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
        offer of its present values.  Nobody can ask for them later, so one recipe makes both calls.
        """
        version, autocast, calls = output._version, Autocast.of(output), 1
        links: list[tuple[Input, Place]] = []
        if before is not None:
            version += 1
            links = [(before, at)]
            if self.chains and before.is_alone(at, autocast):
                links, calls = list(before.inputs), 1 + before.calls
                rebuild, overwrite = before.chained(overwrite or rebuild)
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
        if before is None and overwrite is not None and (not links or links[0][1].layout() != at.layout()):
            # The result would differ if it were written over an input of another size, layout or dtype.
            overwrite = None
        offer = Offer(at, version, output.device, rebuild, overwrite, autocast, links, calls)
        if memory.exposed or offer.steps > MAX_STEPS or (offer.extra and offer.extra >= output.nbytes):
            return None
        if memory.offers:
            memory.offers = [other for other in memory.offers if other.version >= output._version]
        memory.offers.append(offer)
        return offer

    def withdraw(self, output: Tensor, offer: Offer) -> None:
        memory = self._find(output.untyped_storage())
        if memory is not None:
            memory.offers = [other for other in memory.offers if other is not offer]

    def before_change(self, x: Tensor) -> Memory | None:
        """Copies the values that recipes read from the memory of ``x``, before ``x`` is written to.

        Returns the memory if ``x`` is plain and the registry knows it, so that ``x`` may have a recipe.
        """
        t = x
        if not plain(t):
            t = unwrapped(t)
            if not plain(t):
                return None
        storage = t.untyped_storage()
        memory = self._find(storage)
        # After the change, the version of t no longer shows that t's node in the graph has allocated its memory.
        if (memory is None or not memory.made) and self._is_computed(t, storage, memory):
            self._memory(storage).made = True
        if memory is None:
            return None
        if memory.kept:
            # Versions are not compared with the version of t, which may be another name of the memory with its own
            # count.
            for kept in memory.keepers():
                if kept.in_recipe:
                    kept.copy_before_change(storage)
        return memory if t is x else None

    def expose(self, t: Tensor) -> None:
        """Notes that from now on something may write to the memory of ``t`` without raising a version.

        The values that recipes read from this memory are copied now.  Saved tensors show such a write, as in eager
        mode; therefore data replaces a recipe of ``t`` itself.
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
            # In eager mode too, saved tensors of an older version have the values of that version, or raise an error.
            if recipe is not None and recipe.orders and offer.version == t._version and offer.at.dtype == t.dtype:
                recipe.data = Data(t.detach().as_strided(*offer.at[:3]), self.outer, offer.at)
        memory.offers.clear()
        memory.exposed = True

    def secure(self, t: Tensor) -> None:
        """Notes that ``t`` gets another name, through which calls that the scope does not see could change it.

        Parts of its memory that are kept only for recipes are copied, and from now on no recipe keeps a part of it.
        """
        if not plain(t):
            return
        memory = self._memory(t.untyped_storage())
        memory.named = True
        for kept in memory.keepers():
            if kept.in_recipe and not kept.in_graph:
                kept.copy_before_change(t.untyped_storage())

    def is_source(self, t: Tensor) -> bool:
        memory = self._find(t.untyped_storage()) if plain(t) else None
        return memory is not None and any(kept.in_recipe for kept in memory.keepers())

    def is_exposed(self, t: Tensor) -> bool:
        memory = self._find(t.untyped_storage())
        return memory is not None and memory.exposed

    def note_made(self, t: Tensor) -> None:
        """Notes that ``t`` is the result of a call that has just allocated its memory."""
        if plain(t):
            self._memory(t.untyped_storage()).made = True

    def is_computed(self, t: Tensor) -> bool:
        """Whether the memory of ``t`` was allocated for a result, by torch.

        This is so if ``t`` is the result of a call that this scope saw, or that has a node in the graph.  The answer is
        False for the caller's own memory, such as images, parameters and buffers, which may change without a new
        version.
        """
        storage = t.untyped_storage()
        return self._is_computed(t, storage, self._find(storage))

    def _is_computed(self, t: Tensor, storage: torch.UntypedStorage, memory: Memory | None) -> bool:
        # Memory that belongs to numpy or another library, or that was given to one, is not resizable.
        if not storage.resizable():
            return False
        if memory is not None and (memory.made or memory.exposed or memory.named):
            return not (memory.exposed or memory.named)
        if self._in_checkpoint or _torch.current_graph_task_id() != -1:
            # A checkpoint keeps its inputs.  The graph of a forward that it computes again ends with that backward.
            return True
        whole = t._base if t._is_view() else t
        # After a change in place, the node belongs to the change, and does not tell where the memory comes from.
        return whole is not None and whole.grad_fn is not None and not whole._version

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
            storage = t.untyped_storage()
            memory = self._find(storage)
            if memory is not None and not memory.exposed:
                kept = memory.kept_at(at, t._version) if memory.kept else None
                if kept is not None:
                    return Linked(kept), at
                offer = memory.offer_of(at, t._version) if memory.offers else None
                if offer is not None:
                    return offer, at
            if not small and self._is_computed(t, storage, memory):
                return Held(t.detach(), t.nbytes), at
            if not small and t.numel() > VECTOR:
                return None, at
        # A copy of a part of a larger memory has a place of its own.
        copy = t.detach().clone()
        return Held(copy, 0 if small else copy.nbytes), Place.of(copy)

    def _find(self, storage: torch.UntypedStorage) -> Memory | None:
        memory = self._memories.get(storage._cdata)
        return memory if memory is not None and memory.storage() is storage else None

    def _memory(self, storage: torch.UntypedStorage) -> Memory:
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None or memory.storage() is not storage:
            own = Storage(storage, self._gone)
            own.key = key
            memory = self._memories[key] = Memory(own)
        return memory
