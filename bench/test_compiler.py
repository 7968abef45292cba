"""Measures ``torch.compile(model, backend="fusedseg")`` beside eager mode, ``convert`` and the compiler.

``test_bytes`` counts kept and peak bytes of real allocations for each network of ``networks.py`` and each way.  For
some networks ``test_step`` times the step in turns with the other ways, and ``test_first_step`` the first step, with an
empty folder of compiled code and with the folder that it has filled.  "ours" is the backend with Inductor, "aten" the
backend with PyTorch's kernels, and "compiled" the compiler with its default budget.  The tables at the end are
Markdown::

    pip install -e ".[bench]" dynamic-network-architectures monai transformers diffusers
    pytest bench/test_compiler.py -m slow -k test_bytes
    pytest bench/test_compiler.py -m slow

On a CPU bytes are counted with kernels of Inductor that only write zeros: the allocations are the same, and a C++
compiler would take minutes for each network.  Networks whose package is not installed are skipped.
``-k test_budget`` measures budgets beside the compiler's own, ``-k test_budget_step`` only their times,
``-k "ResNet-18"`` one network, and ``-k test_host_time`` Python alone.
"""

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
import fusedseg.compiler
from fusedseg.compiler.estimate import estimate_ways
from fusedseg.memory.fake import fake_model
from tests.resnet import ResNet50

from .contenders import Compiled, Treat, as_it_is
from .harness import Missing, Result, Timing, count_bytes
from .jobs import NetJob, compete_networks
from .networks import FOUR, NETWORKS, WIDE, Network, batch_of, title_of
from .results import markdown

pytestmark = pytest.mark.slow
# Inductor takes minutes for each network, so only these are timed.
TIMED = [*FOUR, "ResNet-18", next(iter(WIDE))]
SECONDS = 6.0
# The compiler's own budgets by the name of the contender.
BUDGETS = {"compiled": 1.0, "budget 0.6": 0.6, "budget 0.5": 0.5}
# The backend's two ways to generate code.
BACKENDS = {"aten": "aten", "ours": "inductor"}
# The networks and the shares of ``test_budget``, and the ways.  The compiler's own budget means something else, so the
# last way is ours, within the arithmetic that the compiler repeats.
BOUGHT = ["PlainConvUNet", "ResidualEncoderUNet", *list(FOUR)[1:4:2], "ResNet-50", "SwinUNETR"]
SHARES = (0.4, 0.3, 0.2)
BUYERS = {
    "aten": "fusedseg, aten",
    "ours": "fusedseg, Inductor",
    "compiler": "compile",
    "alike": "fusedseg, Inductor, at its arithmetic",
}
# The steps of these ways are timed.
BUDGET_STEP_WAYS = ["eager", *BUYERS]


def aot_eager(net: nn.Module) -> nn.Module:
    from torch._dynamo.backends.debugging import aot_eager

    return Compiled(net, aot_eager)


def with_budget(budget: float) -> Treat:
    return lambda net: Compiled(net, activation_memory_budget=budget)


def with_backend(codegen: str, **options: Any) -> Treat:
    return lambda net: Compiled(net, partial(fusedseg.compiler.backend, options={"codegen": codegen, **options}))


WAYS: dict[str, Treat] = {
    "eager": as_it_is,
    "convert": fusedseg.convert,
    "aot_eager": aot_eager,
    **{name: with_budget(budget) for name, budget in BUDGETS.items()},
    **{name: with_backend(codegen) for name, codegen in BACKENDS.items()},
}
UNCOMPILED = ("eager", "convert")
COMPILED = [name for name in WAYS if name not in UNCOMPILED]
# A C++ compiler takes minutes for each way of Inductor, so the steps of fewer ways are timed.
STEP_WAYS = ["eager", "convert", "compiled", "budget 0.5", "aten", "ours"]
HOST_WAYS = ["eager", "convert", "aot_eager", "aten"]


