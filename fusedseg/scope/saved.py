"""The objects that the graph holds in place of a saved tensor: ``Data``, or a ``Handle`` of a ``Recipe``.

A tensor that no recipe reads, such as a parameter, is held with its version only (``as_it_is``).

A recipe is rebuilt when backward asks for the tensor.  The result is held a little longer if the same graph will ask
for it again soon.  This is known from the order in which handles were made, because backward visits them in reverse.
"""

import functools
import itertools
import threading
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch
from .plain import NOWHERE, Place, is_trained_leaf, seen_as

# Handles are numbered in the order in which forward makes them.  When backward loads a handle, the rebuilt tensor is
# held for further handles of the same recipe if their numbers are smaller by at most this.
NEAR = 8

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def _version_of(stored: object) -> int:
    """The version of a tensor; 0 for an inference tensor, which has none, and for other objects."""
    return stored._version if isinstance(stored, Tensor) and not stored.is_inference() else 0


def modified(t: Tensor, version: int) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{t.dtype} {list(t.shape)} is at version {t._version}; expected version {version} instead.  It was "
        "saved under fusedseg.recompute(), where a tensor that others are rebuilt from may be modified inside the "
        "scope only"
    )


AsItIs = tuple[Tensor, int]  # a tensor, and its version when it was saved; -1 for an inference tensor, which has none


def as_it_is(t: Tensor, outer: Hooks | None) -> "AsItIs | Data":
    """The object to hold for a tensor that no recipe reads."""
    if outer is not None:
        return Data(t, outer)
    # An output that is saved with its own graph would keep itself alive, so the graph is left out, as PyTorch does.
    return t.detach() if t.requires_grad and not is_trained_leaf(t) else t, -1 if t.is_inference() else t._version


class Data:
    """A saved tensor that is kept: the tensor itself, or the result of the hooks around the scope (``outer``).

    in_recipe: recipes read it.
    copied: it no longer shares the memory that it was saved from.
    exposed: something may write to its memory without raising a version, so that it can be no recipe's source.
    held: the tensor that the hooks around the scope have returned, while it is needed again soon.
    steps, needs: no call rebuilds it, and no rebuilt tensor lives meanwhile.
    """

    in_recipe = copied = exposed = False
    held: Tensor | None = None
    steps, needs = 0, 0

    def __init__(self, t: Tensor, outer: Hooks | None, at: Place = NOWHERE) -> None:
        # The memory of a tensor without values says that it is on the device "meta".
        self.at, self.outer, self.device = at, outer, t.device
        # It is detached, because an output that is saved together with its own graph would keep itself alive.
        self._take(t.detach())

    def _take(self, t: Tensor) -> None:
        if self.outer is None:
            self.stored, self.version = t, t._version
            return
        self.version = _version_of(t)
        self.stored = self.outer[0](t)
        self.version_stored = _version_of(self.stored)

    def changed(self) -> bool:
        # If outer hooks hold the tensor, they must detect changes to it.
        return self.outer is None and self.stored._version != self.version

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        at = self.at
        # The copy has every element once, although the tensor may show some elements twice.
        span = at.end() - at.offset if 0 not in at.size else 0
        memory = torch.empty(0, dtype=at.dtype, device=self.device)
        with torch.no_grad():
            copy = memory.set_(storage, at.offset, (span,), (1,)).clone()
            return copy.as_strided(at.size, at.stride, 0)

    def copy_before_change(self, storage: torch.UntypedStorage) -> None:
        """Copies the values before something writes to ``storage``, the tensor's memory."""
        self._take(self._copy(storage))
        self.copied = True

    def load_for_recipe(self) -> Tensor:
        if self.outer is not None and _version_of(self.stored) != self.version_stored:
            # The hooks around the scope have not copied the tensor.
            raise modified(self.stored, self.version)
        return self.load()

    def load(self) -> Tensor:
        if self.outer is None:
            if self.stored._version != self.version:
                raise modified(self.stored, self.version)
            return self.stored
        if self.held is None:
            t = self.outer[1](self.stored)
            # Some hooks return a tensor only once in a backward pass, and other hooks copy it from another device.
            self.held = t if self.in_recipe and _hold(self) else None
            return t
        return self.held

    def near(self, order: int) -> bool:
        return True  # What hooks have returned is held until the backward pass ends.


