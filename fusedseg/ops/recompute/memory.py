"""The live storages of a scope.  Each has an entry: its offers, and the saved tensors that lie in it."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from ... import _torch
from .offers import Offer
from .plain import Place, plain
from .saved import Data


class Storage(weakref.ref):
    """A weak reference to a storage, with the key by which the registry finds it."""

    __slots__ = ("key",)
    key: int


class Memory:
    """The state of one live storage.

    offers: recipes of tensors in this storage, for its newest version.
    kept: saved tensors in this storage.
    made: the scope saw torch allocate the storage for a result.
    exposed: something may write to the storage without raising a version.
    named: a detached tensor gives the storage another name, and the scope may not see the calls that use this name.
    """

    made = exposed = named = False
    # For a scope with a budget: the node of the data that is kept, and whether autograd was seen to save it.
    node = -1
    counted = False

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.offers: list[Offer] = []
        self.kept: list[weakref.ref[Data]] = []

    def keepers(self) -> Iterator[Data]:
        """Yields the saved tensors that still share the memory and still have the values that were saved."""
        for ref in self.kept:
            kept = ref()
            if kept is not None and not (kept.copied or kept.changed()):
                yield kept

    def kept_at(self, at: Place, version: int) -> Data | None:
        for ref in self.kept:
            kept = ref()
            if kept is None or kept.version != version or kept.copied or kept.changed():
                continue
            if kept.at is at or kept.at.holds(at):
                return kept
        return None

    def offer_of(self, at: Place, version: int) -> Offer | None:
        for offer in self.offers:
            if offer.version == version and (offer.at is at or offer.at.holds(at)):
                return offer
        return None


class Memories:
    """The live storages that a scope knows.  A storage is held weakly and told apart by identity."""

    # Whether the hooks around the scope are those of a checkpoint.
    _in_checkpoint = False

    def __init__(self) -> None:
        # The activation that the last rule has returned, its place and its memory, so that the next call need not look
        # at it again; None after calls that may change more than its values.
        self.seen: tuple[weakref.ref[Tensor], Place, Memory] | None = None
        self._memories: dict[int, Memory] = {}
        registry = weakref.ref(self)

        def gone(storage: Storage) -> None:
            own = registry()
            memory = None if own is None else own._memories.get(storage.key)
            if own is not None and memory is not None and memory.storage is storage:
                del own._memories[storage.key]
                if own.seen is not None and own.seen[2] is memory:
                    own.seen = None

        self._gone = gone

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