@contextmanager
def compiled_code_in(folder: str) -> Iterator[None]:
    """The compilers find and leave compiled code in this folder only, and not in this process."""
    from torch._inductor.utils import clear_caches

    clear_caches()
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=f"{folder}/triton"):
        yield
    clear_caches()


class Contest:
    """The jobs of all ways for one network: equal weights, input and target."""

    def __init__(self, network: Network, device: torch.device) -> None:
        torch.manual_seed(0)
        self.make, self.device = network.make, device
        net = network.make().to(device)
        self.state = net.state_dict()
        self.x, self.target = batch_of(net, network.shape, device)

    def build(self, way: str) -> NetJob:
        """The job of a way after its first step, which compiles."""
        return self.of(WAYS[way], way in COMPILED)

    def of(self, make: Treat, steps: bool) -> NetJob:
        """The job of what ``make`` makes of the network, after a step if ``steps``."""
        net = self.make().to(self.device)
        net.load_state_dict(self.state)
        job = NetJob(make(net), self.x, self.target)
        if steps:
            job.backward(job.forward(job.prepare()))
        return job

    def first_steps(self, way: str) -> tuple[float, float]:
        """The seconds of a first step with an empty folder of compiled code, and with the folder that it has filled."""
        seconds = []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                torch.compiler.reset()
                start = time.perf_counter()
                with compiled_code_in(folder):
                    self.build(way)
                seconds.append(time.perf_counter() - start)
        torch.compiler.reset()
        return seconds[0], seconds[1]


def here(name: str) -> Network:
    """The network of this name; the test is skipped if its package is not installed."""
    network = {**NETWORKS, **WIDE}[name]
    if not network.is_here():
        pytest.skip(f"needs the package {network.package}")
    return network


class Bought(NamedTuple):
    """What a way keeps and peaks at, and the products that it repeats, as a share of forward's arithmetic."""

    kept: int
    peak: int
    repeated: float = 0.0


@contextmanager
def kernels_of_zeros() -> Iterator[None]:
    """In place of Inductor's C++ kernels run functions that write zeros into their outputs."""
    from torch._inductor.async_compile import AsyncCompile

    def kernel(compiling: AsyncCompile, types: list[str], source: str) -> Callable[..., None]:
        written = [place for place, text in enumerate(types) if "*" in text and "const" not in text]

        def run(*args: Any) -> None:
            for place in written:
                args[place].zero_()

        return run

    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", kernel),
        tempfile.TemporaryDirectory() as folder,
        compiled_code_in(folder),
    ):
        yield


@cache
def warmed_up(device: torch.device) -> None:
    """Compiles a small network, so that the first network's seconds are not those of imports."""
    small = Network(partial(nn.Conv2d, 1, 2, 1), (1, 1, 4, 4))
    for way in ("compiled", "ours", "aten"):
        Contest(small, device).build(way)


def counted(network: Network, way: str, device: torch.device) -> Result:
    """The bytes of a way; a compiled step is counted after the first one."""
    torch.compiler.reset()
    with kernels_of_zeros() if device.type == "cpu" else nullcontext():
        try:
            kept, peak, _ = count_bytes(Contest(network, device).build(way), device)
        except Missing as reason:
            return Result(missing=str(reason))
    return Result(kept=kept, peak=peak)


@cache
def of_compiler(name: str) -> dict[float, fusedseg.compiler.Report]:
    """What the compiler's own budgets repeat."""
    network = here(name)
    with FakeTensorMode():
        net = fake_model(network.make, torch.float32)
        if name == "SwinUNETR":
            # Its check of the input calls NumPy, which would end the compiler's graph.
            net._check_input_size = lambda spatial_shape: None
        return dict(zip(SHARES, estimate_ways(net, [torch.empty(network.shape)], SHARES), strict=True))


