"""What the self-tests of families share: small tensors, results of stock functions in float64, and tolerances."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..check import HALF

EPS, MOMENTUM, SLOPE = 1e-5, 0.1, 0.01
FORMATS = {
    "contiguous": torch.contiguous_format, "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}  # fmt: skip
SHAPE = (2, 8, 16, 16)
# The largest allowed relative errors.  Those of the norm are what docs/design.md promises.  A kernel for fp64 takes the
# slope as fp32, which rounds it by 2e-8.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def image(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, fmt: str, seed: int) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return values.to(device, dtype, memory_format=FORMATS[fmt])


def parameters(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias of a norm.  Parameters of mixed precision are fp32."""
    of = torch.float32 if dtype in HALF else dtype
    weight, bias = (torch.linspace(a, a + 1.0, channels, dtype=of, device=device) for a in (0.5, -0.5))
    return weight, bias


def stock(function: Callable[..., Tensor], *tensors: Tensor, dy: Tensor | None = None) -> tuple[Tensor, ...]:
    """The result of a stock function in float64, and its gradients of all tensors, if ``dy`` is given.

    All is on the CPU: there PyTorch has no op that deterministic algorithms forbid, and autograd needs no other thread,
    which may wait for this test.
    """
    leaves = [t.cpu().double().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y = function(*leaves)
    return y.detach(), *(() if dy is None else torch.autograd.grad(y, leaves, dy.cpu().double()))
