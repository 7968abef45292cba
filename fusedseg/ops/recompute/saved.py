"""What a graph holds in place of a saved tensor: ``Kept`` data, or a ``Handle`` of a ``Recipe``; and how it comes back.

A recipe is rebuilt when backward asks for it.  The result is held a little longer where the same graph asks for it
again soon: by the order in which handles were made, which backward walks down.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

# a rebuilt tensor is held for a handle that was made at most so many handles before the one at work
NEAR = 8

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def recomputing() -> bool:
    """Whether a backward pass runs: a forward inside of it is the second one of ``torch.utils.checkpoint``, and this
    batch has moved the running statistics already.

    Under ``torch.compile`` the answer is False: the compiler decides there what is computed twice.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Place(NamedTuple):
    """Where in its storage a tensor lies."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> "Place":
        return cls(t.size(), t.stride(), int(t.storage_offset()), t.dtype)

    def layout(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
        """All but the offset."""
        return self.size, self.stride, self.dtype

    def end(self) -> int:
        return self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1

    def _dense(self) -> bool:
        """Every element from the first to the last, once each."""
        expected = 1
        for step, n in sorted(zip(self.stride, self.size, strict=True)):
            if n != 1:
                if step != expected:
                    return False
                expected *= n
        return True

    def holds(self, other: "Place") -> bool:
        """Whether a tensor here has all elements of one there."""
        if self == other:
            return True
        if self.dtype != other.dtype or 0 in self.size or 0 in other.size:
            return False
        return self.offset <= other.offset and other.end() <= self.end() and self._dense()


NOWHERE = Place(torch.Size(), (), 0, torch.float32)


def seen_as(t: Tensor, have: Place, want: Place) -> Tensor:
    """``t``, which stands for a tensor at ``have``, as the one at ``want``, which ``have`` holds."""
    if have == want:
        return t
    if t.stride() != have.stride:
        # hooks around the scope have laid it out anew
        t = torch.empty_strided(have.size, have.stride, dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided(want.size, want.stride, t.storage_offset() + want.offset - have.offset)


class Kept:
    """Data in the graph: the tensor, or what the hooks around the scope (``outer``) have made of it.

    in_recipe: recipes read it.
    in_graph: a saved tensor of the graph reads it; False for data that is kept for recipes alone.
    copied: it no longer shares the memory that it was saved from.
    exposed: something may write to its memory without raising a version, so that it can be no recipe's source.
    """

    __slots__ = (
        "__weakref__", "at", "copied", "exposed", "held", "in_graph", "in_recipe", "outer", "packed", "recipes_copy",
        "version", "version_packed",
    )  # fmt: skip

    def __init__(self, t: Tensor, outer: Hooks | None, at: Place = NOWHERE) -> None:
        self.at, self.outer, self.in_recipe, self.copied = at, outer, False, False
        self.in_graph, self.exposed = True, False
        self.held: Tensor | None = None
        self.recipes_copy: Kept | None = None
        self._take(t)

    def _take(self, t: Tensor) -> None:
        # detached: an output that is packed with its own graph would keep itself alive
        t = t.detach()
        # an inference tensor has no version, and cannot be modified where autograd would notice
        self.version = 0 if t.is_inference() else t._version
        self.packed = t if self.outer is None else self.outer[0](t)
        self.version_packed = self.packed._version if isinstance(self.packed, Tensor) else 0

    def changed(self) -> bool:
        if self.outer is not None or self.packed.is_inference():
            # what other hooks hold is theirs to watch
            return False
        return self.packed._version != self.version

    def _copy(self, storage: torch.UntypedStorage) -> Tensor:
        at = self.at
        # every element once, though the tensor may show some of them twice
        span = at.end() - at.offset if 0 not in at.size else 0
        memory = torch.empty(0, dtype=at.dtype, device=storage.device)
        with torch.no_grad():
            copy = memory.set_(storage, at.offset, (span,), (1,)).clone()
            return copy.as_strided(at.size, at.stride, 0)

    def copy_before_change(self, storage: torch.UntypedStorage) -> None:
        """Its memory, ``storage``, is about to be written to, and all who read it want the values of before."""
        self._take(self._copy(storage))
        self.copied = True

    def copy_for_recipes(self, storage: torch.UntypedStorage) -> None:
        """Its memory, ``storage``, may be written to, and only recipes want the values of before."""
        if self.recipes_copy is None:
            self.recipes_copy = Kept(self._copy(storage), self.outer, self.at)

    def load_for_recipe(self) -> Tensor:
        if self.recipes_copy is not None:
            return self.recipes_copy.load()
        packed = self.packed
        if self.outer is not None and isinstance(packed, Tensor) and packed._version != self.version_packed:
            # The hooks around the scope have not copied the tensor.
            raise self._modified(packed)
        return self.load()

    def _modified(self, t: Tensor) -> RuntimeError:
        return RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{t.dtype} {list(t.shape)} is at version {t._version}; expected version {self.version} instead.  It was "
            "saved under fusedseg.recompute(), where a tensor that others are rebuilt from may be modified inside the "
            "scope only"
        )

    def load(self) -> Tensor:
        if self.changed():
            raise self._modified(self.packed)
        if self.outer is None:
            return self.packed
        if self.held is None:
            t = self.outer[1](self.packed)
            # some hooks give a tensor back once in a backward, and others copy it from far
            self.held = t if self.in_recipe and _hold(self) else None
            return t
        return self.held

    def near(self, order: int) -> bool:
        """Held, by the end of a backward at the latest, until the graph lets it go."""
        return True


@functools.cache
def _has_autocast(kind: str) -> bool:
    """Whether a type of device can autocast: meta tensors cannot, and PyTorch raises if it is asked about them."""
    return torch.amp.is_autocast_available(kind)


class Autocast(NamedTuple):
    """The autocast state of a device type: casts are part of what a function computes."""

    enabled: bool
    dtype: torch.dtype | None

    @classmethod
    def now(cls, kind: str) -> "Autocast":
        if not _has_autocast(kind) or not torch.is_autocast_enabled(kind):
            return OFF
        return cls(True, torch.get_autocast_dtype(kind))

    def again(self, kind: str) -> Any:
        if not _has_autocast(kind) or not (self.enabled or torch.is_autocast_enabled(kind)):
            return nullcontext()
        # without the cache, which belongs to a region of the caller's
        return torch.autocast(kind, self.dtype, self.enabled, cache_enabled=False)


OFF = Autocast(False, None)


class Recipe:
    """How a tensor is rebuilt from kept data and other recipes.

    Args:
        at: where the tensor lies, which the result is laid out as.
        device: of the tensor.
        rebuild: called with the inputs; returns the tensor, in memory of its own.
        overwrite: the same, written over the first input; None where there is no such function.
        autocast: the state it was computed in.
        inputs: each a source, and where in it the input lies.

    ``data`` is the tensor itself, where it came to be kept after the recipe was made.  Saved tensors then read that;
    other recipes still rebuild the values of the call.
    """

    __slots__ = ("__weakref__", "at", "autocast", "data", "device", "held", "inputs", "orders", "overwrite", "rebuild")

    def __init__(
        self,
        at: Place,
        device: torch.device,
        rebuild: Callable[..., Tensor],
        overwrite: Callable[..., Tensor] | None,
        autocast: Autocast,
        inputs: Sequence[tuple["Kept | Recipe", Place]],
    ) -> None:
        self.at, self.device, self.inputs = at, device, inputs
        self.rebuild, self.overwrite, self.autocast = rebuild, overwrite, autocast
        self.data: Kept | None = None
        # of its handles
        self.orders: list[int] = []
        # the value and its version
        self.held: tuple[Tensor, int] | None = None

    def near(self, order: int) -> bool:
        return any(order - NEAR <= own < order for own in self.orders)

    def load(self, order: int) -> tuple[Tensor, bool]:
        """The tensor, and whether it is the caller's, to write over."""
        # the version: somebody's backward may write over what it unpacks
        if self.held is not None and self.held[0]._version == self.held[1]:
            value = self.held[0]
        else:
            value = self._rebuilt(order)
        if self.near(order) and (self.held is not None or _hold(self)):
            self.held = value, value._version
            return value, False
        self.held = None
        return value, True

    def _rebuilt(self, order: int) -> Tensor:
        inputs, first_is_ours = [], False
        for i, (source, at) in enumerate(self.inputs):
            t, ours = (source.load_for_recipe(), False) if isinstance(source, Kept) else source.load(order)
            inputs.append(seen_as(t, source.at, at))
            first_is_ours |= ours and i == 0
        with torch._C.DisableTorchFunction(), torch.no_grad(), self.autocast.again(inputs[0].device.type):
            out = (self.overwrite if self.overwrite and first_is_ours else self.rebuild)(*inputs)
            at = self.at
            if (out.size(), out.dtype, out.device) != (at.size, at.dtype, self.device):
                raise RuntimeError(
                    f"fusedseg.recompute: a saved {at.dtype} tensor of shape {tuple(at.size)} on {self.device} was "
                    f"rebuilt as {out.dtype} {tuple(out.size())} on {out.device}; please report this as a bug of "
                    "fusedseg, and run the model outside of the scope until it is mended"
                )
            if out.stride() == at.stride:
                return out
            return torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=out.device).copy_(out)


