"""One training step of a whole U-Net: forward, cross entropy and backward.  Ours is ``fusedseg.unet.UNet`` as it is by
default; the others are its plain twin, of stock modules, with their norm."""

from functools import cache, partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from .contenders import CONTENDERS, unet
from .harness import Result, compete
from .jobs import NetJob
from .replay import CLOCK, report_step
from .report import Section

CLASSES = 4
SECONDS = {"cpu": 12.0, "cuda": 15.0}
# relu is another function, and costs what leaky_relu does
NAMES = [name for name in CONTENDERS if name != "relu"]
# relative error of the logits and of all gradients together (2-norms), or twice eager's own.  Rounding adds up over the
# layers, and where it crosses a kink or swaps the maximum of a pooling window, a gradient changes by more than that
TOLERANCE = {torch.float32: {"logits": 1e-4, "gradients": 1e-2}, torch.bfloat16: {"logits": 2e-2, "gradients": 5e-2}}


class Case(NamedTuple):
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    dtype: str = "fp32"
    channels_last: bool = False

    def __str__(self) -> str:
        layout = "nhwc" if self.channels_last else "nchw"
        return f"{'x'.join(map(str, self.shape))} to {self.widths[-1]} channels, {self.dtype} {layout}"


CASES = {
    "cpu": [Case((2, 3, 160, 160), (32, 64, 128))],
    "cuda": [
        Case((8, 3, 512, 512), (64, 128, 256, 512, 1024), "amp", True),
        Case((8, 3, 512, 512), (64, 128, 256, 512, 1024), "amp"),
        Case((8, 3, 512, 512), (64, 128, 256, 512, 1024), "fp32"),
        Case((2, 1, 160, 160, 64), (32, 64, 128, 256), "amp"),
    ],
}


@cache
def run(case: Case, device: torch.device) -> dict[str, Result]:
    torch.manual_seed(0)
    dims = len(case.shape) - 2
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    x = torch.randn(case.shape, device=device).to(memory_format=memory_format)
    target = torch.randint(CLASSES, (case.shape[0], *case.shape[2:]), device=device)

    def network(name: str) -> nn.Module:
        return unet(name, case.shape[1], CLASSES, dims=dims, widths=case.widths)

    weights = list(network("eager").state_dict().values())

    def build(name: str) -> NetJob:
        net = network(name)
        net.load_state_dict(dict(zip(net.state_dict(), weights, strict=True)))
        # torch declares Module.to without memory_format
        net = net.to(device).to(memory_format=memory_format)  # type: ignore[call-overload]
        return NetJob(CONTENDERS[name][1](net), x, target, case.dtype == "amp")

    def expected() -> dict[str, Tensor]:
        job = build("eager")
        exact = NetJob(job.net.double(), x.double(), target)
        out = exact.forward(exact.prepare())
        return exact.results(out, exact.backward(out))

    return compete(
        {name: partial(build, name) for name in NAMES},
        {"": expected},
        TOLERANCE[torch.bfloat16 if case.dtype == "amp" else torch.float32],
        device,
        SECONDS[device.type],
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kind = torch.device(metafunc.config.getoption("--device")).type
    metafunc.parametrize("case", CASES[kind], ids=str)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("contender", NAMES)
def test_step(case, contender, device, report, benchmark):
    section = report.section("unet", Section("U-Net, forward + cross entropy + backward"))
    results = section.cases[str(case)] = run(case, device)
    report_step(benchmark, f"step of a U-Net, {case}", contender, results[contender])
