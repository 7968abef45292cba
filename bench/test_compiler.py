"""Measures ``torch.compile(model, backend="fusedseg")`` beside eager mode, the scope, ``convert`` and the compiler.

For each network of ``networks.py`` and each way: kept and peak bytes of real allocations, the step in turns with the
other ways, and the seconds of a first step, with an empty folder of compiled code and with the folder that it has
filled.  Ours is the backend with Inductor, "aten" the backend with PyTorch's kernels, and "compiled" the compiler with
its default budget.  The tables at the end are Markdown, and below them stands which goals are missed::

    pip install -e ".[bench]" dynamic-network-architectures monai transformers diffusers
    pytest bench/test_compiler.py -m slow

Networks whose package is not installed are skipped.  ``-k "ResNet-18"`` measures one network, ``-k test_step`` takes no
first steps, and ``-k test_host_time`` times Python alone.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fusedseg
import fusedseg.compiler
from tests.resnet import ResNet50

from .contenders import Compiled
from .data import parametrize_pairs
from .harness import Missing, Result, Timing, once
from .jobs import NetJob, compete_networks
from .networks import NETWORKS, Network, batch_of, title_of
from .replay import CLOCK, report_step
from .report import markdown
from .results import Section, spread, timed
from .test_recompute import Scoped

SECONDS = {"cpu": 6.0, "cuda": 6.0}
HOST = "host time: ResNet-50 of width 4"
# The compiler's own budgets by the name of the contender.
BUDGETS = {"compiled": 1.0, "budget 0.6": 0.6, "budget 0.5": 0.5}
# The backend's two ways to generate code.
BACKENDS = {"aten": "aten", "ours": "inductor"}
# More kept bytes than this share of the scope's, or a peak above this share of the compiler's, miss the goal.
NOISE = 1.005
STEP_GOAL, HOST_GOAL = 1.02, 1.2


def as_it_is(net: nn.Module, x: Tensor) -> nn.Module:
    return net


def scoped(net: nn.Module, x: Tensor) -> nn.Module:
    return Scoped(net)


def converted(net: nn.Module, x: Tensor) -> nn.Module:
    fusedseg.convert(net, example_inputs=x)
    return net


def converted_and_compiled(net: nn.Module, x: Tensor) -> nn.Module:
    return Compiled(converted(net, x))


def aot_eager(net: nn.Module, x: Tensor) -> nn.Module:
    from torch._dynamo.backends.debugging import aot_eager

    return Compiled(net, aot_eager)


def with_budget(budget: float) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda net, x: Compiled(net, activation_memory_budget=budget)


def with_backend(codegen: str) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda net, x: Compiled(net, partial(fusedseg.compiler.backend, options={"codegen": codegen}))


WAYS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "eager": as_it_is,
    "scope": scoped,
    "convert": converted,
    "convert, compiled": converted_and_compiled,
    "aot_eager": aot_eager,
    **{name: with_budget(budget) for name, budget in BUDGETS.items()},
    **{name: with_backend(codegen) for name, codegen in BACKENDS.items()},
}
UNCOMPILED = ("eager", "scope", "convert")
COMPILED = [name for name in WAYS if name not in UNCOMPILED]
HOST_WAYS = ["eager", "scope", "convert", "aot_eager", "aten"]
HEADS = {
    "compiled": "compile",
    "budget 0.6": "compile, budget 0.6",
    "budget 0.5": "compile, budget 0.5",
    "aten": "fusedseg, aten",
    "ours": "fusedseg, Inductor",
}
# The folder of compiled code that the first steps of a network and way have filled.
FOLDERS: dict[tuple[str, str], str] = {}


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

    def __init__(self, title: str, network: Network, device: torch.device) -> None:
        torch.manual_seed(0)
        self.title, self.make, self.device = title, network.make, device
        net = network.make().to(device)
        self.state = net.state_dict()
        self.x, self.target = batch_of(net, network.shape, device)

    def build(self, way: str) -> NetJob:
        """The job of a way after its first step, which compiles."""
        net = self.make().to(self.device)
        net.load_state_dict(self.state)
        job = NetJob(WAYS[way](net, self.x), self.x, self.target)
        if way in COMPILED:
            folder = FOLDERS.get((self.title, way))
            with compiled_code_in(folder) if folder else nullcontext():
                job.backward(job.forward(job.prepare()))
        return job

    def first_steps(self, way: str) -> tuple[float, float]:
        """The seconds of a first step with an empty folder of compiled code, and with the folder that it has filled."""
        FOLDERS[self.title, way] = tempfile.mkdtemp(prefix="fusedseg-bench-")
        seconds = []
        for _ in range(2):
            torch.compiler.reset()
            start = time.perf_counter()
            self.build(way)
            seconds.append(time.perf_counter() - start)
        torch.compiler.reset()
        return seconds[0], seconds[1]


@dataclass
class Compilers(Section):
    """Three tables with a row for each network and a column for each way, and the goals that are missed.

    ``first`` has the seconds of the first steps of each case and way.
    """

    first: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def case_to_json(self, case: str) -> dict[str, Any]:
        content = super().case_to_json(case)
        for way, (cold, warm) in self.first.get(case, {}).items():
            content["contenders"].setdefault(way, {}).update(first_step_s=cold, first_step_warm_s=warm)
        return content

    def to_json(self) -> dict[str, Any]:
        for case in self.first:
            self.cases.setdefault(case, {})
        return super().to_json()

    def lines(self) -> list[str]:
        def size(result: Result) -> str:
            return f"{result.kept / 2**20:.2f}, {result.peak / 2**20:.2f}"

        def step(result: Result) -> str:
            times = spread(result.step)
            return "{median_ms:.1f} ({p20_ms:.1f} to {p80_ms:.1f})".format(**times)

        lines = [self.title, "", *self.table("kept, peak in MiB", size), "", *self.table("step in ms", step), ""]
        if self.first:
            ways = [way for way in COMPILED if any(way in of for of in self.first.values())]
            rows = [
                [case, *("{:.1f}, {:.1f}".format(*of[way]) if way in of else "–" for way in ways)]
                for case, of in self.first.items()
            ]
            head = ["first step in s: no compiled code, compiled code in a folder"]
            lines += [*markdown([*head, *(HEADS.get(way, way) for way in ways)], rows), ""]
        return [*lines, *self.missed(), *self.refusals()]

    def table(self, head: str, cell: Callable[[Result], str]) -> list[str]:
        ways = [way for way in WAYS if any(timed(results, way) for results in self.cases.values())]
        rows = [
            [case, *(cell(results[way]) if timed(results, way) else "–" for way in ways)]
            for case, results in self.cases.items()
        ]
        return markdown([head, *(HEADS.get(way, way) for way in ways)], rows)

    def missed(self) -> list[str]:
        return [line for case, results in self.cases.items() for line in missed(case, results)]


def missed(case: str, results: dict[str, Result]) -> Iterator[str]:
    """The goals that a network misses, a line each."""
    for own in (way for way in BACKENDS if timed(results, way)):
        result, scope = results[own], results["scope"]
        if timed(results, "scope") and result.kept > NOISE * scope.kept:
            yield f"{case}: {HEADS[own]} keeps {result.kept / scope.kept:.3f} of the scope's bytes"
        for budget in (way for way in BUDGETS if timed(results, way)):
            # About the same bytes or fewer.
            other = results[budget]
            if other.kept < 1.02 * result.kept and result.peak > NOISE * other.peak:
                yield (
                    f"{case}: {HEADS[own]} peaks at {result.peak / other.peak:.3f} of {HEADS[budget]}, "
                    f"which keeps {other.kept / result.kept:.3f} of its bytes"
                )
    larger = [way for way in BUDGETS if timed(results, way) and results[way].kept > 0.98 * results["ours"].kept]
    if timed(results, "ours") and larger:
        rival = min(larger, key=lambda way: results[way].kept)
        ratio = median(a / b for a, b in zip(results["ours"].step, results[rival].step, strict=True))
        if ratio > STEP_GOAL:
            yield f"{case}: a step of {HEADS['ours']} takes {ratio:.3f} of {HEADS[rival]}"


def missing_package(case: str) -> str:
    network = NETWORKS[case]
    return "" if network.is_here() else f"needs the package {network.package}"


@cache
def warmed_up(device: torch.device) -> None:
    """Compiles a small network, so that the first network's seconds are not those of imports."""
    small = Network(partial(nn.Conv2d, 1, 2, 1), (1, 1, 4, 4))
    for way in ("compiled", "ours", "aten"):
        Contest("warm-up", small, device).build(way)


