"""Recipes that no saved tensor has asked for yet, and the sources of their inputs."""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from .parts import Chain
from .plain import Place
from .saved import Autocast, Data, Recipe, is_in_parts, latest


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
            kept.in_graph = False
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


class Reader:
    """A backward that can use the output of its own op, if that output was rebuilt for a saved tensor just before.

    The rebuilt output is held until this backward runs, by the rule for handles (``saved.py``).  A reader never causes
    a rebuild itself.
    """

    __slots__ = ("_again", "_recipe", "order")

    def __init__(self) -> None:
        # This number lies between the numbers of two handles, so that it does not change their distances.
        self.order = latest() + 0.5
        self._recipe: Recipe | None = None
        self._again: weakref.ref[Recipe] | None = None

    def reads(self, recipe: Recipe) -> None:
        # The graph frees the handles of the recipe before the op's own backward runs.
        self._recipe, self._again = recipe, weakref.ref(recipe)
        recipe.own = self.order

    def take(self) -> Tensor | None:
        """Returns the rebuilt output and no longer holds it for the reader; None if it is not held.

        Other code may hold the same tensor.
        """
        recipe = self._again() if self._recipe is None and self._again is not None else self._recipe
        self._recipe = None
        if recipe is None or recipe.held is None:
            return None
        value, version = recipe.held
        if not recipe.near(self.order):
            recipe.held = None
        return value if value._version == version else None


class Offer:
    """A recipe that no saved tensor has asked for yet."""

    _recipe: "weakref.ref[Recipe] | None" = None
    reader: Reader | None = None
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
        calls: int = 1,
    ) -> None:
        self.at, self.version, self.rebuild, self.overwrite, self.autocast = at, version, rebuild, overwrite, autocast
        # ``calls`` counts the calls that ``rebuild`` makes.  ``steps`` adds those that rebuild the inputs.
        self.device, self.inputs, self.calls = device, inputs, calls
        steps, extra = calls, 0
        for source, _ in inputs:
            steps += source.steps
            extra += source.extra
        # ``extra`` counts the bytes that are kept only for this offer.
        self.steps, self.extra = steps, extra

    def is_alone(self, at: Place, autocast: Autocast) -> bool:
        """Whether a call that overwrites the tensor at ``at`` may become one recipe with this one."""
        free = self.reader is None and (self._recipe is None or self._recipe() is None)
        same = (self.at is at or self.at == at) and self.autocast == autocast
        return free and same and not is_in_parts(self.rebuild, at)

    def followed(self, then: Callable[..., Tensor], others: "list[tuple[Input, Place]]") -> "Offer":
        """The offer of what a call writes over the tensor: ``then``, with the tensor and ``others``.

        One recipe makes both calls.
        """
        at, first, inputs = self.at, self.overwrite, self.inputs
        rebuild, overwrite = Chain(self.rebuild, len(inputs), at, then), first and Chain(first, len(inputs), at, then)
        inputs = inputs + others if others else inputs
        return Offer(at, self.version + 1, self.device, rebuild, overwrite, self.autocast, inputs, self.calls + 1)

    def recipe(self) -> Recipe | None:
        """Returns the recipe if a saved tensor has asked for it and the recipe still lives, otherwise None."""
        return None if self._recipe is None else self._recipe()

    def source(self, registry: Keeper) -> Recipe | None:
        """Returns the recipe, the same object to every caller.

        The result is None if an input is gone or has changed.
        """
        made = self._recipe
        return (None if made is None else made()) or self._made(registry)

    def _made(self, registry: Keeper) -> Recipe | None:
        inputs: list[tuple[Data | Recipe, Place]] = []
        for link, at in self.inputs:
            source = link.source(registry)
            if source is None:
                return None
            inputs.append((source, at))
        recipe = Recipe(self.at, self.device, self.rebuild, self.overwrite, self.autocast, inputs)
        self._recipe = weakref.ref(recipe)
        if self.reader is not None:
            self.reader.reads(recipe)
        return recipe


Input = Held | Linked | Offer
