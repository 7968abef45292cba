"""Times a training step of convolution, BatchNorm and activation as one layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusedseg
from fusedseg.ops.conv.choice import tf32_allowed
from fusedseg.ops.conv.geometry import Geometry
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, convolve, norm_act

from .contenders import SLOPE, Treat, as_it_is, compiled, leaky
from .data import DTYPES, Source, describe
from .harness import Timing, compete
from .jobs import ReadingJob, exact_layer

SECONDS = 1.0
CONV = {2: nn.Conv2d, 3: nn.Conv3d}
CONV_ABN = {2: fusedseg.ConvABN2d, 3: fusedseg.ConvABN3d}
# Wider than the errors of y from rounding the convolution's output, and from TF32 in fp32 on a GPU.
KINK = {"fp32": 4e-3, "bf16": 2e-2, "fp16": 4e-3}
# TF32 keeps as many bits of the factors as fp16 does, and some hardware cuts off the rest without rounding.
TF32_FORWARD, TF32_GRADIENT = 1e-3, 2e-3


class Case(NamedTuple):
    """A convolution of odd kernel size, padded to keep the spatial size, without bias, as before every norm."""

    shape: tuple[int, ...]
    out_channels: int
    kernel: int
    dtype: str
    channels_last: bool = False

    def __str__(self) -> str:
        dims = len(self.shape) - 2
        kernel = "x".join([str(self.kernel)] * dims)
        return f"{describe(self.shape, self.dtype, self.channels_last)}, {kernel} to {self.out_channels}"

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.shape[1], *[self.kernel] * (len(self.shape) - 2))

    @property
    def geometry(self) -> Geometry:
        dims = len(self.shape) - 2
        return Geometry((1,) * dims, (self.kernel // 2,) * dims, (1,) * dims, 1)


CASES = {
    "cpu": [
        Case((2, 32, 96, 96), 32, 3, "fp32"),
        Case((2, 64, 64, 64), 64, 3, "fp32", True),
        Case((2, 64, 128, 128), 32, 1, "fp32", True),
        Case((1, 16, 16, 24, 24), 32, 3, "fp32"),
    ],
    "cuda": [
        Case((8, 64, 512, 512), 64, 1, "bf16", True),
        Case((8, 64, 512, 512), 64, 1, "bf16"),
        Case((8, 512, 64, 64), 256, 1, "bf16", True),
        Case((8, 64, 512, 512), 64, 3, "bf16", True),
        Case((8, 128, 256, 256), 128, 3, "bf16", True),
    ],
}
MORE = {
    "cpu": [Case((2, 32, 64, 64), 32, 3, "fp32")],
    "cuda": [
        # The levels of the 2D U-Net.
        *(
            Case((8, channels, size, size), channels, 3, "bf16", channels_last)
            for channels, size in ((32, 512), (64, 512), (128, 256), (256, 128), (512, 64))
            for channels_last in (True, False)
            if not channels_last or channels not in (64, 128)
        ),
        # The top of the decoder.
        Case((8, 128, 512, 512), 64, 3, "bf16", True),
        Case((8, 64, 512, 512), 64, 3, "fp16", True),
        Case((8, 64, 512, 512), 64, 3, "fp32", True),
        *(
            Case((8, channels, size, size), out, 1, "bf16", channels_last)
            for channels, out, size in ((32, 32, 512), (128, 64, 256), (256, 256, 128), (512, 256, 64))
            for channels_last in (True, False)
            if not channels_last or channels != 512
        ),
        # The levels of the large 3D U-Net.
        *(
            Case((2, channels, *size), channels, 3, "fp16", True)
            for channels, size in (
                (32, (320, 150, 26)),
                (64, (320, 150, 26)),
                (128, (160, 75, 13)),
                (256, (80, 37, 6)),
                (512, (40, 18, 3)),
            )
        ),
        Case((2, 64, 320, 150, 26), 64, 3, "fp16"),
        Case((2, 256, 80, 37, 6), 256, 3, "fp16"),
        Case((2, 64, 320, 150, 26), 64, 1, "fp16", True),
        Case((2, 64, 320, 150, 26), 64, 1, "fp16"),
        Case((2, 256, 80, 37, 6), 256, 1, "fp16", True),
    ],
}


def stock(dims: int, in_channels: int, out_channels: int, *args: Any, **options: Any) -> nn.Module:
    conv = CONV[dims](in_channels, out_channels, *args, **options)
    return nn.Sequential(conv, *leaky(dims)(out_channels).children())


def conv_abn(conv_backend: str) -> Callable[..., nn.Module]:
    return lambda dims, *args, **options: CONV_ABN[dims](*args, conv_backend=conv_backend, **options)


# name: (a function of dimensions and a convolution's arguments that builds the layer, how it is treated)
CONTENDERS: dict[str, tuple[Callable[..., nn.Module], Treat]] = {
    "eager": (stock, as_it_is),
    "compiled": (stock, compiled),
    "ours": (conv_abn("auto"), as_it_is),
    "ours-triton": (conv_abn("triton"), as_it_is),
    "ours-aten": (conv_abn("aten"), as_it_is),
}


def contenders(case: Case, kind: str) -> list[str]:
    """Without a GPU "auto" is "aten", Triton cannot run, and the compiler competes in slow cases only."""
    if kind == "cuda":
        return list(CONTENDERS)
    return ["eager", "compiled", "ours"] if case in MORE["cpu"] else ["eager", "ours"]


def make_data(case: Case, device: torch.device) -> dict[str, Tensor]:
    source, channels = Source(device), case.out_channels
    layout = case.dtype, case.channels_last
    fan_in = torch.Size(case.weight_shape[1:]).numel()
    data = {
        "x": source.normal(case.shape, *layout, mean=0.5),
        "dz": source.normal((case.shape[0], channels, *case.shape[2:]), *layout),
        "conv_weight": source.normal(case.weight_shape, *layout, std=fan_in**-0.5),
        "weight": source.uniform(channels, 0.5, 1.5),
        "bias": source.uniform(channels, -0.5, 0.5),
    }
    # Rounding may move a y near the kink to the other slope, which would count as an error; its dz is 0.
    y = convolve(data["x"], data["conv_weight"], None, *case.geometry)
    y = norm_act(y, data["weight"], data["bias"], activation="identity").out
    data["dz"].masked_fill_(y.abs() < KINK[case.dtype], 0)
    data["x"].requires_grad_()
    return data


def expected(case: Case, data: dict[str, Tensor]) -> dict[str, Tensor]:
    def layer(x: Tensor, conv_weight: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return norm_act(convolve(x, conv_weight, None, *case.geometry), weight, bias, param=SLOPE).out

    return exact_layer(layer, data)


def tolerance(case: Case, device: torch.device) -> tuple[float, float]:
    """The tolerances of outputs and of gradients."""
    if case.dtype == "fp32" and device.type == "cuda" and tf32_allowed():
        return TF32_FORWARD, TF32_GRADIENT
    return FORWARD_TOLERANCE[DTYPES[case.dtype]], GRADIENT_TOLERANCE[DTYPES[case.dtype]]


def module(name: str, case: Case, device: torch.device, data: dict[str, Tensor]) -> nn.Module:
    """The module of a contender as under autocast: the norm in fp32, the convolution in the dtype of x."""
    made = CONTENDERS[name][0](
        len(case.shape) - 2, case.shape[1], case.out_channels, case.kernel, padding=case.kernel // 2, bias=False
    ).to(device)
    for child in made.modules():
        if isinstance(child, tuple(CONV.values())):
            # The weight gets the memory format of the data; copying values would not change its format.
            child.weight = nn.Parameter(torch.empty_like(data["conv_weight"]))
    return made


def test_step(case, device, report):
    data = make_data(case, device)
    output, gradient = tolerance(case, device)

    def build(name: str) -> ReadingJob:
        return ReadingJob(module(name, case, device, data), data, CONTENDERS[name][1])

    results = compete(
        contenders(case, device.type),
        build,
        lambda: expected(case, data),
        {"z": output, **dict.fromkeys(("dx", "dconv_weight", "dweight", "dbias"), gradient)},
        Timing(device, SECONDS, ahead=device.type == "cuda"),
    )
    title = "Convolution, BatchNorm and activation, forward and backward of the layer alone"
    report.add("conv_abn", title, str(case), results)
