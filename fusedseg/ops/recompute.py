"""The scope in which saved tensors are replaced by recipes: ``fusedseg.recompute``."""

from contextlib import ContextDecorator, ExitStack

import torch
from torch.autograd.graph import saved_tensors_hooks

from .rebuild import unpack
from .recipe import innermost
from .registry import Registry
from .stock import Watch


class recompute(ContextDecorator):
    """Inside, what autograd saves is replaced by how it is rebuilt, where that costs no convolution."""

    def __init__(self) -> None:
        self._entered: list[ExitStack] = []

    def _recreate_cm(self) -> "recompute":
        # as a decorator: one for each call, whatever the thread
        return type(self)()

    def __enter__(self) -> None:
        stack = ExitStack()
        # within a scope there is nothing left to do
        if not torch.compiler.is_compiling() and innermost() is None:
            registry = Registry(torch._C._autograd._top_saved_tensors_default_hooks(True))
            stack.callback(registry.close)
            stack.enter_context(saved_tensors_hooks(registry.pack, unpack))
            stack.enter_context(Watch(registry))
        self._entered.append(stack)

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().close()
