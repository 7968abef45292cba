"""The registry's entry for one live storage: its offers, and the saved tensors that lie in it."""

import weakref
from collections.abc import Iterator

from .offers import Offer
from .plain import Place
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
