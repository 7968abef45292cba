"""Growing layers: k convolutions of one input, summed by ``torch.stack(...).sum(0)`` or by a ``ConvBank2d``."""

from collections.abc import Iterable
from functools import partial
from statistics import median
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fusedseg.nn import ConvBank2d
from tests.reference import GRADIENT_TOLERANCE

from .contenders import aggressive, as_it_is, compiled
from .harness import Result, Timing, compete, interleave, once
from .jobs import step_results
from .replay import CLOCK, report_step
from .results import Section, aligned

SLOW_ON = "cuda"
TITLE = "k convolutions of one input, summed: stacked, and as a ConvBank2d"
BRANCHES = (1, 4, 16, 64)
SECONDS = {"cpu": 0.2, "cuda": 1.0}
FLAT_SECONDS = {"cpu": 2.0, "cuda": 2.0}
# Compiling takes longer on a CPU than the rest of this bench.
TREATMENTS = {
    "cpu": {"eager": as_it_is, "ours": as_it_is},
    "cuda": {"eager": as_it_is, "compiled": compiled, "aggressive": aggressive, "ours": as_it_is},
}


class Case(NamedTuple):
    shape: tuple[int, ...]
    branches: int

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} fp32, {self.branches} branches"


# On a CPU x is small, because the stack of 64 branches runs 64 convolutions about ten times.
SHAPES = {"cpu": (1, 16, 64, 64), "cuda": (8, 64, 256, 256)}
FLAT_SHAPES = {"cpu": (2, 32, 128, 128), "cuda": (8, 64, 256, 256)}
CASES = {kind: [Case(shape, k) for k in BRANCHES] for kind, shape in SHAPES.items()}


class Stack(nn.Module):
    """The layer as its author wrote it, with the parameters of a bank."""

    def __init__(self, bank: ConvBank2d) -> None:
        super().__init__()
        self.branches = bank.branches

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


class BankJob:
    """The layer inside a network: x needs a gradient, and dy is given."""

    def __init__(self, layer: nn.Module, x: Tensor, dy: Tensor) -> None:
        self.layer, self.x, self.dy = layer, x, dy
        self.params = list(layer.parameters())

    def prepare(self) -> Tensor:
        return self.x

    def forward(self, prepared: Tensor) -> Tensor:
        return self.layer(prepared)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, (self.x, *self.params), self.dy)

    def results(self, out: Tensor, grads: tuple[Tensor, ...]) -> dict[str, Tensor]:
        dx, *rest = grads
        return {"y": out.detach(), "dx": dx, "dparams": torch.cat([grad.flatten() for grad in rest])}

    def owned(self) -> Iterable[Tensor]:
        return self.params


def make_data(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return x.requires_grad_(), dy


def bank_of(channels: int, branches: int, device: torch.device) -> ConvBank2d:
    torch.manual_seed(branches)
    return ConvBank2d(channels, channels, 3, padding=1, branches=branches, device=device)


@once
def run(case: Case, device: torch.device) -> dict[str, Result]:
    x, dy = make_data(case.shape, device)

    def build(name: str) -> BankJob:
        bank = bank_of(case.shape[1], case.branches, device)
        return BankJob(TREATMENTS[device.type][name](bank if name == "ours" else Stack(bank)), x, dy)

    def expected() -> dict[str, Tensor]:
        bank = bank_of(case.shape[1], case.branches, device).double()
        return step_results(BankJob(Stack(bank), x.detach().double().requires_grad_(), dy.double()))

    return compete(
        {name: partial(build, name) for name in TREATMENTS[device.type]},
        {"": expected},
        dict.fromkeys(("y", "dx", "dparams"), GRADIENT_TOLERANCE[torch.float32]),
        Timing(device, SECONDS[device.type]),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        kind = torch.device(metafunc.config.getoption("--device")).type
        metafunc.parametrize("case", CASES[kind], ids=str)
        metafunc.parametrize("contender", TREATMENTS[kind])


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    section = report.sections.setdefault("conv_bank", Section(TITLE))
    results = section.cases[str(case)] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])


def test_time_does_not_depend_on_the_number_of_branches(device, report):
    """Times banks of all sizes in the same rounds, and compares each lap with that of a single branch."""
    shape = FLAT_SHAPES[device.type]
    x, dy = make_data(shape, device)
    jobs = {f"{k:2}": BankJob(bank_of(shape[1], k, device), x, dy) for k in BRANCHES}
    times = interleave(jobs, Timing(device, FLAT_SECONDS[device.type]))
    one = times[" 1"].step
    rows = [["branches", "step ms, median", "best", "median / that of 1", "best / that of 1"]]
    for k, result in times.items():
        step = result.step
        middle, best = median(step), min(step)
        rows.append(
            [k, f"{1e3 * middle:.2f}", f"{1e3 * best:.2f}", f"{middle / median(one):.2f}", f"{best / min(one):.2f}"]
        )
    report.notes.append("\n".join([f"ConvBank2d of {'x'.join(map(str, shape))} fp32, interleaved", *aligned(rows)]))
