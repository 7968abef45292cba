"""InstanceNorm and GroupNorm with their activation, alone, on tensors from the stages of real U-Nets."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, gradients, norm_act

from .contenders import SLOPE, aggressive, compiled
from .data import DTYPES, Source, describe, parametrize_cases
from .harness import Copy, Result, compete
from .jobs import LayerJob, as_it_is
from .replay import CLOCK, report_step
from .report import Section

SECONDS = {"cpu": 2.0, "cuda": 2.0}
# wider than what fp32 statistics do to y
KINK = 1e-4
GROUPS = 8
INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
CONTENDERS = {"eager": as_it_is, "compiled": compiled, "aggressive": aggressive, "ours": as_it_is}


class Case(NamedTuple):
    norm: str
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{self.norm} {describe(*self[1:])}"

    @property
    def groups(self) -> int:
        return GROUPS if self.norm == "group" else self.shape[1]


CASES = {
    "cpu": [
        # both ends of an nnU-Net of patches of 48, and a stage of a U-Net
        Case("instance", (2, 32, 48, 48, 48), "fp32"),
        Case("instance", (2, 32, 48, 48, 48), "fp32", True),
        Case("instance", (2, 32, 48, 48, 48), "bf16", True),
        Case("instance", (2, 320, 6, 6, 6), "fp32"),
        Case("instance", (2, 320, 6, 6, 6), "fp32", True),
        Case("instance", (2, 64, 128, 128), "fp32"),
        Case("instance", (2, 64, 128, 128), "bf16", True),
        Case("group", (2, 32, 48, 48, 48), "fp32"),
        Case("group", (2, 32, 48, 48, 48), "fp32", True),
        Case("group", (2, 320, 6, 6, 6), "fp32"),
        Case("group", (2, 64, 128, 128), "fp32"),
        Case("group", (2, 64, 128, 128), "bf16", True),
    ],
    "cuda": [
        Case(norm, shape, dtype, channels_last)
        for norm in ("instance", "group")
        for shape in (
            (2, 32, 128, 128, 128),
            (2, 128, 32, 32, 32),
            (2, 320, 8, 8, 8),
            (8, 64, 512, 512),
            (8, 512, 64, 64),
        )
        for dtype, channels_last in (("fp16", False), ("fp16", True), ("fp32", False))
    ],
}


def make_data(case: Case, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.shape[1]
    weight, bias = source.uniform(channels, 0.5, 1.5), source.uniform(channels, -0.5, 0.5)
    x, dz = source.normal(*case[1:]), source.normal(*case[1:])
    # a y within rounding of the kink has one slope here and another there, and its dz would count against either
    dz.masked_fill_(norm_act(x, weight, bias, activation="identity", groups=case.groups).out.abs() < KINK, 0)
    return {"x": x.requires_grad_(), "dz": dz, "weight": weight, "bias": bias}


def expected(case: Case, data: dict[str, Tensor]) -> dict[str, Tensor | None]:
    x, weight, bias, dz = (data[name].detach() for name in ("x", "weight", "bias", "dz"))
    grads = gradients(dz, x, weight, bias, param=SLOPE, groups=case.groups)
    out = norm_act(x, weight, bias, param=SLOPE, groups=case.groups).out
    return {"z": out, "dx": grads.dx, "dweight": grads.dweight, "dbias": grads.dbias}


def build(name: str, case: Case, data: dict[str, Tensor], device: torch.device) -> LayerJob:
    channels, dims = case.shape[1], len(case.shape) - 2
    if name == "ours":
        if case.norm == "group":
            layer: nn.Module = fusedseg.InPlaceGroupNormAct(GROUPS, channels, activation_param=SLOPE)
        else:
            layer = fusedseg.InPlaceInstanceNormAct(channels, affine=True, activation_param=SLOPE)
    else:
        norm = nn.GroupNorm(GROUPS, channels) if case.norm == "group" else INSTANCE_NORM[dims](channels, affine=True)
        layer = nn.Sequential(norm, nn.LeakyReLU(SLOPE, inplace=True))
    return LayerJob(CONTENDERS[name](layer.to(device)), data)


@cache
def run(case: Case, device: torch.device) -> dict[str, Result]:
    data, dtype = make_data(case, device), DTYPES[case.dtype]
    return compete(
        {name: partial(build, name, case, data, device) for name in CONTENDERS},
        {"": lambda: expected(case, data)},
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
    title = "InstanceNorm or GroupNorm and activation, forward + backward of the layer alone"
    section = report.section("inplace_norm_act", Section(title))
    results = section.cases[str(case)] = run(case, device)
    section.tensor_bytes[str(case)] = torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize
    report_step(benchmark, f"step of {case}", contender, results[contender])
