"""One training step of stock networks: unchanged, compiled, and converted (ours).

The networks are small copies of those in libraries; ``tests/conversion/test_packages.py`` has the real ones.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fusedseg
from fusedseg.unet import UNet
from tests.resnet import ResNet18, ResNet50

from .contenders import Treat, as_it_is, compiled, leaky, relu
from .data import memory_format_of
from .harness import Timing
from .jobs import NetJob, compete_networks

CLASSES = 4


class Segments(ResNet18):
    """The features of a ResNet as (N, CLASSES, height, width)."""

    def __init__(self, width: int) -> None:
        super().__init__(CLASSES, width)
        self.pool, self.fc = nn.Identity(), nn.Identity()
        self.head = nn.Conv2d(8 * width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.head(self.layers(self.stem(x))), size=x.shape[2:], mode="bilinear")


WAYS: dict[str, Treat] = {"eager": as_it_is, "compiled": compiled, "ours": fusedseg.convert}
SECONDS = {"cpu": 2.0, "cuda": 6.0}


class Case(NamedTuple):
    title: str
    make: partial
    shape: tuple[int, ...]
    amp: bool = False
    channels_last: bool = False
    # Whether there is a class for each position instead of one for each sample.
    dense: bool = True
    # Inductor takes minutes for some networks on a CPU.
    compile: bool = False

    def __str__(self) -> str:
        return self.title

    def contenders(self) -> list[str]:
        return [name for name in WAYS if self.compile or name != "compiled"]


def unet(dims: int, *widths: int, **options) -> partial:
    return partial(UNet, 3, CLASSES, dims=dims, widths=widths, plain=True, **options)


CASES = {
    "cpu": [
        Case("3D U-Net, InstanceNorm, 2x3x32x32x32", unet(3, 12, 24, 48, norm_act="instance"), (2, 3, 32, 32, 32)),
        Case("ResNet-18 of half the width, 4x3x128x128", partial(Segments, 32), (4, 3, 128, 128)),
    ],
    "cuda": [
        Case(
            "ResNet-50, 128x3x224x224 amp nhwc",
            partial(ResNet50, CLASSES),
            (128, 3, 224, 224),
            amp=True,
            channels_last=True,
            dense=False,
            compile=True,
        ),
    ],
}
MORE = {
    "cpu": [
        Case("U-Net, ReLU, 2x3x128x128", unet(2, 32, 64, 128, norm_act=relu(2)), (2, 3, 128, 128)),
        Case("U-Net, InstanceNorm, 2x3x128x128", unet(2, 32, 64, 128, norm_act="instance"), (2, 3, 128, 128)),
        Case("U-Net, LeakyReLU, 2x3x128x128", unet(2, 32, 64, 128, norm_act=leaky(2)), (2, 3, 128, 128)),
    ],
    "cuda": [
        Case("U-Net, ReLU, 8x3x512x512", unet(2, 64, 128, 256, 512, norm_act=relu(2)), (8, 3, 512, 512)),
        Case("3D U-Net, InstanceNorm, 2x3x96x96x96", unet(3, 32, 64, 128, norm_act="instance"), (2, 3, 96, 96, 96)),
        Case("ResNet-18, 128x3x224x224", partial(Segments, 64), (128, 3, 224, 224)),
    ],
}


def test_step(case, device, report):
    torch.manual_seed(0)
    memory_format = memory_format_of(len(case.shape), case.channels_last)
    x = torch.randn(case.shape, device=device).to(memory_format=memory_format)
    target = torch.randint(CLASSES, (case.shape[0], *(case.shape[2:] if case.dense else ())), device=device)
    state = case.make().state_dict()

    def build(name: str) -> NetJob:
        net = case.make()
        net.load_state_dict(state)
        return NetJob(WAYS[name](net.to(device, memory_format=memory_format)), x, target, case.amp)

    results = compete_networks(case.contenders(), build, case.amp, Timing(device, SECONDS[device.type]))
    report.add("convert", "fusedseg.convert of stock networks, a training step", str(case), results)
