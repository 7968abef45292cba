"""Times one training step of a whole network: forward, cross entropy and backward.

Ours is the default network of ``fusedseg.unet``.  The others are the same network of stock modules, with their norm.

The table of four networks in docs/results.md comes from this bench; ``python -m bench.report bench/out`` prints it
in Markdown::

    pytest bench/test_unet.py -m "slow or not slow"
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedseg.unet import MultiEncoderUNet, lidar_optical_unet, unet3d_large, unet3d_small

from .contenders import Treat, aggressive, as_it_is, checkpointed, compiled, instance_norm, leaky
from .data import memory_format_of
from .harness import Timing
from .jobs import NetJob, compete_networks

CLASSES = 4
SECONDS = {"cpu": 2.0, "cuda": 6.0}


WAYS: dict[str, Treat] = {
    "eager": as_it_is,
    "compiled": compiled,
    "aggressive": aggressive,
    "ours": as_it_is,
    "checkpoint": checkpointed,
}


class Images(nn.Module):
    """A network of several images that is called with one tensor of all their channels."""

    def __init__(self, net: nn.Module, channels: tuple[int, ...]) -> None:
        super().__init__()
        self.net, self.channels = net, list(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(*x.split(self.channels, dim=1))


class Case(NamedTuple):
    """A network and its input.  Several images are one tensor, which is split by channels."""

    title: str
    channels: tuple[int, ...]
    size: tuple[int, ...]
    batch: int
    options: dict[str, Any]
    dtype: str = "fp32"
    channels_last: bool = False
    make: Callable[..., nn.Module] = MultiEncoderUNet
    # The norm, if it is not BatchNorm.
    instance: bool = False
    both_compilers: bool = True

    def __str__(self) -> str:
        shape = "x".join(map(str, (self.batch, sum(self.channels), *self.size)))
        return f"{self.title}, {shape} {self.dtype} {'nhwc' if self.channels_last else 'nchw'}"

    def network(self, name: str) -> nn.Module:
        """The network of a contender before its treatment.  All have the same parameters in the same order.

        Ours has the default modules, or in-place instance norms.  The others have stock modules.
        """
        one = self.make in (unet3d_large, unet3d_small)
        channels: Any = self.channels[0] if one else self.channels
        options = dict(self.options)
        if name != "ours":
            norm = {"norm": instance_norm} if self.instance else {}
            options |= {"norm_act": leaky(len(self.size), **norm), "plain": True}
        elif self.instance:
            options |= {"norm_act": "instance"}
        return Images(self.make(channels, CLASSES, **options), self.channels)

    def contenders(self) -> list[str]:
        return [name for name in WAYS if self.both_compilers or name != "aggressive"]

    def memory_format(self) -> torch.memory_format:
        return memory_format_of(len(self.size) + 2, self.channels_last)


WIDTHS = (64, 128, 256, 512, 1024)
# The widths of nnU-Net's plain networks for patches of 128.
NNUNET = (32, 64, 128, 256, 320)
UNET3D = partial(MultiEncoderUNet, dims=3)
# The presets with their structure, at reduced sizes.
LIDAR_OPTICAL = {"widths": (16, 32, 64)}
LARGE = {"widths": (12, 24, 48, 96, 96), "up_widths": (48, 24, 12, 12)}
SMALL = {"widths": (12, 24, 48, 48), "up_widths": (48, 24, 12)}
CASES = {
    # For the compiler's sake: it takes about as long for each level of the U-Net below.
    "cpu": [Case("small U-Net", (3,), (128, 128), 2, {"widths": (32, 64)}, both_compilers=False)],
    "cuda": [
        Case("U-Net", (3,), (512, 512), 8, {"widths": WIDTHS}, "amp", True),
        Case(
            "3D U-Net, InstanceNorm",
            (1,),
            (128, 128, 128),
            2,
            {"widths": NNUNET},
            "amp",
            channels_last=True,
            make=UNET3D,
            instance=True,
        ),
    ],
}
MORE = {
    "cpu": [
        Case("U-Net", (3,), (128, 128), 2, {"widths": (32, 64, 128)}),
        Case("two encoders", (5, 3), (96, 96), 2, LIDAR_OPTICAL, make=lidar_optical_unet),
        # Two volumes, because torch convolves one small volume in a slow loop, which would flatter ours.
        Case("3D large", (1,), (32, 32, 32), 2, LARGE, make=unet3d_large),
        Case("3D small", (1,), (32, 32, 32), 2, SMALL, make=unet3d_small),
    ],
    "cuda": [
        Case("U-Net", (3,), (512, 512), 8, {"widths": WIDTHS}, "amp"),
        Case("U-Net", (3,), (512, 512), 8, {"widths": WIDTHS}),
        Case("two encoders", (5, 3), (256, 256), 8, {}, "amp", True, lidar_optical_unet),
        Case("two encoders", (5, 3), (256, 256), 8, {}, "amp", False, lidar_optical_unet),
        Case("3D large", (1,), (320, 150, 26), 2, {}, "amp", False, unet3d_large),
        Case("3D small", (1,), (320, 150, 26), 2, {}, "amp", False, unet3d_small),
    ],
}


def test_step(case, device, report):
    torch.manual_seed(0)
    x = torch.randn(case.batch, sum(case.channels), *case.size, device=device)
    x = x.to(memory_format=case.memory_format())
    weights = list(case.network("eager").state_dict().values())
    target = torch.randint(CLASSES, (case.batch, *case.size), device=device)

    def build(name: str) -> NetJob:
        net = case.network(name)
        net.load_state_dict(dict(zip(net.state_dict(), weights, strict=True)))
        net = net.to(device, memory_format=case.memory_format())
        return NetJob(WAYS[name](net), x, target, case.dtype == "amp")

    timing = Timing(device, SECONDS[device.type])
    results = compete_networks(case.contenders(), build, case.dtype == "amp", timing)
    report.add("unet", "U-Nets, forward, cross entropy and backward", str(case), results)
