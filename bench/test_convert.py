"""One training step of stock networks: as they are, under ``fusedseg.recompute()`` alone, and converted (ours).

Small stand-ins of what libraries hold; ``tests/conversion/test_packages.py`` has the real ones.
"""

from functools import cache, partial
from statistics import median
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from fusedseg.unet import UNet

from .contenders import leaky, relu
from .harness import Result, compete
from .jobs import NetJob
from .replay import CLOCK, report_step
from .results import Section, aligned
from .test_recompute import CLASSES, Scoped, Segments

CONTENDERS = ("eager", "scope", "ours", "leaky")
SECONDS = {"cpu": 4.0, "cuda": 15.0}
# as in test_unet.py: rounding adds up, and may swap the maximum of a pooling window
TOLERANCE = {"logits": 1e-4, "gradients": 1e-2}


class Case(NamedTuple):
    make: partial
    shape: tuple[int, ...]
    # whether mode "leaky" is another function than the others'
    relu: bool = False

    def contenders(self) -> list[str]:
        return [name for name in CONTENDERS if name != "leaky" or self.relu]


def unet(dims: int, *widths: int, **options) -> partial:
    return partial(UNet, 3, CLASSES, dims=dims, widths=widths, plain=True, **options)


CASES = {
    "cpu": {
        "U-Net, ReLU, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act=relu(2)), (2, 3, 128, 128), True),
        "U-Net, LeakyReLU, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act=leaky(2)), (2, 3, 128, 128)),
        "U-Net, InstanceNorm, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act="instance"), (2, 3, 128, 128)),
        "3D U-Net, InstanceNorm, 2x3x32x32x32": Case(unet(3, 12, 24, 48, norm_act="instance"), (2, 3, 32, 32, 32)),
        "3D U-Net, LeakyReLU, 1x3x24x24x24": Case(unet(3, 12, 24, 48, norm_act=leaky(3)), (1, 3, 24, 24, 24)),
        "ResNet-18 of half the width, 4x3x128x128": Case(partial(Segments, 32), (4, 3, 128, 128), True),
    },
    "cuda": {
        "U-Net, ReLU, 8x3x512x512": Case(unet(2, 64, 128, 256, 512, norm_act=relu(2)), (8, 3, 512, 512), True),
        "3D U-Net, InstanceNorm, 2x3x96x96x96": Case(unet(3, 32, 64, 128, norm_act="instance"), (2, 3, 96, 96, 96)),
        "ResNet-18, 128x3x224x224": Case(partial(Segments, 64), (128, 3, 224, 224), True),
    },
}


class Steps(Section):
    """A row for each network: converted beside stock, and beside the scope alone."""

    def lines(self) -> list[str]:
        rows = [["step", "eager ms", "scope/eager", "ours/eager", "leaky/eager", "kept: ours/eager", "peak"]]
        for case, results in self.cases.items():
            eager, ours = results["eager"], results["ours"]
            if ours.refused or eager.refused:
                continue
            steps = [
                f"{median(results[name].step) / median(eager.step):.2f}"
                if name in results and not results[name].refused
                else "-"
                for name in ("scope", "ours", "leaky")
            ]
            bytes_of = [f"{ours.kept / eager.kept:.2f}", f"{ours.peak / eager.peak:.2f}"]
            rows.append([case, f"{1e3 * median(eager.step):.1f}", *steps, *bytes_of])
        return [self.title, *aligned(rows), *self.refusals()]


@cache
def run(name_of_case: str, device: torch.device) -> dict[str, Result]:
    case = CASES[device.type][name_of_case]
    torch.manual_seed(0)
    x = torch.randn(case.shape, device=device)
    target = torch.randint(CLASSES, (case.shape[0], *case.shape[2:]), device=device)
    state = case.make().state_dict()

    def network(name: str) -> nn.Module:
        net = case.make()
        net.load_state_dict(state)
        net.to(device)
        if name in ("ours", "leaky"):
            fusedseg.convert(net, example_inputs=x, mode="leaky" if name == "leaky" else "exact")
        return Scoped(net) if name == "scope" else net

    def expected(name: str) -> dict[str, Tensor]:
        # mode "leaky" is compared with the network of LeakyReLU that it gives back
        net = fusedseg.revert(network("leaky")) if name == "leaky" else network("eager")
        exact = NetJob(net.double(), x.double(), target)
        out = exact.forward(exact.prepare())
        return exact.results(out, exact.backward(out))

    references = {"": partial(expected, "eager")} | ({"leaky": partial(expected, "leaky")} if case.relu else {})
    build = {name: partial(lambda name: NetJob(network(name), x, target), name) for name in case.contenders()}
    return compete(build, references, TOLERANCE, device, SECONDS[device.type])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    cases = [(title, name) for title, case in CASES[kind].items() for name in case.contenders()]
    metafunc.parametrize(("case", "contender"), cases)


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    section = report.section("convert", Steps("fusedseg.convert of stock networks, a training step"))
    results = section.cases[case] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])
