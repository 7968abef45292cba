"""Times the convolution of ``conv_abn`` alone on a GPU, with the statistics of its output.

Triton's kernel competes with the vendor's convolution.

pytest bench/gpu/test_conv_kernels.py --device cuda
"""

from functools import partial

import pytest
import torch
from torch import Tensor

from ..data import parametrize_cases
from ..harness import Result, Timing, compete, once
from ..jobs import ConvJob
from ..replay import CLOCK, report_step
from ..test_conv_abn import CASES, MORE, Case, exact_conv, make_data, module, tolerance
from .conv_kernels import KERNELS, VENDOR, Choice, KernelSection, choice_of, flops

SECONDS = 0.5


def expected_of_kernels(case: Case, data: dict[str, Tensor]) -> dict[str, Tensor]:
    y = exact_conv(case, data)
    axes = [d for d in range(y.dim()) if d != 1]
    return {"y": y, "mean": y.mean(axes), "var": y.var(axes, correction=0)}


@once
def run_kernels(case: Case, device: torch.device) -> tuple[dict[str, Result], int, Choice]:
    """Returns the results, the number of floating-point operations, and the choice of "auto"."""
    data = make_data(case, device)
    x, w = data["x"].detach(), data["conv_weight"]
    output, gradient = tolerance(case, device)
    results = compete(
        {name: partial(job, x, w, case.geometry) for name, job in KERNELS.items()},
        {"": lambda: expected_of_kernels(case, data)},
        # Statistics are sums, so the tolerance of gradients applies.
        {"y": output, "mean": gradient, "var": gradient},
        Timing(device, SECONDS, ahead=True),
        baseline=VENDOR,
    )
    step = ConvJob(module("ours", case, device, data), data)
    step.forward(step.prepare())
    return results, flops(x, w, case.geometry), choice_of(x, w, case.geometry)


@pytest.mark.benchmark(timer=CLOCK)
def test_kernel(case, contender, device, report, benchmark):
    section = report.section("conv_abn_kernels", KernelSection("The convolution alone, with statistics of its output"))
    results, section.flops[str(case)], section.choices[str(case)] = run_kernels(case, device)
    section.cases[str(case)] = results
    report_step(benchmark, f"convolution of {case}", contender, results[contender])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("contender", KERNELS)
    # Triton's kernels need a GPU, so that a CPU has no case.
    parametrize_cases(metafunc, {**CASES, "cpu": []}, MORE)
