"""Times the 3x3x3 convolution of few channels and the gradient of its input, beside the vendor's.

The vendor's library chooses its kernel by a rule, or with ``cudnn.benchmark`` by a measurement at the first call.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusedseg.ops.conv import conv3d
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE

from .data import DTYPES, Source, describe
from .harness import Timing, compete, copy_of
from .results import COPY

SECONDS = {"cpu": 0.3, "cuda": 0.4}


class Case(NamedTuple):
    size: tuple[int, ...]
    in_channels: int
    out_channels: int
    dtype: str = "fp16"
    batch: int = 2

    def __str__(self) -> str:
        return f"{describe((self.batch, self.in_channels, *self.size), self.dtype, True)} to {self.out_channels}"


CASES = {
    "cpu": [Case((16, 16, 16), 32, 32, "fp32")],
    "cuda": [
        Case((128, 128, 128), 32, 32), Case((128, 128, 128), 64, 32), Case((128, 128, 128), 32, 64),
        Case((64, 64, 64), 64, 64), Case((128, 128, 128), 32, 32, "bf16"),
    ],
}  # fmt: skip
MORE = {
    "cpu": [Case((16, 16, 16), 16, 48, "bf16")],
    "cuda": [
        Case((128, 128, 128), 16, 16), Case((96, 160, 160), 32, 32),
        Case((64, 64, 64), 32, 64), Case((48, 48, 48), 48, 48),
    ],
}  # fmt: skip


def vendor_forward(benchmark: bool, x: Tensor, weight: Tensor) -> Tensor:
    torch.backends.cudnn.benchmark = benchmark
    return conv3d.reference_forward(x, weight, None)


def vendor_gradient(benchmark: bool, dy: Tensor, weight: Tensor) -> Tensor:
    torch.backends.cudnn.benchmark = benchmark
    return conv3d.reference_input_gradient(dy, weight)


# The forward, and the gradient of the input.
Pair = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]


def contenders(x: Tensor, weight: Tensor) -> dict[str, Pair]:
    vendor = {
        name: (partial(vendor_forward, benchmark), partial(vendor_gradient, benchmark))
        for name, benchmark in (("eager", False), ("cudnn.benchmark", True))
    }
    if not conv3d.PLAIN.served(x, weight):
        # Without a GPU, the op calls the vendor.
        return vendor | {"ours": vendor["eager"]}
    return vendor | {"ours": (partial(conv3d.forward, bias=None), conv3d.input_gradient)}


class Conv3dJob:
    """Backward is the gradient of the input alone: the gradient of the weight is the vendor's for all."""

    def __init__(self, pair: Pair, x: Tensor, weight: Tensor, dy: Tensor) -> None:
        self.convolve, self.gradient = pair
        self.x, self.weight, self.dy = x, weight, dy

    def prepare(self) -> Tensor:
        return self.x

    def forward(self, prepared: Tensor) -> Tensor:
        return self.convolve(prepared, self.weight)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return (self.gradient(self.dy, self.weight),)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"y": out, "dx": grads[0]}

    def owned(self) -> list[Tensor]:
        return [self.x, self.weight, self.dy]


def test_step(case, device, report):
    source = Source(device)
    x, dy = (
        source.normal((case.batch, channels, *case.size), case.dtype, True)
        for channels in (case.in_channels, case.out_channels)
    )
    weight = source.normal((case.out_channels, case.in_channels, 3, 3, 3), case.dtype, False)
    weight /= (27 * case.in_channels) ** 0.5

    def expected() -> dict[str, Tensor]:
        wide = weight.double()
        dx = torch.nn.grad.conv3d_input(x.shape, wide, dy.double(), padding=1)
        return {"y": F.conv3d(x.double(), wide, padding=1), "dx": dx}

    pairs = contenders(x, weight)
    dtype, before = DTYPES[case.dtype], torch.backends.cudnn.benchmark
    try:
        results = compete(
            pairs,
            lambda name: Conv3dJob(pairs[name], x, weight, dy),
            expected,
            {"y": FORWARD_TOLERANCE[dtype], "dx": GRADIENT_TOLERANCE[dtype]},
            Timing(device, SECONDS[device.type], ahead=device.type == "cuda"),
            probes={COPY: copy_of(torch.empty((x.numel() + dy.numel()) // 2, dtype=dtype, device=device))},
        )
    finally:
        torch.backends.cudnn.benchmark = before
    report.add("conv3d", "3x3x3 convolution of few channels, and the gradient of its input", str(case), results)
