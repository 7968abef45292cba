"""Times a norm and its activation as a single layer, on tensors from the stages of real U-Nets.

With LeakyReLU ours is in place and keeps its output.  With ReLU it is the exact fused module, which keeps its input.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fusedseg
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, norm_act

from .contenders import SLOPE, Foreign, Treat, aggressive, as_it_is, batch_norm, compiled, instance_norm
from .data import DTYPES, Source, describe
from .harness import Missing, Timing, compete, copy_of
from .jobs import LayerJob, exact_layer
from .results import COPY

SECONDS = 1.0
GROUPS = 8
# Wider than the errors that fp32 statistics cause in y.
KINK = 1e-4


class NormCase(NamedTuple):
    """norm: "batch", "instance" or "group".  relu: whether the activation is ReLU instead of LeakyReLU."""

    norm: str
    shape: tuple[int, ...]
    dtype: str
    channels_last: bool = False
    relu: bool = False

    def __str__(self) -> str:
        return f"{self.norm} {describe(*self[1:4])}{', ReLU' * self.relu}"

    @property
    def groups(self) -> int | None:
        return {"batch": None, "instance": self.shape[1], "group": GROUPS}[self.norm]

    @property
    def slope(self) -> float:
        return 0.0 if self.relu else SLOPE


# The same case for the op that keeps its input, with ReLU.
exact = partial(NormCase, relu=True)


LARGE, FLAT, DEEP = (8, 64, 512, 512), (8, 512, 64, 64), (2, 64, 160, 160, 32)
VOLUME = (2, 32, 128, 128, 128)
CASES = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "fp32"),
        NormCase("batch", (2, 128, 128, 128), "fp32"),
        NormCase("batch", (4, 256, 64, 64), "fp32", True),
        NormCase("batch", (4, 256, 64, 64), "fp16"),
        NormCase("batch", (8, 512, 16, 16), "fp32"),
        NormCase("batch", (1, 64, 32, 48, 48), "fp32"),
        # Both ends of an nnU-Net for patches of 48, and a stage of a U-Net.
        NormCase("instance", (2, 32, 48, 48, 48), "fp32", True),
        NormCase("instance", (2, 320, 6, 6, 6), "fp32"),
        NormCase("instance", (2, 64, 128, 128), "fp32"),
        NormCase("instance", (2, 64, 128, 128), "bf16", True),
        NormCase("group", (2, 64, 128, 128), "fp32"),
        exact("batch", (2, 64, 256, 256), "fp32"),
        exact("batch", (2, 128, 128, 128), "fp32"),
        exact("batch", (4, 256, 64, 64), "fp32", True),
        exact("batch", (8, 512, 16, 16), "fp32"),
        exact("instance", (2, 64, 128, 128), "fp32"),
        exact("group", (2, 64, 128, 128), "fp32"),
    ],
    "cuda": [
        # Large tensors, and tensors that fit in L2 or in the registers of a multiprocessor.
        NormCase("batch", LARGE, "bf16"),
        NormCase("batch", LARGE, "bf16", True),
        NormCase("batch", LARGE, "fp16"),
        NormCase("batch", LARGE, "fp16", True),
        NormCase("batch", (8, 512, 32, 32), "bf16"),
        NormCase("batch", (8, 512, 32, 32), "bf16", True),
        NormCase("batch", (8, 256, 16, 16), "bf16"),
        NormCase("batch", (8, 256, 16, 16), "bf16", True),
        NormCase("instance", VOLUME, "fp16"),
        NormCase("instance", VOLUME, "fp16", True),
        exact("batch", LARGE, "bf16", True),
    ],
}
MORE = {
    "cpu": [
        NormCase("batch", (2, 64, 256, 256), "fp32", True),
        NormCase("batch", (2, 64, 256, 256), "bf16"),
        NormCase("batch", (2, 128, 128, 128), "bf16", True),
        NormCase("batch", (8, 512, 16, 16), "bf16", True),
        NormCase("batch", (1, 64, 32, 48, 48), "bf16", True),
        NormCase("instance", (2, 32, 48, 48, 48), "fp32"),
        NormCase("instance", (2, 32, 48, 48, 48), "bf16", True),
        NormCase("instance", (2, 320, 6, 6, 6), "fp32", True),
        NormCase("group", (2, 32, 48, 48, 48), "fp32"),
        NormCase("group", (2, 32, 48, 48, 48), "fp32", True),
        NormCase("group", (2, 320, 6, 6, 6), "fp32"),
        NormCase("group", (2, 64, 128, 128), "bf16", True),
        exact("batch", (2, 64, 256, 256), "bf16"),
        exact("batch", (1, 64, 32, 48, 48), "fp32"),
        exact("instance", (1, 64, 32, 48, 48), "fp32"),
        exact("group", (1, 64, 32, 48, 48), "fp32"),
    ],
    "cuda": [
        *(
            NormCase("batch", (8, channels, size, size), dtype, channels_last)
            for channels, size in ((128, 256), (256, 128), (512, 64), (1024, 32))
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
        ),
        NormCase("batch", LARGE, "fp32"),
        NormCase("batch", LARGE, "fp32", True),
        # The first convolution of a ResNet-18 at batch 128, and both ends of the large 3D U-Net.
        NormCase("batch", (128, 64, 112, 112), "fp16", True),
        NormCase("batch", (2, 64, 320, 150, 26), "fp16"),
        NormCase("batch", (2, 64, 320, 150, 26), "fp16", True),
        NormCase("batch", (2, 512, 40, 18, 3), "fp16"),
        *(
            NormCase(norm, shape, dtype, channels_last)
            for norm in ("instance", "group")
            for shape in (VOLUME, (2, 128, 32, 32, 32), (2, 320, 8, 8, 8), LARGE, FLAT)
            for dtype, channels_last in (("fp16", False), ("fp16", True), ("fp32", False))
            if (norm, shape, dtype) != ("instance", VOLUME, "fp16")
        ),
        *(
            exact(norm, shape, dtype, channels_last)
            for norm in ("batch", "instance", "group")
            for shape in (LARGE, FLAT, DEEP)
            for dtype, channels_last in (("bf16", False), ("bf16", True), ("fp32", False))
            if (norm, shape, channels_last) != ("batch", LARGE, True)
        ),
    ],
}


def stock(case: NormCase) -> nn.Module:
    C, dims = case.shape[1], len(case.shape) - 2
    activation = nn.ReLU(inplace=True) if case.relu else nn.LeakyReLU(SLOPE, inplace=True)
    if case.norm == "group":
        return nn.Sequential(nn.GroupNorm(GROUPS, C), activation)
    return nn.Sequential((batch_norm if case.norm == "batch" else instance_norm)(dims, C), activation)


def ours(case: NormCase) -> nn.Module:
    C = case.shape[1]
    act = {"activation": "relu"} if case.relu else {"activation_param": SLOPE}
    in_place, exact = {
        "batch": (fusedseg.InPlaceABN, fusedseg.BatchNormAct),
        "instance": (fusedseg.InPlaceInstanceNormAct, fusedseg.InstanceNormAct),
        "group": (fusedseg.InPlaceGroupNormAct, fusedseg.GroupNormAct),
    }[case.norm]
    made = exact if case.relu else in_place
    if case.norm == "group":
        return made(GROUPS, C, **act)
    return made(C, affine=True, **act)


def inplace_abn(case: NormCase) -> nn.Module:
    """The layer of the paper's authors.  Its build imports torch: ``pip install --no-build-isolation inplace-abn``."""
    try:
        from inplace_abn import InPlaceABN
    except ImportError as error:
        raise Missing(f"inplace_abn is not here: {error}") from error
    return Foreign(InPlaceABN(case.shape[1], activation="leaky_relu", activation_param=SLOPE))