class Handle:
    """One saved tensor that will be rebuilt: the recipe, and where in its result the tensor lies."""

    __slots__ = ("at", "order", "recipe")

    def __init__(self, recipe: Recipe, at: Place) -> None:
        self.recipe, self.at, self.order = recipe, at, next(_orders)
        recipe.orders.append(self.order)

    def load(self) -> Tensor:
        _let_go(_thread.held, self.order)
        data = self.recipe.data
        value = self.recipe.load(self.order)[0] if data is None else data.load()
        return seen_as(value, self.recipe.at, self.at)


class _Thread(threading.local):
    """Whose values are held for the backward that runs in this thread."""

    def __init__(self) -> None:
        self.held: list[weakref.ref[Kept | Recipe]] = []


_thread = _Thread()
_orders = itertools.count()


def _hold(source: Kept | Recipe) -> bool:
    """Whether its value will be let go: when the backward that runs in this thread moves on, or ends."""
    if torch._C._current_graph_task_id() == -1:
        return False
    held = _thread.held
    if not held:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _let_go(held))
    held.append(weakref.ref(source))
    return True


def _let_go(held: list["weakref.ref[Kept | Recipe]"], order: int | None = None) -> None:
    """Of what no handle at ``order`` or soon after asks for; without one, of all."""
    stay = []
    for ref in held:
        source = ref()
        if source is None:
            continue
        if order is not None and source.near(order + 1):
            stay.append(ref)
        else:
            source.held = None
    held[:] = stay


def unpack(packed: Kept | Handle) -> Tensor:
    """The hook of backward.  Hooks around the scope may run anything in it, in the state they find: checkpoints do."""
    return packed.load()
