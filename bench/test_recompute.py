"""Times one training step of a network of stock modules with ReLU.

The contenders differ only in the treatment: none, ``fusedseg.recompute()`` (ours), checkpointed blocks, and compiled.
In the cases "of twins" ours has the exact fused modules instead of norm and ReLU."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg.unet import UNet, unet3d_small
from fusedseg.unet.blocks import DoubleConv
from tests.resnet import ResNet18

from .contenders import aggressive, compiled, relu, uncompiled
from .data import parametrize_pairs
from .harness import Result, Timing, once
from .jobs import NetJob, as_it_is, compete_networks
from .replay import CLOCK, report_step
from .results import Section

SLOW_ON = "cuda"
CLASSES = 4
SECONDS = {"cpu": 2.0, "cuda": 15.0}


class Scoped(nn.Module):
    """A module whose forward runs under the recompute scope."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        with fusedseg.recompute():
            return self.module(x)


class Checkpointed(nn.Module):
    """A block that keeps only its input, and runs again in backward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=False)


def checkpointed(net: nn.Module) -> nn.Module:
    """Checkpoints every DoubleConv of a U-Net, or every block of a ResNet."""
    blocks = [
        (parent, name)
        for parent in net.modules()
        for name, child in parent.named_children()
        if isinstance(child, DoubleConv) or type(child).__name__ == "BasicBlock"
    ]
    for parent, name in blocks:
        setattr(parent, name, Checkpointed(getattr(parent, name)))
    return net


def twins(net: nn.Module) -> nn.Module:
    """Replaces every pair of a BatchNorm and a ReLU by one module with the same parameters."""
    pairs = [
        (parent, name, child)
        for parent in net.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Sequential) and len(child) == 2 and isinstance(child[1], nn.ReLU)
    ]
    for parent, name, (norm, _) in pairs:
        setattr(parent, name, fusedseg.BatchNormAct.from_norm(norm, "relu"))
    assert pairs
    return net


CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "eager": as_it_is,
    "checkpoint": checkpointed,
    "compiled": compiled,
    "aggressive": aggressive,
    "ours": Scoped,
}


class Segments(ResNet18):
    """The features of a ResNet as (N, CLASSES, height, width), so that all cases have one loss."""

    def __init__(self, width: int) -> None:
        super().__init__(CLASSES, width)
        self.pool, self.fc = nn.Identity(), nn.Identity()
        self.head = nn.Conv2d(8 * width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.head(self.layers(self.stem(x))), size=x.shape[2:], mode="bilinear")


class Case(NamedTuple):
    title: str
    make: Callable[..., nn.Module]
    options: dict[str, Any]
    shape: tuple[int, ...]
    dtype: str = "fp32"
    # Inductor takes minutes for some networks on a CPU.
    compile: bool = True
    twins: bool = False
    # All benches together must end within minutes.
    slow: bool = False

    def contenders(self) -> list[str]:
        if self.twins:
            return ["eager", "ours"]
        return list(CONTENDERS) if self.compile else uncompiled(CONTENDERS)

    def __str__(self) -> str:
        title = f"{self.title} of twins" if self.twins else self.title
        return f"{title}, {'x'.join(map(str, self.shape))} {self.dtype}"


UNET = partial(UNet, num_classes=CLASSES, plain=True)
UNET3D = partial(unet3d_small, 1, CLASSES, plain=True, norm_act=relu(3))
SMALL = {"widths": (12, 24, 48, 48), "up_widths": (48, 24, 12)}
CASES = {
    "cpu": [
        # `bench/test_unet.py` has the compilers' times of such a network.
        Case(
            "U-Net",
            UNET,
            {"in_channels": 3, "norm_act": relu(2), "widths": (32, 64, 128)},
            (2, 3, 128, 128),
            compile=False,
        ),
        Case(
            "U-Net",
            UNET,
            {"in_channels": 3, "norm_act": relu(2), "widths": (32, 64, 128)},
            (2, 3, 128, 128),
            twins=True,
            slow=True,
        ),
        Case("3D small", UNET3D, SMALL, (1, 1, 32, 32, 32), compile=False, slow=True),
        # `bench/test_convert.py` has the scope over this network, and beside the converted one.
        Case("ResNet-18", Segments, {"width": 32}, (4, 3, 128, 128), compile=False, slow=True),
    ],
    "cuda": [
        Case("U-Net", UNET, {"in_channels": 3, "norm_act": relu(2)}, (8, 3, 512, 512), "amp"),
        Case("U-Net", UNET, {"in_channels": 3, "norm_act": relu(2)}, (8, 3, 512, 512)),
        Case("U-Net", UNET, {"in_channels": 3, "norm_act": relu(2)}, (8, 3, 512, 512), twins=True),
        Case("3D small", UNET3D, {}, (2, 1, 320, 150, 26), "amp"),
        Case("ResNet-18", Segments, {"width": 64}, (128, 3, 224, 224), "amp"),
    ],
}


@cache
def case_named(name: str, kind: str) -> Case:
    return next(case for case in CASES[kind] if str(case) == name)


@once
def run(name_of_case: str, device: torch.device) -> dict[str, Result]:
    case = case_named(name_of_case, device.type)
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device)
    target = torch.randint(CLASSES, (case.shape[0], *case.shape[2:]), device=device)
    state = case.make(**case.options).state_dict()

    def build(name: str) -> NetJob:
        net = case.make(**case.options)
        net.load_state_dict(state)
        net = twins(net) if case.twins and name == "ours" else net
        return NetJob(CONTENDERS[name](net.to(device)), x, target, case.dtype == "amp")

    timing = Timing(device, SECONDS[device.type])
    return compete_networks(case.contenders(), build, case.dtype == "amp", timing)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    parametrize_pairs(metafunc, [(str(case), case.contenders(), case.slow) for case in CASES[kind]])


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    section = report.section("recompute", Section("Stock ReLU networks under the scope, a training step"))
    results = section.cases[case] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])
