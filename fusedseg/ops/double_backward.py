"""Backward passes that cannot be differentiated themselves, and say so."""

from collections.abc import Callable
from typing import Any

import torch


def message(op: str) -> str:
    return (
        f"{op}: double backward is not supported, since backward rebuilds what it needs outside the graph; "
        "use the unfused modules where gradients of gradients are needed"
    )


def refusing(op: str) -> Callable[..., None]:
    """The backward of an op that is itself a backward."""

    def backward(ctx: Any, *grads: Any) -> None:
        raise RuntimeError(message(op))

    return backward


class _Gradients(torch.autograd.Function):
    """The gradients of an op whose backward was asked for a graph, and an error if that graph is used."""

    @staticmethod
    def forward(ctx, op, backward, *args):
        ctx.op = op
        return backward(*args)

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(message(ctx.op))


def differentiated_once(op: str, backward: Callable[..., tuple], *args: Any) -> tuple:
    """``backward(*args)``; where autograd records a graph of it, one that raises when it is used."""
    return _Gradients.apply(op, backward, *args) if torch.is_grad_enabled() else backward(*args)
