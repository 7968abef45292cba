"""One training step of stock networks: unchanged, under ``fusedseg.recompute()`` only, and converted (ours).

The networks are small copies of those in libraries; ``tests/conversion/test_packages.py`` has the real ones.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusedseg
from fusedseg.unet import UNet
from tests.resnet import ResNet50

from .contenders import compiled, leaky, relu
from .data import memory_format_of, parametrize_pairs
from .harness import Result, Timing, compete, once
from .jobs import NetJob, as_it_is, net_tolerance
from .replay import CLOCK, report_step
from .results import Section, aligned, timed, two_digits
from .test_recompute import CLASSES, Scoped, Segments

TREATMENTS = {"scope": Scoped, "compiled": compiled}
CONTENDERS = ("eager", "scope", "compiled", "ours", "leaky")
SECONDS = {"cpu": 2.0, "cuda": 6.0}


class Case(NamedTuple):
    make: partial
    shape: tuple[int, ...]
    # Whether mode "leaky" gives another function than the other contenders.
    relu: bool = False
    amp: bool = False
    channels_last: bool = False
    # Whether there is a class for each position instead of one for each sample.
    dense: bool = True
    # Inductor takes minutes for some networks on a CPU.
    compile: bool = False

    def contenders(self) -> list[str]:
        absent = ([] if self.relu else ["leaky"]) + ([] if self.compile else ["compiled"])
        return [name for name in CONTENDERS if name not in absent]


def unet(dims: int, *widths: int, **options) -> partial:
    return partial(UNet, 3, CLASSES, dims=dims, widths=widths, plain=True, **options)


CASES = {
    "cpu": {
        "3D U-Net, InstanceNorm, 2x3x32x32x32": Case(unet(3, 12, 24, 48, norm_act="instance"), (2, 3, 32, 32, 32)),
        "ResNet-18 of half the width, 4x3x128x128": Case(partial(Segments, 32), (4, 3, 128, 128), True),
    },
    "cuda": {
        "ResNet-50, 128x3x224x224 amp nhwc": Case(
            partial(ResNet50, CLASSES), (128, 3, 224, 224), amp=True, channels_last=True, dense=False, compile=True
        ),
    },
}
MORE = {
    "cpu": {
        # `bench/test_memory.py` has the step of a converted U-Net with ReLU.
        "U-Net, ReLU, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act=relu(2)), (2, 3, 128, 128), True),
        "U-Net, InstanceNorm, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act="instance"), (2, 3, 128, 128)),
        "U-Net, LeakyReLU, 2x3x128x128": Case(unet(2, 32, 64, 128, norm_act=leaky(2)), (2, 3, 128, 128)),
    },
    "cuda": {
        "U-Net, ReLU, 8x3x512x512": Case(unet(2, 64, 128, 256, 512, norm_act=relu(2)), (8, 3, 512, 512), True),
        "3D U-Net, InstanceNorm, 2x3x96x96x96": Case(unet(3, 32, 64, 128, norm_act="instance"), (2, 3, 96, 96, 96)),
        "ResNet-18, 128x3x224x224": Case(partial(Segments, 64), (128, 3, 224, 224), True),
    },
}


class Steps(Section):
    """A table with a row for each network, which compares its treatments with the stock network."""

    def lines(self) -> list[str]:
        names = [name for name in CONTENDERS[1:] if any(timed(results, name) for results in self.cases.values())]
        rows = [["step", "eager ms", *(f"{name}/eager" for name in names), "kept: ours/eager", "peak"]]
        for case, results in self.cases.items():
            eager, ours = results["eager"], results["ours"]
            if not timed(results, "eager") or not timed(results, "ours"):
                continue
            steps = [self.whole(results[name]) / self.whole(eager) if timed(results, name) else None for name in names]
            bytes_of = [ours.kept / eager.kept, ours.peak / eager.peak]
            rows.append([case, f"{1e3 * self.whole(eager):.1f}", *map(two_digits, [*steps, *bytes_of])])
        return [self.title, *aligned(rows), *self.refusals()]


@once
def run(name_of_case: str, device: torch.device) -> dict[str, Result]:
    case = (CASES[device.type] | MORE.get(device.type, {}))[name_of_case]
    torch.manual_seed(0)
    memory_format = memory_format_of(len(case.shape), case.channels_last)
    x = torch.randn(case.shape, device=device).to(memory_format=memory_format)
    target = torch.randint(CLASSES, (case.shape[0], *(case.shape[2:] if case.dense else ())), device=device)
    state = case.make().state_dict()

    def network(name: str) -> nn.Module:
        net = case.make()
        net.load_state_dict(state)
        # PyTorch's type stubs declare Module.to without memory_format.
        net.to(device).to(memory_format=memory_format)  # type: ignore[call-overload]
        if name in ("ours", "leaky"):
            fusedseg.convert(net, example_inputs=x, mode="leaky" if name == "leaky" else "exact")
        return TREATMENTS.get(name, as_it_is)(net)

    def expected(name: str) -> dict[str, Tensor]:
        # Mode "leaky" is compared with the LeakyReLU network that `revert` returns.
        net = fusedseg.revert(network("leaky")) if name == "leaky" else network("eager")
        return NetJob(net, x, target).exact_results()

    references = {"": partial(expected, "eager")} | ({"leaky": partial(expected, "leaky")} if case.relu else {})
    build = {name: partial(lambda name: NetJob(network(name), x, target, case.amp), name) for name in case.contenders()}
    return compete(build, references, net_tolerance(case.amp), Timing(device, SECONDS[device.type]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    cases = CASES[kind] | MORE.get(kind, {})
    parametrize_pairs(metafunc, [(title, cases[title].contenders(), title not in CASES[kind]) for title in cases])


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    section = report.section("convert", Steps("fusedseg.convert of stock networks, a training step"))
    results = section.cases[case] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])
