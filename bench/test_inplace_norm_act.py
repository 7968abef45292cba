"""Times InstanceNorm and GroupNorm with their activation alone, on tensors from the stages of real U-Nets."""

from functools import partial

import pytest
import torch
from torch import nn

import fusedseg

from .contenders import SLOPE
from .harness import Result, once
from .norm_layers import GROUPS, NormCase, beside_stock, compete_norms, contenders_of, parametrize_norms, report_norm
from .replay import CLOCK

SECONDS = {"cpu": 1.0, "cuda": 1.0}
CASES = {
    "cpu": [
        # Both ends of an nnU-Net for patches of 48, and a stage of a U-Net.
        NormCase("instance", (2, 32, 48, 48, 48), "fp32", True),
        NormCase("instance", (2, 320, 6, 6, 6), "fp32"),
        NormCase("instance", (2, 64, 128, 128), "fp32"),
        NormCase("instance", (2, 64, 128, 128), "bf16", True),
        NormCase("group", (2, 64, 128, 128), "fp32"),
    ],
    "cuda": [NormCase("instance", (2, 32, 128, 128, 128), "fp16", channels_last) for channels_last in (False, True)],
}
MORE = {
    "cpu": [
        NormCase("instance", (2, 32, 48, 48, 48), "fp32"),
        NormCase("instance", (2, 32, 48, 48, 48), "bf16", True),
        NormCase("instance", (2, 320, 6, 6, 6), "fp32", True),
        NormCase("group", (2, 32, 48, 48, 48), "fp32"),
        NormCase("group", (2, 32, 48, 48, 48), "fp32", True),
        NormCase("group", (2, 320, 6, 6, 6), "fp32"),
        NormCase("group", (2, 64, 128, 128), "bf16", True),
    ],
    "cuda": [
        NormCase(norm, shape, dtype, channels_last)
        for norm in ("instance", "group")
        for shape in (
            (2, 32, 128, 128, 128),
            (2, 128, 32, 32, 32),
            (2, 320, 8, 8, 8),
            (8, 64, 512, 512),
            (8, 512, 64, 64),
        )
        for dtype, channels_last in (("fp16", False), ("fp16", True), ("fp32", False))
        if (norm, shape, dtype) != ("instance", (2, 32, 128, 128, 128), "fp16")
    ],
}
# The cases in which the compilers compete: all on a GPU, the slow ones on a CPU.
COMPILED = [*CASES["cuda"], *MORE["cuda"], *MORE["cpu"]]


def ours(case: NormCase) -> nn.Module:
    if case.norm == "group":
        return fusedseg.InPlaceGroupNormAct(GROUPS, case.shape[1], activation_param=SLOPE)
    return fusedseg.InPlaceInstanceNormAct(case.shape[1], affine=True, activation_param=SLOPE)


CONTENDERS = beside_stock(partial(nn.LeakyReLU, SLOPE, inplace=True), ours)


@once
def run(case: NormCase, device: torch.device) -> dict[str, Result]:
    layers = {name: CONTENDERS[name] for name in contenders_of(case, CONTENDERS, COMPILED, device.type)}
    return compete_norms(case, device, layers, SLOPE, SECONDS[device.type])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_norms(metafunc, CONTENDERS, CASES, MORE, COMPILED)


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    title = "InstanceNorm or GroupNorm and activation, forward + backward of the layer alone"
    report_norm(report, benchmark, "inplace_norm_act", title, case, run(case, device), contender)
