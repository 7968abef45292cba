"""Times linear upsampling alone, beside a copy that reads and writes as many bytes as forward or backward."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedseg.functional import upsample
from fusedseg.ops.upsample import MODES
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE

from .contenders import Treat, as_it_is, compiled
from .data import DTYPES, Source, describe
from .harness import Timing, compete, copy_of
from .jobs import LayerJob, exact_layer
from .results import COPY

SECONDS = {"cpu": 0.6, "cuda": 0.6}


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    factor: int = 2
    corners: bool = False

    def __str__(self) -> str:
        return f"{describe(*self[:3])} by {self.factor}{' corners' if self.corners else ''}"


class Stock(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, x: Tensor) -> Tensor:
        mode = MODES[x.dim() - 2]
        return F.interpolate(x, scale_factor=self.case.factor, mode=mode, align_corners=self.case.corners)


class Ours(Stock):
    def forward(self, x: Tensor) -> Tensor:
        return upsample(x, scale_factor=self.case.factor, align_corners=self.case.corners)


CONTENDERS: dict[str, tuple[type[Stock], Treat]] = {
    "eager": (Stock, as_it_is),
    "compiled": (Stock, compiled),
    "ours": (Ours, as_it_is),
}
CASES = {
    "cpu": [Case((2, 32, 64, 64), "fp32", False), Case((1, 32, 16, 24, 24), "fp32", False)],
    "cuda": [
        Case((8, 128, 256, 256), "bf16", True),
        Case((8, 128, 256, 256), "bf16", False),
        Case((8, 1024, 32, 32), "bf16", True),
        Case((8, 128, 256, 256), "bf16", True, corners=True),
        Case((2, 64, 64, 64, 64), "bf16", True),
        Case((2, 64, 64, 64, 64), "bf16", False),
    ],
}
MORE = {
    "cpu": [Case((2, 32, 64, 64), "bf16", True)],
    "cuda": [
        Case((8, 512, 64, 64), "bf16", True),
        Case((8, 256, 128, 128), "bf16", True),
        Case((8, 128, 256, 256), "fp32", False),
        Case((8, 21, 64, 64), "bf16", False, factor=8),
        Case((2, 64, 64, 64, 64), "fp32", True),
    ],
}


def test_step(case, device, report):
    source = Source(device)
    x = source.normal(*case[:3])
    size = tuple(case.factor * n for n in case.shape[2:])
    dz = source.normal((*case.shape[:2], *size), *case[1:3])
    data = {"x": x.requires_grad_(), "dz": dz}

    def build(name: str) -> LayerJob:
        made, treat = CONTENDERS[name]
        return LayerJob(made(case), data, treat)

    # Compiling takes longer than the rest.
    names = [name for name in CONTENDERS if name != "compiled" or case in MORE["cuda"]]
    dtype = DTYPES[case.dtype]
    results = compete(
        names,
        build,
        partial(exact_layer, Stock(case), data),
        {"z": FORWARD_TOLERANCE[dtype], "dx": GRADIENT_TOLERANCE[dtype]},
        Timing(device, SECONDS[device.type], ahead=device.type == "cuda"),
        # A copy reads and writes.
        probes={COPY: copy_of(torch.empty((x.numel() + dz.numel()) // 2, dtype=dtype, device=device))},
    )
    report.add("upsample", "Linear upsampling, forward and backward of the layer alone", str(case), results)