@once
def first_steps(case: str, way: str, device: torch.device) -> tuple[float, float]:
    warmed_up(device)
    return Contest(case, NETWORKS[case], device).first_steps(way)


@once
def run(case: str, device: torch.device) -> dict[str, Result]:
    contest = Contest(case, NETWORKS[case], device)
    return compete_networks(WAYS, contest.build, False, Timing(device, SECONDS[device.type]))


@once
def run_host(case: str, device: torch.device) -> dict[str, Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contest = Contest(case, Network(partial(ResNet50, width=4), (4, 3, 16, 16)), device)
        return compete_networks(HOST_WAYS, contest.build, False, Timing(device, SECONDS[device.type]))
    finally:
        torch.set_num_threads(threads)


def section_of(report: Any) -> Compilers:
    return report.section("compiler", Compilers("torch.compile, a training step"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = {
        "test_first_step": (NETWORKS, COMPILED),
        "test_step": (NETWORKS, WAYS),
        "test_host_time": ([HOST], HOST_WAYS),
    }
    names, ways = cases[metafunc.function.__name__]
    parametrize_pairs(metafunc, [(name, ways, True) for name in names])


def test_first_step(case, contender, device, report):
    if problem := missing_package(case):
        pytest.skip(problem)
    try:
        seconds = first_steps(case, contender, device)
    except Missing as reason:
        pytest.skip(str(reason))
    section_of(report).first.setdefault(title_of(case), {})[contender] = seconds


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    if problem := missing_package(case):
        pytest.skip(problem)
    results = section_of(report).cases[title_of(case)] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])


@pytest.mark.benchmark(timer=CLOCK)
def test_host_time(case, contender, device, report, benchmark):
    """Nearly all of the time is Python's: the tensors are small, and there is one thread."""
    results = section_of(report).cases[case] = run_host(case, device)
    report_step(benchmark, case, contender, results[contender])
