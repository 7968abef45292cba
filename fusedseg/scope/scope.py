"""The scope in which saved tensors are replaced by recipes: ``fusedseg.recompute``."""

from contextlib import ContextDecorator, ExitStack

import torch
from torch.autograd.graph import saved_tensors_hooks

from .. import _moved, _torch
from ..ops import unfused
from ..ops.observer import OPEN, innermost
from . import compiled
from .compiled import warn_of_torch
from .registry import Registry
from .saved import unpack
from .watch import Watch


class recompute(ContextDecorator):
    """A context manager or decorator in which autograd saves recipes in place of tensors that are cheap to rebuild.

    Use::

        with fusedseg.recompute():
            loss = criterion(model(x), y)
        loss.backward()

    The model need not change.  Norms, activations (in place or not), ``cat``, ``interpolate``, ``pad``, pools, dropout,
    sums and products of tensors, and the modules of this package have recipes.  ``stock.py`` lists these functions and
    what each of them saves.  No convolution is computed twice.  Values, gradients, running
    statistics and random numbers are the same as without the scope, on a CPU to the last bit.  A scope inside a scope
    changes nothing.  The scope holds for the thread that enters it.

    Kept for backward: about one tensor for each convolution, one byte per element for the mask of dropout and for the
    positions of max-pooling, and in a long residual stream the sum after about every fifth block.

    Args:
        bits, budget, extra_flops: must be None.  The compiler backend has them, and the error has the line to write.

    Falls back to saving the data if it is not certain that a rebuild gives the same bits.  This concerns results of
    functions that the scope does not know, tensors that were modified in place afterwards, tensor subclasses, nested
    and inference tensors, and tensors that could be rebuilt only from the caller's own memory.  All data is saved
    inside ``torch.vmap``, and while other saved-tensor hooks, such as a checkpoint's, lie inside the scope.  Hooks
    around the scope receive the tensors that are kept.

    Under ``torch.compile`` the compiler keeps and rebuilds what the scope would keep and rebuild, whether the scope is
    inside the compiled function or around its call.  A backend that does not use AOTAutograd cannot follow a scope
    inside the compiled function, and the scope warns.

    Raises:
        TypeError: ``bits``, ``budget`` or ``extra_flops`` is given.
        RuntimeError: in backward, if a tensor from which other tensors are rebuilt was modified in place after the
            scope had ended (inside the scope, a copy is made first); or when a transform of ``torch.func`` that
            differentiates is entered, because saved-tensor hooks cannot surround it.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016; here only what is cheap runs again.
    """

    # Whether the scope is that of a converted model: convolutions look for notes (``joins.py``), and functions keep
    # channels_last (``formats.py``).
    _converted = False

    def __init__(self, *, bits: None = None, budget: None = None, extra_flops: None = None) -> None:
        _moved.refuse("fusedseg.recompute", bits=bits, budget=budget, extra_flops=extra_flops)
        self._entered: list[ExitStack] = []

    @classmethod
    def of_converted(cls) -> "recompute":
        """The scope of a converted model."""
        made = cls()
        made._converted = True
        return made

    def _recreate_cm(self) -> "recompute":
        # A decorated function makes a new scope for each call, so that any thread may call it.
        return type(self)()

    @compiled.as_python
    def __enter__(self) -> None:
        if torch.compiler.is_compiling():
            if not unfused.wanted() and compiled.prepare():
                compiled.begin()
            return
        stack = ExitStack()
        if _torch.MISSING_FOR_SCOPE:
            warn_of_torch(_torch.scope_problem())
        # Inside another scope there is nothing left to do.
        elif (around := innermost()) is not None:
            assert isinstance(around, Registry)
            stack.callback(setattr, around, "converted", around.converted)
            around.converted |= self._converted
        else:
            registry = Registry(_torch.top_saved_tensors_default_hooks(True))
            OPEN.append(registry)
            stack.callback(OPEN.remove, registry)
            registry.converted = self._converted
            stack.callback(registry.close)
            stack.enter_context(saved_tensors_hooks(registry.pack, unpack))
            stack.enter_context(Watch(registry))
        self._entered.append(stack)

    @compiled.as_python
    def __exit__(self, *exception: object) -> None:
        if torch.compiler.is_compiling():
            if not unfused.wanted() and compiled.prepare():
                compiled.end()
            return
        self._entered.pop().close()
