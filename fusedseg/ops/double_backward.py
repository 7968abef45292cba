"""Calls the backward of an op for one gradient at a time, and refuses to differentiate it again."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch

_is_compiling = torch.compiler.is_compiling
_is_batched, _is_legacy = _torch.is_batchedtensor, _torch.is_legacy_batchedtensor


def message(op: str) -> str:
    return (
        f"{op}: double backward is not supported, since backward rebuilds what it needs outside the graph; "
        "use the unfused modules, or fusedseg.revert(model), where gradients of gradients are needed"
    )


class _Gradients(torch.autograd.Function):
    """The gradients of an op whose backward records a graph; using that graph raises RuntimeError."""

    @staticmethod
    def forward(ctx, op, backward, *args):
        ctx.op = op
        return backward(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(message(ctx.op))


def refuse_in_graphs(backward_op: Any, op: str) -> None:
    """Makes the gradient of the op in graphs that computes a backward raise RuntimeError."""

    def refused(ctx: Any, *grads: object) -> None:
        raise RuntimeError(message(op))

    backward_op.register_autograd(refused, setup_context=lambda ctx, inputs, output: None)


def differentiated_once(op: str, backward: Callable[..., tuple], dz: Tensor, *rest: object) -> tuple:
    """Calls ``backward(dz, *rest)``.  If autograd records a graph of this call, using that graph raises RuntimeError.

    Only ``dz`` can be a batch of tensors, because ``rest`` was saved by a forward pass, which refuses transforms.
    """
    if is_batch(dz):
        return one_by_one(backward, dz, *rest)
    return _Gradients.apply(op, backward, dz, *rest) if torch.is_grad_enabled() else backward(dz, *rest)


def is_batch(t: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, as a gradient inside ``vmap`` does."""
    return not _is_compiling() and (_is_batched(t) or _is_legacy(t))


def one_by_one(backward: Callable[..., tuple], *args: object) -> tuple:
    """Calls ``backward(*args)`` for each gradient of a batch, one after the other.

    ``torch.autograd.grad(..., is_grads_batched=True)``, ``jacobian(vectorize=True)`` and ``torch.vmap`` around
    ``torch.autograd.grad`` call a backward with a batch of gradients.  Kernels, and aten functions that write to given
    memory, have no rule for such batches.
    """
    if any(isinstance(arg, Tensor) and _is_legacy(arg) for arg in args):
        level = _torch.legacy_vmap_level()
        split = [
            _torch.remove_batch_dim(arg, level, 0, 0) if isinstance(arg, Tensor) and _is_legacy(arg) else None
            for arg in args
        ]
        found = _stacked(backward, args, split)
        return tuple(None if t is None else _torch.add_batch_dim(t, 0, level) for t in found)
    level = max(_torch.maybe_get_level(arg) for arg in args if isinstance(arg, Tensor))
    split = [
        _torch.get_unwrapped(arg).movedim(_torch.maybe_get_bdim(arg), 0)
        if isinstance(arg, Tensor) and _torch.maybe_get_level(arg) == level
        else None
        for arg in args
    ]
    with _torch.temporarily_pop_interpreter_stack():
        found = _stacked(backward, args, split)
    return tuple(None if t is None else _torch.functorch_add_batch_dim(t, 0, level) for t in found)


def _stacked(
    backward: Callable[..., tuple], args: Sequence[Any], split: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The stacked results of all calls.

    ``split`` has the arguments that differ between calls, stacked along their first dimension, and None for all other
    arguments.
    """
    count = next(len(each) for each in split if each is not None)
    found = [
        backward(*(arg if each is None else each[i] for arg, each in zip(args, split, strict=True)))
        for i in range(count)
    ]
    return [None if grads[0] is None else torch.stack(grads) for grads in zip(*found, strict=True)]
