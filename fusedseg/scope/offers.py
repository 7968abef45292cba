"""Recipes that no saved tensor has asked for yet, and the sources of their inputs."""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .plain import Place
from .saved import Autocast, Data, Recipe


class Keeper(Protocol):
    """What an offer asks of a registry (``registry.py``)."""

    def is_exposed(self, t: Tensor) -> bool: ...

    def keep(self, t: Tensor) -> Data: ...


class Held:
    """An input that is kept only for an offer.

    It is a copy of a small tensor, or a large result of a call (``Registry.is_computed``) that no saved tensor keeps.
    """

    __slots__ = ("_kept", "extra", "tensor", "version")
    steps: int = 0

    def __init__(self, t: Tensor, extra: int) -> None:
        self.tensor, self.version, self.extra = t, t._version, extra
        self._kept: Callable[[], Data | None] = lambda: None

    def source(self, registry: Keeper) -> Data | None:
        if self.tensor._version != self.version or registry.is_exposed(self.tensor):
            return None
        kept = self._kept()
        if kept is None:
            kept = registry.keep(self.tensor)
            self._kept = weakref.ref(kept)
        return kept


class Linked:
    """An input that the graph keeps or rebuilds for another reason.  It is held weakly."""

    __slots__ = ("_source", "steps")
    extra: int = 0

    def __init__(self, source: Data | Recipe) -> None:
        self._source = weakref.ref(source)
        self.steps = source.steps

    def source(self, registry: Keeper) -> Data | Recipe | None:
        source = self._source()
        return None if isinstance(source, Data) and (source.changed() or source.exposed) else source


class Offer:
    """A recipe that no saved tensor has asked for yet.

    steps: the calls that rebuild the tensor, with those that rebuild its inputs.
    extra: the bytes that are kept only for this offer.
    """

    _recipe: Callable[[], Recipe | None] = staticmethod(lambda: None)
    steps: int
    extra: int

    def __init__(
        self,
        at: Place,
        version: int,
        device: torch.device,
        rebuild: Callable[..., Tensor],
        overwrite: Callable[..., Tensor] | None,
        autocast: Autocast,
        inputs: "list[tuple[Input, Place]]",
    ) -> None:
        self.at, self.version, self.rebuild, self.overwrite, self.autocast = at, version, rebuild, overwrite, autocast
        self.device, self.inputs = device, inputs
        self.steps = 1 + sum(source.steps for source, _ in inputs)
        self.extra = sum(source.extra for source, _ in inputs)

    def source(self, registry: Keeper) -> Recipe | None:
        """Returns the recipe, the same object to every caller.

        The result is None if an input is gone or has changed.
        """
        recipe = self._recipe()
        if recipe is not None:
            return recipe
        inputs: list[tuple[Data | Recipe, Place]] = []
        for link, at in self.inputs:
            source = link.source(registry)
            if source is None:
                return None
            inputs.append((source, at))
        recipe = Recipe(self.at, self.device, self.rebuild, self.overwrite, self.autocast, inputs)
        self._recipe = weakref.ref(recipe)
        return recipe


Input = Held | Linked | Offer
