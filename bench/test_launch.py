"""Measures the host's time of a call on planes of 16 x 16, for which the kernels take less time than the host.

On CUDA the time ends with the last launch of the driver, without waiting for the device.  A CPU launches nothing; there
the tensor has 16 values, so that almost all of the time is dispatch.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fusedseg

from .contenders import CONTENDERS as LAYERS
from .contenders import SLOPE
from .data import parametrize_cases
from .harness import Result, once
from .jobs import Treat, as_it_is
from .norm_layers import NormCase, compete_norms, layer_of
from .replay import CLOCK, report_step
from .results import Section

SECONDS = {"cpu": 3.0, "cuda": 3.0}
# The calls of a round.  Each makes at most five launches, and the queue of a GPU holds about a thousand.
CALLS = 100
CASES = {
    "cpu": [NormCase("batch", (1, 4, 2, 2), "fp32")],
    "cuda": [NormCase("batch", (8, 64, 16, 16), "fp16", channels_last) for channels_last in (False, True)],
}


def exact(case: NormCase) -> nn.Module:
    return fusedseg.BatchNormAct(case.shape[1])


CONTENDERS: dict[str, tuple[Callable[[NormCase], nn.Module], Treat]] = {
    **{name: (layer_of(build), treat) for name, (build, treat) in LAYERS.items()},
    "ours-exact": (exact, as_it_is),
}


def contenders(kind: str) -> list[str]:
    """A C++ compiler takes seconds for each, and the host calls compiled code in one way."""
    return [name for name in CONTENDERS if kind == "cuda" or name != "aggressive"]


@once
def run(case: NormCase, device: torch.device) -> dict[str, Result]:
    layers = {name: CONTENDERS[name] for name in contenders(device.type)}
    return compete_norms(case, device, layers, SLOPE, SECONDS[device.type], CALLS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("contender", contenders(torch.device(metafunc.config.getoption("--device")).type))
    parametrize_cases(metafunc, CASES)


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    results = run(case, device)
    section = report.section("launch", Section("Time of the host, BatchNorm and activation, forward + backward"))
    section.cases[str(case)] = results
    report_step(benchmark, f"host time of {case}", contender, results[contender])
