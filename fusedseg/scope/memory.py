"""The live storages of a scope.  Each has an entry: its offers, and the saved tensors that lie in it."""

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import _torch
from .offers import Offer
from .plain import Place, plain
from .saved import Data


class Memory(weakref.ref):
    """The state of one live storage, which it refers to weakly.

    key: the number by which the registry finds the storage.
    offers: recipes of tensors in this storage, for its newest version.
    kept: saved tensors in this storage.
    made: the scope saw torch allocate the storage for a result.
    exposed: something may write to the storage without raising a version.
    """

    key: int
    made = exposed = False
    # Most storages have one offer and one saved tensor at most, so that each has a new tuple with every one.
    offers: "tuple[Offer, ...]" = ()
    kept: "tuple[weakref.ref[Data], ...]" = ()

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
            if kept.at.holds(at):
                return kept
        return None

    def offer_of(self, at: Place, version: int) -> Offer | None:
        for offer in self.offers:
            if offer.version == version and offer.at.holds(at):
                return offer
        return None


class Memories:
    """The live storages that a scope knows.  A storage is held weakly and told apart by identity."""

    # Whether the hooks around the scope are those of a checkpoint.
    _in_checkpoint = False

    def __init__(self) -> None:
        self._memories: dict[int, Memory] = {}
        memories = self._memories

        def gone(memory: Memory) -> None:
            if memories.get(memory.key) is memory:
                del memories[memory.key]

        self._gone = gone

    def _find(self, storage: torch.UntypedStorage) -> Memory | None:
        memory = self._memories.get(storage._cdata)
        return memory if memory is not None and memory() is storage else None

    def _memory(self, storage: torch.UntypedStorage) -> Memory:
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None or memory() is not storage:
            memory = self._memories[key] = Memory(storage, self._gone)
            memory.key = key
        return memory

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
        memory = self._find(storage)
        # Memory that belongs to numpy or another library, or that was given to one, is not resizable.
        if not storage.resizable():
            return False
        if memory is not None and (memory.made or memory.exposed):
            return not memory.exposed
        if self._in_checkpoint or _torch.current_graph_task_id() != -1:
            # A checkpoint keeps its inputs.  The graph of a forward that it computes again ends with that backward.
            return True
        whole = t._base if t._is_view() else t
        # After a change in place, the node belongs to the change, and does not tell where the memory comes from.
        return whole is not None and whole.grad_fn is not None and not whole._version
