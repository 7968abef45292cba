"""Times one step of each way to train in less memory: checkpoints, fusedseg, on a GPU autocast, and combinations.

For networks of stock modules with ReLU, "fusedseg" means ``fusedseg.convert``, which keeps the function.  For the U-Net
with LeakyReLU it means the network of fused blocks.  ``python -m fusedseg profile MODEL --compare ...`` counts the
bytes of full sizes on any machine.
"""

from functools import partial
from statistics import median
from typing import NamedTuple

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory.strategy import AMP, CHECKPOINT, EAGER, FUSED, Strategy
from fusedseg.unet import UNet

from .contenders import relu
from .data import parametrize_pairs
from .harness import Result, Timing, compete, once
from .jobs import NetJob, net_tolerance
from .replay import CLOCK, report_step
from .results import Section, aligned
from .test_recompute import CLASSES, Segments

SLOW_ON = "cuda"
WAYS = {
    # A CPU without instructions for bf16 takes ten times as long under autocast, which says nothing about training.
    "cpu": [EAGER, CHECKPOINT, FUSED, f"{FUSED}+{CHECKPOINT}"],
    "cuda": [EAGER, AMP, CHECKPOINT, f"{AMP}+{CHECKPOINT}", FUSED, f"{FUSED}+{AMP}", f"{FUSED}+{AMP}+{CHECKPOINT}"],
}
# The way whose errors the others may double, because rounding adds up over the layers.
BASELINE = {"cpu": EAGER, "cuda": AMP}
SECONDS = {"cpu": 2.0, "cuda": 15.0}
# On a GPU half of the ways compute in bf16.  Rounding may swap the maximum of a pooling window.
TOLERANCE = {"cpu": net_tolerance(autocast=False), "cuda": {"logits": 5e-2, "gradients": 3e-1}}


class Case(NamedTuple):
    """A network.  ``fused`` builds fusedseg's network for it; without ``fused``, the network is converted."""

    make: partial
    shape: tuple[int, ...]
    fused: partial | None = None
    # All benches together must end within minutes.
    slow: bool = False

    def ours(self, model: nn.Module) -> nn.Module:
        if self.fused is None:
            fusedseg.convert(model)
            return model
        net = self.fused().to(next(model.parameters()).device)
        net.load_stock_state_dict(model.state_dict())
        return net


def unets(size: str, shape: tuple[int, ...], widths: tuple[int, ...]) -> dict[str, Case]:
    """A U-Net with ReLU, which is converted, and one with LeakyReLU, for which ours has fused blocks."""
    make = partial(UNet, 3, CLASSES, widths=widths)
    return {
        f"U-Net with ReLU, {size}": Case(partial(make, plain=True, norm_act=relu(2)), shape),
        f"U-Net with LeakyReLU, {size}": Case(partial(make, plain=True), shape, make),
    }


CASES = {
    "cpu": {
        "ResNet-18 of half the width, 4x3x128x128": Case(partial(Segments, 32), (4, 3, 128, 128), slow=True),
        **unets("2x3x128x128", (2, 3, 128, 128), (16, 32, 64)),
    },
    "cuda": {
        "ResNet-18, 128x3x224x224": Case(partial(Segments, 64), (128, 3, 224, 224)),
        **unets("8x3x512x512", (8, 3, 512, 512), (64, 128, 256, 512, 1024)),
    },
}


class Ways(Section):
    """A table whose rows are ways instead of cases."""

    def lines(self) -> list[str]:
        lines = [self.title]
        for case, results in self.cases.items():
            base = results[EAGER]
            rows = [[case, "step ms", "/ eager", "kept MiB", "eager /", "peak MiB", "eager /"]]
            for name, result in results.items():
                if result.refused or result.missing:
                    continue
                step = median(result.step)
                rows.append([
                    name, f"{1e3 * step:.1f}", f"{step / median(base.step):.2f}",
                    f"{result.kept / 2**20:.1f}", f"{base.kept / result.kept:.2f}",
                    f"{result.peak / 2**20:.1f}", f"{base.peak / result.peak:.2f}",
                ])  # fmt: skip
            lines += ["", *aligned(rows)]
        return [*lines, *self.refusals()]


@once
def run(name_of_case: str, device: torch.device) -> dict[str, Result]:
    case = CASES[device.type][name_of_case]
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device)
    target = torch.randint(CLASSES, (case.shape[0], *case.shape[2:]), device=device)
    state = case.make().state_dict()

    def build(label: str) -> NetJob:
        net = case.make()
        net.load_state_dict(state)
        way = Strategy.parse(label)
        return NetJob(way.prepare(net.to(device), case.ours), x, target, way.amp)

    baseline = BASELINE[device.type]
    return compete(
        {label: partial(build, label) for label in sorted(WAYS[device.type], key=lambda label: label != baseline)},
        {"": lambda: build(EAGER).exact_results()},
        TOLERANCE[device.type],
        Timing(device, SECONDS[device.type]),
        baseline=baseline,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    parametrize_pairs(metafunc, [(case, WAYS[kind], CASES[kind][case].slow) for case in CASES[kind]])


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    section = report.section("memory", Ways("Ways to train in less memory, a training step"))
    results = section.cases[case] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])
