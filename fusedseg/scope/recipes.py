"""How the rules of the scope record recipes; ``ops/observer.py`` has the contract with the ops.

While a scope is active (``fusedseg.recompute()``, see ``scope.py``), saved tensors pass through ``Registry.pack``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from .. import _torch
from ..ops import observer
from .offers import Offer
from .plain import Place
from .registry import Registry
from .saved import Data, Handle

R = TypeVar("R")


def active() -> Registry | None:
    """The registry of the scope that sees the tensors that autograd saves now, as ``observer.active``."""
    found = observer.active()
    return found if isinstance(found, Registry) else None


@contextmanager
def claimed(registry: Registry, claim: Callable[[Tensor], Data | Handle | None] | None) -> Iterator[None]:
    """Surrounds one call that saves tensors which the call itself makes.

    ``claim(t)`` returns what to save for such a tensor ``t``, or None if it does not know ``t``.
    """
    before, registry.claim = registry.claim, claim
    try:
        yield
    finally:
        registry.claim = before


def overwritten(
    registry: Registry,
    func: Callable[..., R],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    tensors: Sequence[Tensor],
    rebuild: Callable[..., Tensor],
    overwrite: Callable[..., Tensor] | None = None,
) -> R:
    """Calls a function that overwrites the first one of ``tensors`` once, by ``rebuild(*tensors)``.

    Such a function may save its result while it runs, or a copy of the old values; both get recipes.  ``registry`` is
    the active registry.
    """
    x = tensors[0]
    with _torch.DisableTorchFunction():
        before, offered = registry.overwriting(x, rebuild, tensors[1:], overwrite)
    try:
        with claimed(registry, None if before is None else functools.partial(_copy_of, registry, before, tensors)):
            return func(*args, **kwargs)
    finally:
        if offered is not None and x._version != offered.version:
            registry.withdraw(x, offered)


def _copy_of(registry: Registry, before: Offer, tensors: Sequence[Tensor], t: Tensor) -> Handle | None:
    """What to save for ``t`` if it is a copy of the first one of ``tensors``, which has the offer ``before``."""
    x = tensors[0]
    if t is x:
        return None
    memory = t.untyped_storage()
    if any(own.untyped_storage() is memory for own in tensors):
        return None
    at = Place.of(x)
    recipe = before.source(registry) if Place.of(t).layout() == at.layout() else None
    return None if recipe is None else Handle(recipe, at)
