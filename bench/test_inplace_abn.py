"""BatchNorm and its activation alone, on tensors from the stages of real U-Nets."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, gradients, norm_act

from .contenders import CONTENDERS, SLOPE
from .data import DTYPES, Source, describe, parametrize_cases
from .harness import Copy, Result, compete
from .jobs import LayerJob
from .replay import CLOCK, report_step
from .report import Section

SECONDS = {"cpu": 3.0, "cuda": 2.0}
# wider than what fp32 statistics do to y
KINK = 1e-4


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        return describe(*self)


CASES = {
    "cpu": [
        Case((2, 64, 256, 256), "fp32"),
        Case((2, 64, 256, 256), "fp32", True),
        Case((2, 64, 256, 256), "bf16"),
        Case((2, 128, 128, 128), "fp32"),
        Case((2, 128, 128, 128), "bf16", True),
        Case((4, 256, 64, 64), "fp32", True),
        Case((4, 256, 64, 64), "fp16"),
        Case((8, 512, 16, 16), "fp32"),
        Case((8, 512, 16, 16), "bf16", True),
        Case((1, 64, 32, 48, 48), "fp32"),
        Case((1, 64, 32, 48, 48), "bf16", True),
    ],
    "cuda": [
        *(
            Case((8, channels, size, size), dtype, channels_last)
            for channels, size in ((64, 512), (128, 256), (256, 128), (512, 64), (1024, 32))
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
        ),
        Case((8, 64, 512, 512), "fp16", True),
        Case((8, 64, 512, 512), "fp32", True),
        # the first convolution of a ResNet-18 at batch 128, and both ends of the large 3D U-Net
        Case((128, 64, 112, 112), "fp16", True),
        Case((2, 64, 320, 150, 26), "fp16"),
        Case((2, 64, 320, 150, 26), "fp16", True),
        Case((2, 512, 40, 18, 3), "fp16"),
    ],
}


def make_data(case: Case, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.shape[1]
    # above zero: inplace_abn takes the absolute value
    weight, bias = source.uniform(channels, 0.5, 1.5), source.uniform(channels, -0.5, 0.5)
    x, dz = source.normal(*case), source.normal(*case)
    # a y within rounding of the kink has one slope here and another there, and its dz would count against either
    y = norm_act(x, weight, bias, activation="identity").out
    dz.masked_fill_(y.abs() < KINK, 0)
    return {"x": x.requires_grad_(), "dz": dz, "weight": weight, "bias": bias}


def expected(data: dict[str, Tensor], slope: float) -> dict[str, Tensor]:
    x, weight, bias, dz = (data[name].detach() for name in ("x", "weight", "bias", "dz"))
    grads = gradients(dz, x, weight, bias, param=slope)
    assert grads.dweight is not None
    assert grads.dbias is not None
    out = norm_act(x, weight, bias, param=slope).out
    return {"z": out, "dx": grads.dx, "dweight": grads.dweight, "dbias": grads.dbias}


@cache
def run(case: Case, device: torch.device) -> dict[str, Result]:
    data = make_data(case, device)

    def build(name: str) -> LayerJob:
        layer, treat = CONTENDERS[name]
        return LayerJob(treat(layer(len(case.shape) - 2)(case.shape[1]).to(device)), data)

    dtype = DTYPES[case.dtype]
    return compete(
        {name: partial(build, name) for name in CONTENDERS},
        {"": lambda: expected(data, SLOPE), "relu": lambda: expected(data, 0.0)},
        {"z": FORWARD_TOLERANCE[dtype], **dict.fromkeys(("dx", "dweight", "dbias"), GRADIENT_TOLERANCE[dtype])},
        device,
        SECONDS[device.type],
        probes={"copy": Copy(data["x"])},
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_cases(metafunc, CASES)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("contender", CONTENDERS)
def test_step(case, contender, device, report, benchmark):
    section = report.section("inplace_abn", Section("BatchNorm and activation, forward + backward of the layer alone"))
    results = section.cases[str(case)] = run(case, device)
    section.tensor_bytes[str(case)] = torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize
    report_step(benchmark, f"step of {case}", contender, results[contender])
