"""A small network in whose compiled steps rewrites of the compiler take part, for ``fusedseg doctor --gpu``.

Its outputs and gradients under autocast are compared with those in float64 on the CPU, as those of eager mode are.
"""

import copy
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..compiler import backend
from ..compiler.settings import OPTIONAL, WITHOUT, written
from ..ops.self_test.first_use import SelfTestResult

SHAPE = (2, 1, 16, 16, 16)
# The first steps note launches, and the others make them again.
STEPS = 6
# An error may be so many times that of eager mode, and one of this size is no sign of a fault in 16 bits.
FACTOR, ROUNDING = 8, 0.02


class Block(nn.Module):
    """A convolution, a norm of each sample, a leaky ReLU, and a shortcut around them where the shape allows it."""

    def __init__(self, C: int, K: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(C, K, 3, padding=1)
        self.norm, self.act = nn.InstanceNorm3d(K, affine=True), nn.LeakyReLU(0.01, inplace=True)
        self.shortcut = C == K

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return self.act(y + x if self.shortcut else y)


class Net(nn.Module):
    """Volumes of one channel, dead biases of convolutions, a pool beside a skip, and a bias before a concatenation.

    The norm before the skip has two gradients.  Nothing is allocated between their sum and its gradient, as a cast of
    a weight's gradient is.  So the sum is joined to it in every memory format.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Block(1, 16), Block(16, 24))
        self.down = nn.Sequential(nn.MaxPool3d(2), Block(24, 32), Block(32, 32))
        self.up, self.last = nn.ConvTranspose3d(32, 24, 2, 2), nn.Sequential(Block(48, 16), nn.Conv3d(16, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        return self.last(torch.cat([self.up(self.down(skip)), skip], 1))


def step(net: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The output of a step under autocast to ``dtype``, and the gradients, by their names."""
    net.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=x.dtype is not torch.float64):
        y = run(x)
    # Gradients do not depend on values of y, which are rounded.
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape).to(y)).sum().backward()
    gradients = {f"the gradient of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return {"the output": y.detach(), **gradients}


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of each result.  A gradient that is 0, as that of a dead bias, has the size of others."""
    sizes = {name: t.norm().item() for name, t in exact.items()}
    least = 1e-2 * max(sizes.values())
    return {name: (found[name].cpu().double() - t).norm().item() / max(sizes[name], least) for name, t in exact.items()}


def test(device: torch.device, dtype: torch.dtype, without: str) -> SelfTestResult:
    """Compiles the network without some rewrites, as FUSEDSEG_WITHOUT names them, and compares some steps."""
    start = time.perf_counter()
    os.environ[WITHOUT] = without
    torch.compiler.reset()
    written.clear()
    torch.manual_seed(0)
    net = Net()
    exact = copy.deepcopy(net).double()
    net = net.to(device)
    images = [torch.randn(SHAPE) for _ in range(2)]
    right = [step(exact, exact, x.double(), dtype) for x in images]
    given = [x.to(device) for x in images]
    allowed = [errors(step(net, net, x, dtype), of) for x, of in zip(given, right, strict=True)]
    run, alive = torch.compile(net, backend=backend, options={"codegen": "aten"}), []
    for number in range(STEPS):
        place = number % len(images)
        # Results that stay alive make those of the next step lie elsewhere.
        alive.append(step(net, run, given[place], dtype))
        for name, error in errors(alive[-1], right[place]).items():
            limit = max(FACTOR * allowed[place][name], ROUNDING)
            # NaN is no agreement either.
            if not error <= limit:
                text = f"{name} in step {number} is off by {error:.1e} of its size, and {limit:.0e} is allowed"
                return SelfTestResult("wrong result", text, round(time.perf_counter() - start, 3))
    # A rewrite that has found nothing to write here is not tested.
    took_part = ", ".join(f"{name} {written[name]}" for name in OPTIONAL)
    return SelfTestResult("", took_part, round(time.perf_counter() - start, 3))
