"""The function mode of the scope: it sees each call of a function, and the tensors that the call writes to."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _torch
from ..ops.observer import Watching, changing, watching
from . import compiled, recipes
from .calls import Args, Kwargs, replay
from .formats import KEEPING, that_keeps
from .plain import plain
from .registry import Registry
from .stock import RULES

Function = Callable[..., Any]
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_hooks, _transforms = _torch.top_saved_tensors_default_hooks, _torch.peek_interpreter_stack

# The methods that Python calls for |= and similar operators.  Other in-place operators call methods such as add_.
INPLACE_OPERATORS = {"__setitem__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}


@functools.cache
def _writes(func: Function) -> bool:
    """Whether a function changes its first argument, judged by its name: relu_, aten.relu_.default, __setitem__."""
    name = getattr(func, "__name__", "").split(".")[0]
    return name in INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


@functools.cache
def _schemas(func: Function) -> tuple[tuple[int, str], ...]:
    """The position and name of each argument that a function of ``torch.ops`` changes according to its schemas."""
    if isinstance(func, _torch.OpOverload):
        schemas = [func._schema]
    elif isinstance(func, _torch.OpOverloadPacket):
        schemas = list(func._schemas.values())
    else:
        return ()
    changed = ((i, arg) for schema in schemas for i, arg in enumerate(schema.arguments))
    return tuple({(i, arg.name) for i, arg in changed if arg.alias_info is not None and arg.alias_info.is_write})


def _written(func: Function, args: tuple[object, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes to."""
    written: list[Any] = [kwargs["out"]] if kwargs.get("out") is not None else []
    if _writes(func) or kwargs.get("inplace"):
        written += args[:1] or [kwargs.get("input", kwargs.get("tensor"))]
    for i, name in _schemas(func):
        written.append(args[i] if i < len(args) else kwargs.get(name))
    if func in EMBEDDINGS:
        # With max_norm, these functions scale rows of the weight in place.
        written.append(args[1] if len(args) > 1 else kwargs.get("weight"))
    flat = [part for tree in written for part in (tree if isinstance(tree, (tuple, list)) else [tree])]
    return [part for part in flat if isinstance(part, Tensor)]


EMBEDDINGS = (F.embedding, F.embedding_bag)
# These functions give access to the memory of a tensor, so that it can be changed without a new version.
EXPOSING = {
    Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr,  # type: ignore[attr-defined]
    Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_, Tensor.__cuda_array_interface__.__get__,
}  # fmt: skip
# These functions give the memory another name, and functions that the scope does not see may be called with it.
DETACHING = {torch.detach, Tensor.detach, torch.detach_, Tensor.detach_}
NAMING = EXPOSING | DETACHING


@functools.cache
def _may_change(func: Function) -> bool:
    """Whether a function may change a tensor, or give its memory another name, without ``out`` or ``inplace``."""
    sets = getattr(func, "__name__", "") == "__set__"
    return sets or func in NAMING or func in EMBEDDINGS or _writes(func) or bool(_schemas(func))


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


def _changes(graph: Any) -> bool:
    """Whether a scripted graph calls a function that writes in place."""
    return any(node.kind().endswith("_") or any(map(_changes, node.blocks())) for node in graph.nodes())


@functools.cache
def _watch_scripted() -> None:
    """Makes calls of scripted functions visible to the scope of the calling thread, until the process ends.

    PyTorch does not show these calls to a function mode.  Without a scope, each such call takes one more look at the
    modes of the thread.
    """
    for cls in _torch.script_classes:

        def call(self: Any, *args: object, _run: Function = cls.__call__, **kwargs: object) -> Any:
            for registry in watching():
                if isinstance(registry, Registry):
                    registry.seen = None
            tensors = replay(_run, args, kwargs)[1] if _torch.len_torch_function_stack() else []
            if any(map(recipes.is_source, tensors)) and _changes(self.inlined_graph):
                for t in tensors:
                    changing(t)
            return _run(self, *args, **kwargs)

        cls.__call__ = functools.wraps(cls.__call__)(call)


# In eval mode the forward of these classes takes a fast path, unless a function mode is active.
ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@functools.cache
def _keep_fast_paths() -> None:
    """Hides the mode of a scope from the modules of ``ATTENTION`` where they save nothing, until the process ends.

    The other path gives other last bits.
    """
    for cls in ATTENTION if _torch.pop_mode_temporarily is not None else ():

        def call(self: Any, *args: object, _cls: Any = cls, **kwargs: object) -> Any:
            # ``torch.fx`` replaces ``nn.Module.__call__`` while it traces, so it is looked up in each call.
            run = super(_cls, self).__call__
            if _is_compiling() or self.training or not _torch.len_torch_function_stack():
                return run(*args, **kwargs)
            mode = _torch.get_current_function_mode_stack()[-1]
            if type(mode) is not Watch or (_is_grad_enabled() and _any_requires_grad(self, args, kwargs)):
                return run(*args, **kwargs)
            mode.registry.seen = None
            with _torch.pop_mode_temporarily():
                return run(*args, **kwargs)

        cls.__call__ = call  # type: ignore[method-assign]


def _any_requires_grad(module: nn.Module, args: object, kwargs: object) -> bool:
    with _torch.DisableTorchFunction():
        return any(
            t.requires_grad
            for t in (*module.parameters(), *_torch.tree_leaves((args, kwargs)))
            if isinstance(t, Tensor)
        )


class Watch(Watching):
    """The function mode that sees the calls of stock functions; ``pack`` is the hook of the registry's scope."""

    def __init__(self, registry: Registry, pack: Function) -> None:
        super().__init__(registry)
        self.registry = registry
        self.pack = pack
        _watch_scripted()
        _keep_fast_paths()

    @compiled.as_python
    def __torch_function__(self, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_compiling():
            return self._compiled(func, args, kwargs)
        if func in KEEPING and self.registry.converted:
            func = that_keeps(func, args, kwargs)
        rule = RULES.get(func)
        if rule is None:
            if not kwargs and not _may_change(func):
                return func(*args)
        elif "out" not in kwargs:
            # As ``observer.innermost``, in less time.
            hooks = _hooks(True)
            if hooks is not None and hooks[0] is self.pack and _transforms() is None:
                if _is_grad_enabled():
                    return rule(self.registry, func, args, kwargs)
                if not _writes(func) and not kwargs.get("inplace"):
                    out = func(*args, **kwargs)
                    with _torch.DisableTorchFunction():
                        _made(self.registry, out, args)
                    return out
        registry = self.registry
        registry.seen = None
        if _may_change(func) or (kwargs and ("out" in kwargs or kwargs.get("inplace"))):
            with _torch.DisableTorchFunction():
                for t in _written(func, args, kwargs):
                    registry.before_change(t)
                if func in NAMING and not _dispatched():
                    (registry.secure if func in DETACHING else registry.expose)(args[0])
        return func(*args, **kwargs)

    def _compiled(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """The call while the compiler traces it, and the mode."""
        out = func(*args, **kwargs)
        if compiled.prepare():
            compiled.called()
        return out
