"""The exact twins alone, norm and ReLU that store their input, beside the stock modules that they equal to the bit."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, gradients, norm_act

from .contenders import BATCH_NORM, aggressive, compiled
from .data import DTYPES, Source, describe, parametrize_cases
from .harness import Copy, Result, compete
from .jobs import LayerJob, as_it_is
from .replay import CLOCK, report_step
from .report import Section

SECONDS = {"cpu": 3.0, "cuda": 2.0}
GROUPS = 8
# wider than what fp32 statistics do to y: there a y within rounding of the kink counts as neither side
KINK = 1e-4
INSTANCE_NORM = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}


class Case(NamedTuple):
    norm: str
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{self.norm} {describe(*self[1:])}"


CASES = {
    "cpu": [
        Case("batch", (2, 64, 256, 256), "fp32"),
        Case("batch", (2, 64, 256, 256), "bf16"),
        Case("batch", (2, 128, 128, 128), "fp32"),
        Case("batch", (4, 256, 64, 64), "fp32", True),
        Case("batch", (8, 512, 16, 16), "fp32"),
        Case("batch", (1, 64, 32, 48, 48), "fp32"),
        Case("instance", (2, 64, 128, 128), "fp32"),
        Case("instance", (1, 64, 32, 48, 48), "fp32"),
        Case("group", (2, 64, 128, 128), "fp32"),
        Case("group", (1, 64, 32, 48, 48), "fp32"),
    ],
    "cuda": [
        *(
            Case(norm, shape, dtype, channels_last)
            for norm in ("batch", "instance", "group")
            for shape in ((8, 64, 512, 512), (8, 512, 64, 64), (2, 64, 160, 160, 32))
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
        ),
    ],
}


def stock(case: Case) -> nn.Module:
    C, dims = case.shape[1], len(case.shape) - 2
    norm: nn.Module
    if case.norm == "batch":
        norm = BATCH_NORM[dims](C)
    elif case.norm == "instance":
        norm = INSTANCE_NORM[dims](C, affine=True)
    else:
        norm = nn.GroupNorm(GROUPS, C)
    return nn.Sequential(norm, nn.ReLU(inplace=True))


def ours(case: Case) -> nn.Module:
    C = case.shape[1]
    if case.norm == "batch":
        return fusedseg.BatchNormAct(C, activation="relu")
    if case.norm == "instance":
        return fusedseg.InstanceNormAct(C, affine=True, activation="relu")
    return fusedseg.GroupNormAct(GROUPS, C, activation="relu")


CONTENDERS = {
    "eager": (stock, as_it_is),
    "compiled": (stock, compiled),
    "aggressive": (stock, aggressive),
    "ours": (ours, as_it_is),
}


def groups_of(case: Case) -> int | None:
    return {"batch": None, "instance": case.shape[1], "group": GROUPS}[case.norm]


def make_data(case: Case, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.shape[1]
    weight, bias = source.uniform(channels, 0.5, 1.5), source.uniform(channels, -0.5, 0.5)
    x, dz = source.normal(*case[1:]), source.normal(*case[1:])
    y = norm_act(x, weight, bias, activation="identity", groups=groups_of(case)).out
    dz.masked_fill_(y.abs() < KINK, 0)
    return {"x": x.requires_grad_(), "dz": dz, "weight": weight, "bias": bias}


def expected(case: Case, data: dict[str, Tensor]) -> dict[str, Tensor]:
    x, weight, bias, dz = (data[name].detach() for name in ("x", "weight", "bias", "dz"))
    options = {"activation": "relu", "param": 0.0, "groups": groups_of(case)}
    grads = gradients(dz, x, weight, bias, **options)
    assert grads.dweight is not None
    assert grads.dbias is not None
    out = norm_act(x, weight, bias, **options).out  # type: ignore[arg-type]
    return {"z": out, "dx": grads.dx, "dweight": grads.dweight, "dbias": grads.dbias}


@cache
def run(case: Case, device: torch.device) -> dict[str, Result]:
    data = make_data(case, device)

    def build(name: str) -> LayerJob:
        layer, treat = CONTENDERS[name]
        return LayerJob(treat(layer(case).to(device)), data)

    dtype = DTYPES[case.dtype]
    return compete(
        {name: partial(build, name) for name in CONTENDERS},
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
    section = report.section("norm_act", Section("Norm and ReLU that store their input, forward + backward alone"))
    results = section.cases[str(case)] = run(case, device)
    section.tensor_bytes[str(case)] = torch.Size(case.shape).numel() * DTYPES[case.dtype].itemsize
    report_step(benchmark, f"step of {case}", contender, results[contender])