def buyer(name: str, share: float, way: str) -> Treat:
    """How a way makes a network that keeps a share of eager mode's bytes."""
    if way == "compiler":
        return with_budget(share)
    options = {"extra_flops": of_compiler(name)[share].repeated} if way == "alike" else {"budget": share}
    return with_backend(BACKENDS.get(way, "inductor"), **options)


@contextmanager
def missed_quietly() -> Iterator[None]:
    """Some budgets cannot be met; the table shows what is kept."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* cannot be met without")
        yield


def bought(name: str, share: float, way: str, device: torch.device) -> Bought:
    """What a way does with a budget of ``share``."""
    torch.compiler.reset()
    contest = Contest(NETWORKS[name], device)
    with missed_quietly(), kernels_of_zeros() if device.type == "cpu" else nullcontext():
        if way == "eager":
            return Bought(*count_bytes(contest.of(as_it_is, False), device)[:2])
        job = contest.of(buyer(name, share, way), True)
        if way == "compiler":
            repeated = of_compiler(name)[share].repeated
        else:
            repeated = sum(graph.repeated for graph in fusedseg.compiler.report(job.net).graphs)
        return Bought(*count_bytes(job, device)[:2], repeated)


@pytest.mark.parametrize("name", NETWORKS)
def test_bytes(name, device, report):
    network = here(name)
    results = {way: counted(network, way, device) for way in WAYS}
    report.add("compiler-bytes", "torch.compile, bytes of a training step", title_of(name), results)


@pytest.mark.parametrize("name", BOUGHT)
def test_budget(name, device, report):
    here(name)
    eager = bought(name, SHARES[0], "eager", device)
    rows = []
    for share in SHARES:
        row = [f"{title_of(name)}, {share}"]
        for way in BUYERS:
            of = bought(name, share, way, device)
            row.append(f"{of.kept / eager.kept:.3f}, {of.peak / eager.peak:.3f}, {of.repeated:.1%}")
        rows.append(row)
    head = ["network, budget: kept and peak as shares of eager's, repeated", *BUYERS.values()]
    report.notes.append("\n".join(markdown(head, rows)))


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", [*BOUGHT, *list(WIDE)[1:]])
def test_budget_step(name, share, device, report):
    contest = Contest(here(name), device)

    def build(way: str) -> NetJob:
        return contest.of(as_it_is if way == "eager" else buyer(name, share, way), way != "eager")

    with missed_quietly():
        results = compete_networks(BUDGET_STEP_WAYS, build, False, Timing(device, SECONDS))
    title = "torch.compile, a training step with a budget"
    report.add("compiler-budget-steps", title, f"{title_of(name)}, {share}", results)


@pytest.mark.parametrize("name", TIMED[:-1])
def test_first_step(name, device, report):
    warmed_up(device)
    contest, row = Contest(NETWORKS[name], device), [title_of(name)]
    ways = [way for way in STEP_WAYS if way in COMPILED]
    for way in ways:
        try:
            row.append("{:.1f}, {:.1f}".format(*contest.first_steps(way)))
        except Missing as reason:
            row.append(str(reason))
    report.notes.append("\n".join(markdown(["first step in s: cold, warm cache", *ways], [row])))


@pytest.mark.parametrize("name", TIMED)
def test_step(name, device, report):
    contest = Contest(here(name), device)
    results = compete_networks(STEP_WAYS, contest.build, False, Timing(device, SECONDS))
    report.add("compiler", "torch.compile, a training step", title_of(name), results)


def test_host_time(device, report):
    """Nearly all of the time is Python's: the tensors are small, and there is one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contest = Contest(Network(partial(ResNet50, width=4), (4, 3, 16, 16)), device)
        results = compete_networks(HOST_WAYS, contest.build, False, Timing(device, SECONDS))
    finally:
        torch.set_num_threads(threads)
    report.add("compiler", "torch.compile, a training step", "host time: ResNet-50 of width 4", results)
