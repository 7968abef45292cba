"""The table of the compiler's backend, and the goals that it names as missed."""

import pytest
import torch
from torch import nn

from bench.harness import Result, count_bytes
from bench.networks import Network
from bench.test_compiler import Contest, Steps, kernels_of_zeros, missed_bytes, missed_steps
from fusedseg import _torch


def result(kept: int, peak: int, step: float = 1.0) -> Result:
    return Result(kept=kept, peak=peak, forward=[step], backward=[step], step=[step] * 5)


def test_goals_that_are_missed():
    results = {
        "eager": result(2000, 4000),
        "scope": result(1000, 2000),
        "compiled": result(1500, 1900),
        # It keeps fewer bytes than ours, so its step and its peak are compared.
        "budget 0.5": result(1050, 1800, 0.5),
        "aten": result(1000, 2100),
        "ours": result(1060, 1850, 1.1),
    }
    assert list(missed_bytes("net", results)) == [
        "net: fusedseg, Inductor keeps 1.060 of the scope's bytes",
        "net: fusedseg, Inductor peaks at 1.028 of compile, budget 0.5, which keeps 0.991 of its bytes",
    ]
    assert list(missed_steps("net", results)) == [
        "net: a step of fusedseg, Inductor takes 2.200 of compile, budget 0.5"
    ]


def test_first_steps_without_steps():
    """A run with -k test_first_step has no bytes and no times."""
    section = Steps("title", first={"net": {"ours": (20.0, 3.0)}})
    assert section.to_json() == {"net": {"contenders": {"ours": {"first_step_s": 20.0, "first_step_warm_s": 3.0}}}}
    assert section.lines()[-2:] == ["| net | 20.0, 3.0 |", ""]


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))


@pytest.mark.slow
@pytest.mark.skipif(bool(_torch.inductor_problem()), reason="Inductor needs a C++ compiler")
def test_kernels_of_zeros_allocate_as_real_ones():
    def counted() -> tuple[int, int, int]:
        torch.compiler.reset()
        job = Contest("net", Network(net, (2, 1, 18, 18)), torch.device("cpu")).build("ours")
        return count_bytes(job, torch.device("cpu"))

    with kernels_of_zeros():
        without = counted()
    assert without == counted()