@functools.cache
def _has_autocast(kind: str) -> bool:
    """Whether a type of device can autocast.  Meta tensors cannot, and PyTorch raises an error if asked about them."""
    return torch.amp.is_autocast_available(kind)


class Autocast(NamedTuple):
    """The autocast state of a device type.  A recipe holds it, because the values of a function depend on it."""

    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def of(cls, t: Tensor) -> "Autocast":
        """The present state for the device of ``t``."""
        if not _torch.is_any_autocast_enabled():
            return OFF
        kind = t.device.type
        enabled = _has_autocast(kind) and torch.is_autocast_enabled(kind)
        return cls(True, torch.get_autocast_dtype(kind)) if enabled else OFF

    def again(self, kind: str) -> Any:
        """A context in which a call runs under this state; None if it is the present state."""
        if not _has_autocast(kind) or not (self.enabled or torch.is_autocast_enabled(kind)):
            return None
        # The cache is not used, because it belongs to the caller's autocast region.
        return torch.autocast(kind, self.dtype, self.enabled, cache_enabled=False)


OFF = Autocast(False, None)


def turns(needs: Sequence[int], overwrites: bool) -> tuple[Sequence[int], int]:
    """The order in which to rebuild the inputs of a recipe, and the most tensors that live at once then.

    ``needs`` has the tensors that live at once while each input is rebuilt; 0 for data.  The input that needs most is
    the first, because inputs that are rebuilt before another one lie beside it.

    Source: Sethi and Ullman, "The Generation of Optimal Code for Arithmetic Expressions", 1970.
    """
    count = len(needs) - needs.count(0)
    # The sort keeps the order of equal inputs.
    order = sorted(range(len(needs)), key=needs.__getitem__, reverse=True)
    most = count + (not (overwrites and count))
    before = 0
    for i in order:
        most = max(most, needs[i] + before)
        before += needs[i] > 0
    return order, most


class InParts:
    """The base class of a function of a recipe that can write its result part by part."""

    __slots__ = ()

    def in_parts(self, recipe: "Recipe", order: int) -> Tensor:
        """The result of ``recipe``, with the bits of the call."""
        raise NotImplementedError


# A smaller result is rebuilt in one call, which takes less time.
LEAST_BYTES = 2**20


def is_in_parts(rebuild: object, at: Place) -> bool:
    """Whether the result of a recipe with this place is rebuilt part by part."""
    return isinstance(rebuild, InParts) and at.nbytes >= LEAST_BYTES


