"""The function mode of the scope: it sees each call of a function, and the tensors that the call writes to."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from ..ops.observer import Watching, innermost
from . import compiled
from .calls import Args, Kwargs
from .formats import KEEPING, that_keeps
from .plain import plain
from .registry import Registry
from .stock import RULES

Function = Callable[..., Any]

# The methods that Python calls for |= and similar operators.  Other in-place operators call methods such as add_.
INPLACE_OPERATORS = {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


@functools.cache
def _writes(func: Function) -> bool:
    """Whether a function changes its first argument, judged by its name: relu_, aten.relu_.default, __setitem__."""
    name = getattr(func, "__name__", "").split(".")[0]
    return name in INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _written(func: Function, args: tuple[object, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    written: list[Any] = [kwargs["out"]] if kwargs.get("out") is not None else []
    if _writes(func) or kwargs.get("inplace"):
        written += args[:1] or [kwargs.get("input", kwargs.get("tensor"))]
    flat = [part for tree in written for part in (tree if isinstance(tree, (tuple, list)) else [tree])]
    return [part for part in flat if isinstance(part, Tensor)]


# These functions give access to the memory of a tensor, so that it can be changed without a new version.
EXPOSING = {
    Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_, Tensor.__cuda_array_interface__.__get__,
}  # fmt: skip


def _dispatched() -> bool:
    """Whether a ``TorchDispatchMode`` has made the call.

    Memory trackers access the memory of a tensor to identify it.  They do not write to it.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _made(registry: Registry, out: object, args: tuple[object, ...]) -> None:
    """Notes that a call has allocated ``out``, unless it returned memory of its arguments."""
    if isinstance(out, Tensor) and plain(out) and not out._is_view():
        given = args[0] if args and isinstance(args[0], (tuple, list)) else args
        own = out.untyped_storage()
        if all(not isinstance(t, Tensor) or (plain(t) and t.untyped_storage() is not own) for t in given):
            registry.note_made(out)


class Watch(Watching):
    """The function mode that sees the calls of stock functions."""

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.registry = registry

    @compiled.as_python
    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs, registry = kwargs or {}, self.registry
        if torch.compiler.is_compiling():
            return self._compiled(func, args, kwargs)
        if func in KEEPING and registry.converted:
            func = that_keeps(func, args, kwargs)
        rule = RULES.get(func)
        if rule is not None and "out" not in kwargs and innermost() is registry:
            if torch.is_grad_enabled():
                return rule(registry, func, args, kwargs)
            if not _writes(func) and not kwargs.get("inplace"):
                out = func(*args, **kwargs)
                with _torch.DisableTorchFunction():
                    _made(registry, out, args)
                return out
        with _torch.DisableTorchFunction():
            for t in _written(func, args, kwargs):
                registry.before_change(t)
            if func in EXPOSING and not _dispatched():
                registry.expose(args[0])
        return func(*args, **kwargs)

    def _compiled(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The call while the compiler traces it, and the mode."""
        out = func(*args, **kwargs)
        if compiled.prepare():
            compiled.called()
        return out
