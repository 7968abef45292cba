"""Max-pooling alone: between the stages of U-Nets, and with windows that overlap, as a ResNet begins."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from tests.reference import GRADIENT_TOLERANCE

from .harness import Copy, Result, compete
from .replay import CLOCK, report_step
from .report import Section

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
SECONDS = {"cpu": 0.6, "cuda": 1.0}
STOCK = {4: nn.MaxPool2d, 5: nn.MaxPool3d}
OURS = {4: fusedseg.MaxPool2d, 5: fusedseg.MaxPool3d}
CONTENDERS = {"eager": STOCK, "ours": OURS}


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    window: tuple[int, int, int] = (2, 2, 0)

    def __str__(self) -> str:
        fmt = "nhwc" if self.channels_last else "nchw"
        return f"{'x'.join(map(str, self.shape))} {self.dtype} {fmt} window {self.window[0]} stride {self.window[1]}"


def cases(shapes: list[tuple[int, ...]], overlapping: tuple[int, ...], dtypes: tuple[str, ...]) -> list[Case]:
    kinds = [(dtype, channels_last) for dtype in dtypes for channels_last in (False, True)]
    return [Case(shape, *kind) for shape in shapes for kind in kinds] + [
        Case(overlapping, *kind, (3, 2, 1)) for kind in kinds
    ]


CASES = {
    "cpu": cases([(2, 64, 256, 256), (1, 64, 32, 48, 48)], (2, 64, 256, 256), ("fp32", "bf16")),
    "cuda": cases([(8, 64, 512, 512), (2, 64, 320, 150, 26)], (128, 64, 112, 112), ("fp32", "fp16")),
}


class PoolJob:
    """A pool inside a network: x is not a leaf, dz is given."""

    def __init__(self, pool: nn.Module, x: Tensor, dz: Tensor) -> None:
        self.pool, self.x, self.dz = pool, x, dz

    def prepare(self) -> Tensor:
        return self.x * 1

    def forward(self, prepared: Tensor) -> Tensor:
        return self.pool(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.x, self.dz)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"z": out.detach(), "dx": grads[0]}

    def owned(self) -> list[Tensor]:
        return [self.x]


@cache
def run(case: Case, device: torch.device) -> dict[str, Result]:
    generator = torch.Generator(device).manual_seed(0)
    fmt = FORMATS[len(case.shape)] if case.channels_last else torch.contiguous_format
    dtype = DTYPES[case.dtype]
    x = torch.randn(case.shape, generator=generator, device=device).to(dtype).contiguous(memory_format=fmt)
    stock = STOCK[len(case.shape)](*case.window)
    dz = torch.randn(stock(x).shape, generator=generator, device=device).to(dtype).contiguous(memory_format=fmt)
    x.requires_grad_()

    def expected() -> dict[str, Tensor]:
        leaf = x.detach().double().requires_grad_()
        z = stock(leaf)
        return {"z": z.detach(), "dx": torch.autograd.grad(z, leaf, dz.double())[0]}

    return compete(
        {name: partial(PoolJob, made[len(case.shape)](*case.window), x, dz) for name, made in CONTENDERS.items()},
        {"": expected},
        # a maximum is exact
        {"z": 0.0, "dx": GRADIENT_TOLERANCE[dtype]},
        device,
        SECONDS[device.type],
        probes={"copy": Copy(x)},
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    metafunc.parametrize("case", CASES[kind], ids=str)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_step(case, contender, device, report, benchmark):
    section = report.section("max_pool", Section("Max-pooling, forward + backward of the layer alone"))
    results = section.cases[str(case)] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])