CONTENDERS: dict[str, tuple[Callable[[NormCase], nn.Module], Treat]] = {
    "eager": (stock, as_it_is),
    "compiled": (stock, compiled),
    "aggressive": (stock, aggressive),
    "ours": (ours, as_it_is),
    "inplace_abn": (inplace_abn, as_it_is),
}


def contenders(case: NormCase, kind: str) -> list[str]:
    """On a CPU the compiler competes in slow cases only, because a C++ compiler takes seconds for each.

    The aggressive compiler does not compete there: a norm and an activation have little that it could recompute.
    """
    if kind == "cuda":
        theirs = case.norm == "batch" and not case.relu
        return [name for name in CONTENDERS if theirs or name != "inplace_abn"]
    return ["eager", "compiled", "ours"] if case in MORE["cpu"] else ["eager", "ours"]


def make_data(case: NormCase, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.shape[1]
    weight, bias = source.uniform(channels, 0.5, 1.5), source.uniform(channels, -0.5, 0.5)
    x, dz = source.normal(*case[1:4]), source.normal(*case[1:4])
    # Rounding may move a y near the kink to the other slope, which would count as an error; its dz is 0.
    y = norm_act(x, weight, bias, activation="identity", groups=case.groups).out
    dz.masked_fill_(y.abs() < KINK, 0)
    return {"x": x.requires_grad_(), "dz": dz, "weight": weight, "bias": bias}


def expected(case: NormCase, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float64 results of the norm and a leaky_relu; with a slope of 0 it is relu."""
    return exact_layer(lambda *given: norm_act(*given, param=case.slope, groups=case.groups).out, data)


def test_step(case, device, report):
    data, dtype = make_data(case, device), DTYPES[case.dtype]

    def build(name: str) -> LayerJob:
        layer, treat = CONTENDERS[name]
        return LayerJob(layer(case).to(device), data, treat)

    results = compete(
        contenders(case, device.type),
        build,
        partial(expected, case, data),
        {"z": FORWARD_TOLERANCE[dtype], **dict.fromkeys(("dx", "dweight", "dbias"), GRADIENT_TOLERANCE[dtype])},
        Timing(device, SECONDS, ahead=device.type == "cuda"),
        probes={COPY: copy_of(data["x"])},
    )
    nbytes = torch.Size(case.shape).numel() * dtype.itemsize
    report.add("norm_act", "Norm and activation, forward and backward of the layer alone", str(case), results, nbytes)
