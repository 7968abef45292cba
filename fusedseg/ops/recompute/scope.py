"""The scope in which saved tensors are replaced by recipes: ``fusedseg.recompute``."""

from contextlib import ContextDecorator, ExitStack

import torch
from torch.autograd.graph import saved_tensors_hooks

from .recipes import innermost
from .registry import Registry
from .saved import unpack
from .watch import Watch


class recompute(ContextDecorator):
    """Inside, autograd saves recipes in place of what is rebuilt cheaply: a context manager, or a decorator::

        with fusedseg.recompute():
            loss = criterion(model(x), y)
        loss.backward()

    The model need not change: norms, activations (in place or not), ``cat``, ``interpolate``, ``pad``, pools, dropout,
    sums and products of tensors, and the modules of this package have recipes; ``stock.py`` lists them and what
    each saves.  No convolution is computed twice; values, gradients, running statistics and random numbers are those
    without the scope, to the last bit on a CPU.  A scope within a scope is the same one.  It holds for the thread that
    enters it.

    Kept for backward: about one tensor for each convolution, the mask of dropout and the positions of max-pooling as a
    byte for each element, and in a long residual stream its sum after every fifth block or so.

    Falls back to saving the data wherever a rebuild is not certain to give the same bits: results of functions that
    the scope does not know, tensors that were modified in place since, tensor subclasses, nested and inference tensors,
    and what only the caller's own memory could give again.  While other saved-tensor hooks lie inside the scope, such
    as a checkpoint's, and inside ``torch.vmap``, it saves all data.  Hooks around the scope get what is kept.  Under
    ``torch.compile`` nothing happens.

    Raises:
        RuntimeError: in backward, if a tensor that others are rebuilt from was modified in place after the scope had
            ended (inside the scope, a copy is made first).  On entering a transform of ``torch.func`` that
            differentiates, since saved-tensor hooks cannot surround it.
    """

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