class Recipe:
    """The way to rebuild a tensor from kept data and other recipes.

    Args:
        at: the tensor's place in its storage.  The result gets the same size, strides and dtype.
        device: the tensor's device.
        rebuild: a function that is called with the inputs and returns the tensor in memory of its own.
        overwrite: a function that computes the same over its first input; None if there is no such function.
        autocast: the autocast state of the call.
        inputs: for each input, its source and its place in that source.
    """

    held: tuple[Tensor, int] | None = None  # the rebuilt value and its version
    needs: int
    steps = 1  # its calls

    def __init__(
        self,
        at: Place,
        device: torch.device,
        rebuild: Any,
        overwrite: Callable[..., Tensor] | None,
        autocast: Autocast,
        inputs: Sequence[tuple["Data | Recipe", Place]],
    ) -> None:
        self.at, self.device, self.inputs = at, device, inputs
        self.rebuild, self.overwrite, self.autocast = rebuild, overwrite, autocast
        for source, _ in inputs:
            if isinstance(source, Data):
                # Each rebuild reads it, and hooks around the scope, such as a checkpoint's, may return it only once.
                source.in_recipe = True
        # The order in which inputs are rebuilt, and the tensors that live at once then.
        self.turns, self.needs = turns([source.needs for source, _ in inputs], overwrite is not None)
        self.orders: list[int] = []  # the numbers of the recipe's handles, in ascending order

    def near(self, order: int) -> bool:
        i = bisect_left(self.orders, order)
        return i > 0 and self.orders[i - 1] >= order - NEAR

    def load(self, order: int) -> tuple[Tensor, bool]:
        """Returns the tensor, and whether the caller may write over it."""
        # The version is compared because a backward function may write over a tensor that it has got.
        if self.held is not None and self.held[0]._version == self.held[1]:
            value = self.held[0]
        else:
            value = self._rebuilt(order)
        if self.near(order) and (self.held is not None or _hold(self)):
            self.held = value, value._version
            return value, False
        self.held = None
        return value, True

    def _input(self, i: int, order: int) -> tuple[Tensor, bool]:
        source, at = self.inputs[i]
        if not isinstance(source, Recipe):
            return seen_as(source.load_for_recipe(), source.at, at), False
        t, ours = source.load(order)
        return seen_as(t, source.at, at), ours

    def _rebuilt(self, order: int) -> Tensor:
        if is_in_parts(self.rebuild, self.at):
            return self.rebuild.in_parts(self, order)
        inputs: list[Any] = [*self.inputs]
        ours = [False] * len(inputs)
        for i in self.turns:
            inputs[i], ours[i] = self._input(i, order)
        call = self.overwrite if self.overwrite is not None and ours[0] else self.rebuild
        differs = self.autocast.enabled or _torch.is_any_autocast_enabled()
        autocast = self.autocast.again(inputs[0].device.type) if differs else None
        with _torch.DisableTorchFunction():
            if autocast is None and not torch.is_grad_enabled():
                out = call(*inputs)
            else:
                with torch.no_grad(), autocast or nullcontext():
                    out = call(*inputs)
            at = self.at
            if out.size() != at.size or out.dtype != at.dtype or out.device != self.device:
                raise RuntimeError(
                    f"fusedseg.recompute: a saved {at.dtype} tensor of shape {tuple(at.size)} on {self.device} was "
                    f"rebuilt as {out.dtype} {tuple(out.size())} on {out.device}; please report this as a bug of "
                    "fusedseg, and run the model outside of the scope until it is mended"
                )
            if out.stride() == at.stride:
                return out
            return torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=out.device).copy_(out)


class Handle:
    """One saved tensor that will be rebuilt: its recipe, and its place in the result of the recipe."""

    __slots__ = ("at", "order", "recipe")

    def __init__(self, recipe: Recipe, at: Place) -> None:
        self.recipe, self.at = recipe, at
        self.order = next(_orders)
        recipe.orders.append(self.order)

    def load(self) -> Tensor:
        _let_go(_thread.held, self.order)
        return seen_as(self.recipe.load(self.order)[0], self.recipe.at, self.at)


class _Thread(threading.local):
    """The recipes and the kept tensors whose values are held for the backward pass that runs in this thread."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Data | Recipe]] = []
        # The backward pass at whose end the values are dropped.
        self.task = -1


_thread = _Thread()
_orders = itertools.count()


def _hold(source: Data | Recipe) -> bool:
    """Registers ``source`` as holding a value, and returns whether that value will be dropped again.

    It is dropped when the backward pass of this thread no longer needs it, or ends.  Outside a backward pass nothing
    would drop it, and the result is False.
    """
    task = _torch.current_graph_task_id()
    if task == -1:
        return False
    held = _thread.held
    if task != _thread.task:
        _torch.queue_callback(lambda: _let_go(held))
        _thread.task = task
    held.append(weakref.ref(source))
    return True


def _let_go(held: list["weakref.ref[Data | Recipe]"], order: int | None = None) -> None:
    """Drops held values that no saved tensor near ``order`` needs.  ``order=None`` drops all of them."""
    stay = []
    for ref in held:
        source = ref()
        if source is None or source.held is None:
            continue
        if order is not None and source.near(order + 1):
            stay.append(ref)
        else:
            source.held = None
    held[:] = stay


def unpack(saved: AsItIs | Data | Handle) -> Tensor:
    """The hook that autograd calls in backward.

    It changes no global state, because hooks around the scope may run any code in it; checkpoints do.
    """
    if type(saved) is not tuple:
        return saved.load()  # type: ignore[union-attr]
    t, version = saved
    if version >= 0 and t._version != version:
        raise modified(t, version)
    return t
