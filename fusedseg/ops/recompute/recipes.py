"""How an op offers a recipe for its output, so that the output is rebuilt in backward and need not be kept.

While a scope is active (``fusedseg.recompute()``, see ``scope.py``), saved tensors pass through ``Registry.pack``.
An op that can rebuild its output cheaply offers a recipe right after it ran:

    z = Function.apply(x, mean, rstd, weight, bias)           # saves x
    recipes.offer(z, rebuild, x, mean, rstd, weight, bias)    # rebuild(x, mean, rstd, weight, bias) gives z again

If an op saves ``z``, or a view of it, afterwards, the recipe is saved in place of the data.

The contract:

* ``rebuild`` gets detached tensors with the inputs' values, shapes, strides and dtypes.  It runs without grad mode and
  under the autocast state of the call.  It returns the values of ``output`` in memory of its own, and changes no input.
  It must not hold a tensor of the size of an activation, because its closure is kept as long as the output lives.
* ``overwrite`` is optional.  It computes the same over the memory of its first input, and returns that input.
* Without an active scope, without grad mode, or while ``torch.compile`` traces, ``offer`` returns at once and does
  nothing.
* An offer keeps nothing alive that is not kept anyway, with two exceptions.  Small inputs (under a sixteenth of the
  output, such as one value per channel) are copied, so that an optimizer may change them before backward.  Large
  inputs that no saved tensor keeps are held as long as the output lives, if all of them together are smaller than the
  output, and if they are results of calls and not the caller's own memory.  Otherwise the recipe is not recorded.  It
  is not recorded either if an input is rebuilt itself and has at least ``registry.LARGER`` times the bytes of the
  output, because this input would lie beside the output at the peak.  So save your input first, then offer.
* An offer belongs to the output's memory, its place in the memory, its dtype and its version.  After the output was
  modified in place, or its memory was given to another library, the offer is no longer found.  An op that overwrites
  its input and saves the result while it runs is called by ``overwritten``.
* If it is not certain that a rebuild gives the same bits, no recipe is recorded.  ``docs/design.md`` defines "certain".
* A recipe is not recorded if rebuilding its inputs and its output would take more than ``registry.MAX_STEPS`` calls.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ... import _torch
from .offers import Offer, Reader
from .plain import Place
from .registry import Registry
from .saved import Data, Handle

# The classes of registries, by which the hooks of a scope are recognised; ``scope.py`` adds one.
REGISTRIES: set[type] = {Registry}
# The registries of all open scopes with ``bits``, in any thread.
PACKING: list[Registry] = []
P = ParamSpec("P")
R = TypeVar("R")
_transforms = _torch.peek_interpreter_stack
_hooks = _torch.top_saved_tensors_default_hooks


def innermost() -> Registry | None:
    """The registry whose hooks see the tensors that this thread saves now.

    The result is None if there is no scope, or if other hooks lie inside it.  It is also None inside a transform of
    ``torch.func``, because tensors have no memory there.
    """
    if _transforms() is not None:
        return None
    hooks = _hooks(True)
    registry = getattr(hooks[0], "__self__", None) if hooks else None
    return registry if type(registry) in REGISTRIES else None


def active() -> Registry | None:
    """The innermost registry, if autograd saves tensors now; None otherwise, and under ``torch.compile``."""
    return None if not torch.is_grad_enabled() or torch.compiler.is_compiling() else innermost()


def unwatched(forward: Callable[P, R]) -> Callable[P, R]:
    """Hides the calls inside ``forward``, a function of this package, from the scope.

    Under a function mode, even reading the shape of a tensor costs a Python call.
    """

    @functools.wraps(forward)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with _torch.DisableTorchFunction():
            return forward(*args, **kwargs)

    return run


class Watching(TorchFunctionMode):
    """The base class of the function mode of a scope (``watch.py``)."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self.registry = registry


def watching() -> list[Registry]:
    """The registries of the scopes that watch the calls of this thread."""
    modes = _torch.get_current_function_mode_stack() if _torch.len_torch_function_stack() else ()
    return [mode.registry for mode in modes if isinstance(mode, Watching)]


def changing(x: Tensor) -> None:
    """Tells the scopes that an unwatched op is about to write to ``x``."""
    for registry in watching():
        with _torch.DisableTorchFunction():
            registry.before_change(x)


def packing() -> Any:
    """The active registry if its scope has ``bits``, otherwise None."""
    registry = active()
    return registry if registry is not None and registry.rounds else None


def is_source(x: Tensor) -> bool:
    """Whether recipes read the memory of ``x``."""
    with _torch.DisableTorchFunction():
        return any(registry.is_source(x) for registry in watching())


def offer(
    output: Tensor,
    rebuild: Callable[..., Tensor],
    *inputs: Tensor,
    overwrite: Callable[..., Tensor] | None = None,
    reader: Reader | None = None,
    registry: Registry | None = None,
) -> None:
    """Offers a recipe: ``output`` was computed as ``rebuild(*inputs)``.  The contract is at the top of this file.

    ``reader``: the backward of the op that offers, if that can use a rebuilt ``output``.  ``registry``: the active
    registry, if the caller knows it already.
    """
    registry = registry or active()
    if registry is not None:
        with _torch.DisableTorchFunction():
            offer = registry.offer(output, rebuild, inputs, overwrite)
            if offer is not None:
                offer.reader = reader


def overwritten(
    registry: Registry,
    func: Callable[..., R],
    args: Any,
    kwargs: Any,
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
    claim = registry.claim
    registry.claim = None if before is None else functools.partial(_copy_of, registry, before, tensors)
    try:
        return func(*args, **kwargs)
    finally:
        registry.claim = claim
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


class claimed:
    """Surrounds one call that saves tensors which the call itself makes.

    ``claim(t)`` returns what to save for such a tensor ``t``, or None if it does not know ``t``.
    """

    __slots__ = ("_before", "_claim", "_registry")

    def __init__(self, registry: Registry, claim: Callable[[Tensor], Data | Handle | None]) -> None:
        self._registry, self._claim = registry, claim

    def __enter__(self) -> None:
        self._before, self._registry.claim = self._registry.claim, self._claim

    def __exit__(self, *exception: object) -> None:
        self._registry.claim = self._before
