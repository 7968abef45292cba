"""The gradient of a network in a scope with ``bits``: its error, and the part of the error that is a bias."""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fusedseg
from fusedseg import recompute

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def gradient(model: nn.Module, x: Tensor = IMAGE, **scope) -> tuple[Tensor, Tensor]:
    """The output, and the gradients of all parameters as one vector."""
    # A converted model has a scope of its own, which an outer scope would replace.
    with recompute(**scope) if scope else nullcontext():
        out = model(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    loss = (out * (weights + out)).mean()
    return out.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


class Error(NamedTuple):
    """The error of one rounding relative to the gradient, and bias² / error², whose noise is about .02."""

    size: float
    bias: float


def error_of(model: nn.Module, x: Tensor, *, bits: int, converted: bool = False, times: int = 32) -> Error:
    model, x = model.double(), x.double()
    _, expected = gradient(model, x)
    if converted:
        fusedseg.convert(model, bits=bits)
    got = torch.stack([gradient(model, x, **({} if converted else {"bits": bits, "seed": i}))[1] for i in range(times)])
    mean = got.mean(0)
    noise = (got - mean).square().sum() / (times - 1)
    error_squared = (got - expected).square().sum(1).mean()
    # The mean of independent errors has 1 / times of their variance.
    bias_squared = (mean - expected).square().sum() - noise / times
    return Error((error_squared.sqrt() / expected.norm()).item(), (bias_squared / error_squared).item())
