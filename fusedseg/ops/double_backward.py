"""Refuses to differentiate the backward of an op, and to call it for a batch of gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _torch


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


def refused(name_of: Callable[[Any], str]) -> tuple[Callable[..., None], Callable[..., None]]:
    """The gradient of the op in graphs that computes a backward: it raises RuntimeError.

    ``name_of`` finds the name of the op in errors from the arguments of backward.
    """

    def remember(ctx: Any, inputs: Any, output: object) -> None:
        ctx.name = name_of(inputs)

    def gradient(ctx: Any, *grads: object) -> None:
        raise RuntimeError(message(ctx.name))

    return gradient, remember


def differentiated_once(op: str, backward: Callable[..., tuple], dz: Tensor, *rest: object) -> tuple:
    """Calls ``backward(dz, *rest)``.  If autograd records a graph of this call, backward of that graph raises an error.

    Raises:
        RuntimeError: ``dz`` is a batch of gradients.
    """
    refuse_batches(op, dz)
    return _Gradients.apply(op, backward, dz, *rest) if torch.is_grad_enabled() else backward(dz, *rest)


def is_batch(t: Tensor) -> bool:
    """Whether a tensor stands for a batch of tensors, as a gradient inside ``vmap`` does."""
    return not torch.compiler.is_compiling() and (_torch.is_batchedtensor(t) or _torch.is_legacy_batchedtensor(t))


def refuse_batches(op: str, dz: Tensor) -> None:
    """Raises RuntimeError for a batch of gradients, for which kernels that write to given memory have no rule."""
    if is_batch(dz):
        raise RuntimeError(
            f"{op}: a batch of gradients (is_grads_batched, jacobian(vectorize=True), vmap) is not supported; ask for "
            "one gradient at a time, or use the unfused modules, or fusedseg.revert(model)"
        )
