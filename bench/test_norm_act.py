"""Times the exact fused modules of norm and ReLU beside the stock modules, which they equal bit for bit."""

from functools import partial

import pytest
import torch
from torch import nn

import fusedseg

from .harness import Result, once
from .norm_layers import GROUPS, NormCase, beside_stock, compete_norms, contenders_of, parametrize_norms, report_norm
from .replay import CLOCK

SECONDS = {"cpu": 1.0, "cuda": 1.0}
CASES = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "fp32"),
        NormCase("batch", (2, 128, 128, 128), "fp32"),
        NormCase("batch", (4, 256, 64, 64), "fp32", True),
        NormCase("batch", (8, 512, 16, 16), "fp32"),
        NormCase("instance", (2, 64, 128, 128), "fp32"),
        NormCase("group", (2, 64, 128, 128), "fp32"),
    ],
    "cuda": [NormCase("batch", (8, 64, 512, 512), "bf16", True)],
}
MORE = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "bf16"),
        NormCase("batch", (1, 64, 32, 48, 48), "fp32"),
        NormCase("instance", (1, 64, 32, 48, 48), "fp32"),
        NormCase("group", (1, 64, 32, 48, 48), "fp32"),
    ],
    "cuda": [
        *(
            NormCase(norm, shape, dtype, channels_last)
            for norm in ("batch", "instance", "group")
            for shape in ((8, 64, 512, 512), (8, 512, 64, 64), (2, 64, 160, 160, 32))
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
            if (norm, shape, channels_last) != ("batch", (8, 64, 512, 512), True)
        ),
    ],
}
# The cases in which the compilers compete: all on a GPU, the slow ones on a CPU.
COMPILED = [*CASES["cuda"], *MORE["cuda"], *MORE["cpu"]]


def ours(case: NormCase) -> nn.Module:
    C = case.shape[1]
    if case.norm == "batch":
        return fusedseg.BatchNormAct(C, activation="relu")
    if case.norm == "instance":
        return fusedseg.InstanceNormAct(C, affine=True, activation="relu")
    return fusedseg.GroupNormAct(GROUPS, C, activation="relu")


CONTENDERS = beside_stock(partial(nn.ReLU, inplace=True), ours)


@once
def run(case: NormCase, device: torch.device) -> dict[str, Result]:
    layers = {name: CONTENDERS[name] for name in contenders_of(case, CONTENDERS, COMPILED, device.type)}
    return compete_norms(case, device, layers, 0.0, SECONDS[device.type])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_norms(metafunc, CONTENDERS, CASES, MORE, COMPILED)


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    title = "Norm and ReLU that store their input, forward + backward of the layer alone"
    report_norm(report, benchmark, "norm_act", title, case, run(case, device), contender)
