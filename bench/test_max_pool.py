"""Times max-pooling alone: that between the stages of U-Nets, and the overlapping windows of a ResNet."""

from functools import partial
from typing import NamedTuple

from torch import nn

import fusedseg
from tests.reference import GRADIENT_TOLERANCE

from .contenders import Treat, as_it_is, compiled
from .data import DTYPES, Source, describe
from .harness import Timing, compete
from .jobs import LayerJob, exact_layer

SECONDS = {"cpu": 0.6, "cuda": 1.0}
STOCK = {4: nn.MaxPool2d, 5: nn.MaxPool3d}
OURS = {4: fusedseg.MaxPool2d, 5: fusedseg.MaxPool3d}
CONTENDERS: dict[str, tuple[dict[int, type[nn.Module]], Treat]] = {
    "eager": (STOCK, as_it_is),
    "compiled": (STOCK, compiled),
    "ours": (OURS, as_it_is),
}


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool
    window: tuple[int, int, int] = (2, 2, 0)

    def __str__(self) -> str:
        return f"{describe(*self[:3])} window {self.window[0]} stride {self.window[1]}"


def cases(shapes: list[tuple[int, ...]], overlapping: tuple[int, ...], dtypes: tuple[str, ...]) -> list[Case]:
    kinds = [(dtype, channels_last) for dtype in dtypes for channels_last in (False, True)]
    return [Case(shape, *kind) for shape in shapes for kind in kinds] + [
        Case(overlapping, *kind, (3, 2, 1)) for kind in kinds
    ]


_CPU = cases([(2, 64, 256, 256), (1, 64, 32, 48, 48)], (2, 64, 256, 256), ("fp32",))
# Overlapping windows in nchw, and volumes in nhwc, are slow: the other layout of each is not.
_SELDOM = [
    case for case in _CPU if (case.window[0], len(case.shape), case.channels_last) in ((3, 4, False), (2, 5, True))
]
CASES = {
    "cpu": [case for case in _CPU if case not in _SELDOM],
    "cuda": [Case((8, 64, 512, 512), "fp16", channels_last) for channels_last in (False, True)],
}
MORE = {
    "cpu": [*_SELDOM, *cases([(2, 64, 256, 256), (1, 64, 32, 48, 48)], (2, 64, 256, 256), ("bf16",))],
    "cuda": [
        case
        for case in cases([(8, 64, 512, 512), (2, 64, 320, 150, 26)], (128, 64, 112, 112), ("fp32", "fp16"))
        if case not in CASES["cuda"]
    ],
}


def test_step(case, device, report):
    source = Source(device)
    stock = STOCK[len(case.shape)](*case.window)
    x = source.normal(*case[:3])
    dz = source.normal(tuple(stock(x).shape), *case[1:3])
    data = {"x": x.requires_grad_(), "dz": dz}

    def build(name: str) -> LayerJob:
        made, treat = CONTENDERS[name]
        return LayerJob(made[len(case.shape)](*case.window), data, treat)

    # Compiling takes longer on a CPU than the rest.
    names = [name for name in CONTENDERS if device.type == "cuda" or name != "compiled"]
    results = compete(
        names,
        build,
        partial(exact_layer, stock, data),
        # A maximum is exact.
        {"z": 0.0, "dx": GRADIENT_TOLERANCE[DTYPES[case.dtype]]},
        Timing(device, SECONDS[device.type], ahead=device.type == "cuda"),
    )
    report.add("max_pool", "Max-pooling, forward and backward of the layer alone", str(case), results)
