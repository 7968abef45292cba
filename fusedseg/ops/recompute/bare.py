"""Calls of which only one tensor passes through the hooks of the scope; autograd itself holds all others.

A hook takes longer than a small norm.  A norm and a convolution save one activation, and parameters and vectors that
need no hook, because recipes hold copies of them.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ... import _torch
from .plain import is_trained_leaf
from .registry import Registry
from .saved import Data, Handle

_hooks, _push_hooks = _torch.top_saved_tensors_default_hooks, _torch.push_hooks
_POSSIBLE = _push_hooks is not None and _torch.pop_hooks is not None


def possible(registry: Registry, x: Tensor) -> bool:
    """Whether a call that saves ``x``, which is plain, may be made so."""
    return _POSSIBLE and registry.chains and registry.outer is None and not is_trained_leaf(x)


def call(
    registry: Registry, x: Tensor, func: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Any, Data | Handle | None]:
    """The result of ``func(*args, **kwargs)``, and what was saved for ``x``; None if ``x`` was not saved."""
    hooks, registry.bare = _hooks(True), x
    try:
        out = func(*args, **kwargs)
    finally:
        saved, registry.bare = registry.bare, None
        if saved is not x:
            _push_hooks(*hooks)
    return out, None if saved is x else saved
