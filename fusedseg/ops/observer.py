"""What an op tells the recompute scopes (``fusedseg.recompute()``) about its calls.

The scopes lie above the ops (``fusedseg/scope/``), and an op imports this file only.  An op describes its call once:

    class ScaledCall(OpCall):
        def __init__(self, x, weight):
            self.x, self.weight = x, weight

        @property
        def inputs(self):
            return self.x, self.weight

        def run(self):
            return Function.apply(self.x, self.weight)    # saves x

        def rebuild(self):
            return compute                                # compute(x, weight) gives the output again

    def scaled(x, weight):
        call = ScaledCall(x, weight)
        return observed(call) if OPEN else call.run()

If autograd saves the output, or a view of it, afterwards, a recipe is saved in place of the data.

The contract:

* ``rebuild()`` is asked after the call.  Its result gets detached tensors with the inputs' values, shapes, strides and
  dtypes.  It runs without grad mode and under the autocast state of the call.  It returns the values of the output in
  memory of its own, and changes no input.  It must not hold a tensor of the size of an activation, because its closure
  is kept as long as the output lives.
* Without an active scope, without grad mode, or while ``torch.compile`` traces, ``observed`` only makes the call.
* A recipe keeps nothing alive that is not kept anyway, with two exceptions.  Small inputs (under a sixteenth of the
  output, such as one value per channel) are copied, so that an optimizer may change them before backward.  Large
  inputs that no saved tensor keeps are held as long as the output lives, if all of them together are smaller than the
  output, and if they are results of calls and not the caller's own memory.  Otherwise the recipe is not recorded.  It
  is not recorded either if an input is rebuilt itself and has at least ``LARGER`` times the bytes of the output,
  because this input would lie beside the output at the peak.
* A recipe belongs to the output's memory, its place in the memory, its dtype and its version.  After the output was
  modified in place, or its memory was given to another library, the recipe is no longer found.
* If it is not certain that a rebuild gives the same bits, no recipe is recorded.  ``docs/design.md`` defines "certain".
* A recipe is not recorded if rebuilding its inputs and its output would take more than ``MAX_STEPS`` calls.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import _torch

# The largest number of calls that may rebuild one tensor, including its inputs.  This is about five residual blocks of
# norm, add and activation.
MAX_STEPS = 16
# Keep the output if rebuilding it needs a recomputed input at least this many times its size.
LARGER = 4
# An input is copied if the output has at least this many times its elements.
SMALL = 16

P = ParamSpec("P")
R = TypeVar("R")
_transforms = _torch.peek_interpreter_stack
_hooks = _torch.top_saved_tensors_default_hooks
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


class OpCall:
    """One call of an op, as the op describes it to the scopes.

    inputs: the tensors from which the output can be rebuilt; none if it has no recipe.
    overwritten: the tensor that the call writes to.  Before it does, the scopes copy what recipes read there.
    """

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def overwritten(self) -> Tensor | None:
        return None

    def run(self) -> Tensor:
        """Makes the call."""
        raise NotImplementedError

    def rebuild(self) -> Callable[..., Tensor]:
        """After the call: the function that computes the output again from ``inputs``."""
        raise NotImplementedError


class Observer:
    """What the ops know of the registry of a scope (``fusedseg/scope/registry.py``)."""

    def observe(self, call: OpCall) -> Tensor:
        """Makes the call, and records how to rebuild its output."""
        raise NotImplementedError

    def before_change(self, x: Tensor) -> Any:
        """Copies the values that recipes read from the memory of ``x``, before ``x`` is written to."""
        raise NotImplementedError


# The observers of all open scopes, in any thread.
OPEN: list[Observer] = []


class Watching(TorchFunctionMode):
    """The base class of the function mode of a scope (``fusedseg/scope/watch.py``)."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer


def innermost() -> Observer | None:
    """The observer whose hooks see the tensors that this thread saves now.

    The result is None if there is no scope, or if other hooks lie inside it.  It is also None inside a transform of
    ``torch.func``, because tensors have no memory there.
    """
    if _transforms() is not None:
        return None
    hooks = _hooks(True)
    observer = getattr(hooks[0], "__self__", None) if hooks else None
    return observer if isinstance(observer, Observer) else None


def active() -> Observer | None:
    """The innermost observer, if autograd saves tensors now; None otherwise, and under ``torch.compile``."""
    return None if _is_compiling() or not OPEN or not _is_grad_enabled() else innermost()


def watching() -> list[Observer]:
    """The observers of the scopes that watch the calls of this thread."""
    modes = _torch.get_current_function_mode_stack() if _torch.len_torch_function_stack() else ()
    return [mode.observer for mode in modes if isinstance(mode, Watching)]


def changing(x: Tensor) -> None:
    """Tells the scopes that a call that they do not watch is about to write to ``x``."""
    for observer in watching():
        with _torch.DisableTorchFunction():
            observer.before_change(x)


def observed(call: OpCall) -> Tensor:
    """Makes the call, under the scopes of this thread."""
    if call.overwritten is not None:
        changing(call.overwritten)
    observer = active()
    return call.run() if observer is None else observer.observe(call)


def unwatched(forward: Callable[P, R]) -> Callable[P, R]:
    """Hides the calls inside ``forward``, a function of this package, from the scopes.

    Under a function mode, even reading the shape of a tensor costs a Python call.
    """

    @functools.wraps(forward)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_compiling():
            return forward(*args, **kwargs)
        with _torch.DisableTorchFunction():
            return forward(*args, **kwargs)

    return run


def recomputing() -> bool:
    """Whether a backward pass runs in this thread.

    A forward inside a backward pass is the second forward of ``torch.utils.checkpoint``.  The first one has moved the
    running statistics already.  Under ``torch.compile`` the answer is False, because the compiler decides there what is
    computed twice.
    """
    return not torch.compiler.is_compiling() and _torch.current_graph_task_id() != -1
