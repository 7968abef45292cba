"""Measures ``torch.compile(model, backend="fusedseg")`` beside eager mode, the scope, ``convert`` and the compiler.

``test_bytes`` counts kept and peak bytes of real allocations for each network of ``networks.py`` and each way.  For
some networks ``test_step`` times the step in turns with the other ways, and ``test_first_step`` the first step, with an
empty folder of compiled code and with the folder that it has filled.  "ours" is the backend with Inductor, "aten" the
backend with PyTorch's kernels, and "compiled" the compiler with its default budget.  The tables at the end are
Markdown, and below them stands which goals are missed::

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
import fusedseg.compiler
from fusedseg.compiler import partitions
from fusedseg.memory.strategy import Partition
from tests.resnet import ResNet50

from .contenders import Compiled
from .data import parametrize_pairs
from .harness import Missing, Result, Timing, count_bytes, once
from .jobs import NetJob, compete_networks
from .networks import NETWORKS, README, WIDE, Network, batch_of, title_of
from .replay import CLOCK, report_step
from .report import markdown
from .results import Section, spread
from .test_recompute import Scoped

T = TypeVar("T")

# Inductor takes minutes for each network, so only these are timed.
TIMED = [*README, "ResNet-18", next(iter(WIDE))]
SECONDS = {"cpu": 6.0, "cuda": 6.0}
HOST = "host time: ResNet-50 of width 4"
# The compiler's own budgets by the name of the contender.
BUDGETS = {"compiled": 1.0, "budget 0.6": 0.6, "budget 0.5": 0.5}
# The backend's two ways to generate code.
BACKENDS = {"aten": "aten", "ours": "inductor"}
# The networks and the shares of ``test_budget``, and the ways.  The compiler's own budget means something else, so the
# last way is ours, within the arithmetic that the compiler repeats.
BOUGHT = ["PlainConvUNet", "ResidualEncoderUNet", *list(README)[1:4:2], "ResNet-50", "SwinUNETR"]
SHARES = (0.4, 0.3, 0.2)
BUYERS = {
    "aten": "fusedseg, aten",
    "ours": "fusedseg, Inductor",
    "compiler": "compile",
    "alike": "fusedseg, Inductor, at its arithmetic",
}
# The steps of these ways are timed.
BUDGET_STEP_WAYS = ["eager", "aten", "ours", "compiler"]
# The goals of budgets at equal arithmetic: kept and peak beside the compiler's.
NOISE, LIKE_COMPILER = 1.005, 0.85
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


def with_backend(codegen: str, **options: Any) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda net, x: Compiled(net, partial(fusedseg.compiler.backend, options={"codegen": codegen, **options}))


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
# A C++ compiler takes minutes for each way of Inductor, so the steps of fewer ways are timed.
STEP_WAYS = ["eager", "scope", "convert", "convert, compiled", "compiled", "budget 0.5", "aten", "ours"]
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
        folder = FOLDERS.get((self.title, way))
        with compiled_code_in(folder) if folder else nullcontext():
            return self.of(WAYS[way], way in COMPILED)

    def of(self, make: Callable[[nn.Module, Tensor], nn.Module], steps: bool) -> NetJob:
        """The job of what ``make`` makes of the network, after a step if ``steps``."""
        net = self.make().to(self.device)
        net.load_state_dict(self.state)
        job = NetJob(make(net, self.x), self.x, self.target)
        if steps:
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


def table(
    head: str, cases: Mapping[str, Mapping[str, T]], cell: Callable[[T], str], columns: Iterable[str] = ()
) -> list[str]:
    """A row for each network and a column for each way."""
    ways = [way for way in columns or WAYS if any(way in of for of in cases.values())]
    rows = [[case, *(cell(of[way]) if way in of else "–" for way in ways)] for case, of in cases.items()]
    return [*markdown([head, *(HEADS.get(way, way) for way in ways)], rows), ""] if ways else []


@dataclass
class Sizes(Section):
    """Kept and peak bytes; the results have no times."""

    def case_to_json(self, case: str) -> dict[str, Any]:
        counted = {
            way: {"missing": of.missing} if of.missing else {"kept_bytes": of.kept, "peak_bytes": of.peak}
            for way, of in self.cases[case].items()
        }
        return {"contenders": counted}

    def lines(self) -> list[str]:
        counted = {case: {way: of for way, of in ways.items() if of.kept} for case, ways in self.cases.items()}

        def cell(of: Result) -> str:
            return f"{of.kept / 2**20:.2f}, {of.peak / 2**20:.2f}"

        goals = [line for case, results in counted.items() for line in missed_bytes(case, results)]
        return [self.title, "", *table("kept, peak in MiB", counted, cell), *goals]


def step_cell(of: Result) -> str:
    return "{median_ms:.1f} ({p20_ms:.1f} to {p80_ms:.1f})".format(**spread(of.step))


@dataclass
class BudgetSteps(Section):
    """Times of steps with a budget."""

    def lines(self) -> list[str]:
        ran = {case: {way: of for way, of in ways.items() if of.step} for case, ways in self.cases.items()}
        steps = table("step in ms: median (fifths)", ran, step_cell, BUDGET_STEP_WAYS)
        goals = [
            f"{case}: a step of {HEADS['ours']} takes {ratio:.3f} of the compiler's"
            for case, ways in ran.items()
            if {"ours", "compiler"} <= ways.keys() and (ratio := ratio_of(ways, "ours", "compiler")) > STEP_GOAL
        ]
        return [self.title, "", *steps, *goals, *self.refusals()]


@dataclass
class Steps(Section):
    """Times of steps, and ``first``: the seconds of the first steps of each network and way."""

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
        ran = {case: {way: of for way, of in ways.items() if of.step} for case, ways in self.cases.items()}

        def first(of: tuple[float, float]) -> str:
            return "{:.1f}, {:.1f}".format(*of)

        goals = [line for case, results in ran.items() for line in missed_steps(case, results)]
        steps = table("step in ms: median (fifths)", {case: of for case, of in ran.items() if of}, step_cell)
        firsts = table("first step in s: cold, warm cache", self.first, first)
        return [self.title, "", *steps, *firsts, *goals, *self.refusals()]


class Bought(NamedTuple):
    """What a way keeps and peaks at, and the products that it repeats, as a share of forward's arithmetic."""

    kept: int
    peak: int
    repeated: float = 0.0


@dataclass
class Budgets(Section):
    """What budgets buy; ``bought`` has it for each case, a network and a share, and for each way."""

    bought: dict[str, dict[str, Bought]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {case: {way: of._asdict() for way, of in ways.items()} for case, ways in self.bought.items()}

    def lines(self) -> list[str]:
        rows, goals = [], []
        for case, ways in self.bought.items():
            eager = ways["eager"]

            def cell(of: Bought | None, eager: Bought = eager) -> str:
                if of is None:
                    return "–"
                return f"{of.kept / eager.kept:.3f}, {of.peak / eager.peak:.3f}, {of.repeated:.1%}"

            rows.append([case, *(cell(ways.get(way)) for way in BUYERS)])
            goals += [f"{case}: {line}" for line in missed_budgets(ways)]
        table = markdown(["network, budget: kept, peak, repeated", *BUYERS.values()], rows)
        return [self.title, "", *table, "", *goals]


def missed_budgets(ways: Mapping[str, Bought]) -> Iterator[str]:
    """The goals of budgets that a network misses, a line each."""
    compiler, alike = (ways.get(way) for way in ("compiler", "alike"))
    if compiler is not None and alike is not None:
        kept, peak = alike.kept / compiler.kept, alike.peak / compiler.peak
        if kept > NOISE or peak > LIKE_COMPILER:
            yield f"at the compiler's arithmetic ours keeps {kept:.3f} and peaks at {peak:.3f} of it"


def missed_bytes(case: str, results: Mapping[str, Result]) -> Iterator[str]:
    """The goals of kept and peak bytes that a network misses, a line each."""
    for own in (way for way in BACKENDS if way in results):
        result, scope = results[own], results.get("scope")
        if scope is not None and result.kept > NOISE * scope.kept:
            yield f"{case}: {HEADS[own]} keeps {result.kept / scope.kept:.3f} of the scope's bytes"
        for budget in (way for way in BUDGETS if way in results):
            # About the same bytes or fewer.
            other = results[budget]
            if other.kept < 1.02 * result.kept and result.peak > NOISE * other.peak:
                yield (
                    f"{case}: {HEADS[own]} peaks at {result.peak / other.peak:.3f} of {HEADS[budget]}, "
                    f"which keeps {other.kept / result.kept:.3f} of its bytes"
                )


def ratio_of(results: Mapping[str, Result], own: str, rival: str) -> float:
    """The median over the rounds of the ratio of two steps."""
    return median(a / b for a, b in zip(results[own].step, results[rival].step, strict=True))


def missed_steps(case: str, results: Mapping[str, Result]) -> Iterator[str]:
    """The goal of the step's time that a network misses.

    The rival is the compiler with the budget that keeps the fewest bytes among those that keep no fewer than ours.
    """
    larger = [
        way
        for way in BUDGETS
        if way in results and "ours" in results and results[way].kept > 0.98 * results["ours"].kept
    ]
    if larger:
        rival = min(larger, key=lambda way: results[way].kept)
        ratio = ratio_of(results, "ours", rival)
        if ratio > STEP_GOAL:
            yield f"{case}: a step of {HEADS['ours']} takes {ratio:.3f} of {HEADS[rival]}"
    elif case == HOST and {"aten", "eager"} <= results.keys():
        ratio = ratio_of(results, "aten", "eager")
        if ratio > HOST_GOAL:
            yield f"{case}: a step of {HEADS['aten']} takes {ratio:.3f} of eager"


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
        Contest("warm-up", small, device).build(way)


@once
def first_steps(case: str, way: str, device: torch.device) -> tuple[float, float]:
    warmed_up(device)
    return Contest(case, NETWORKS[case], device).first_steps(way)


@once
def count(case: str, way: str, device: torch.device) -> Result:
    """The bytes of a way; a compiled step is counted after the first one."""
    torch.compiler.reset()
    with kernels_of_zeros() if device.type == "cpu" else nullcontext():
        try:
            kept, peak, _ = count_bytes(Contest(case, NETWORKS[case], device).build(way), device)
        except Missing as reason:
            return Result(missing=str(reason))
    return Result(kept=kept, peak=peak)


@once
def of_compiler(name: str) -> dict[float, Partition]:
    """What the compiler's own budgets repeat."""
    network = NETWORKS[name]
    with FakeTensorMode():
        return dict(zip(SHARES, partitions(network.make(), [torch.empty(network.shape)], SHARES), strict=True))


def buyer(name: str, share: float, way: str) -> Callable[[nn.Module, Tensor], nn.Module]:
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


@once
def buy(name: str, share: float, way: str, device: torch.device) -> Bought:
    """What a way does with a budget of ``share``."""
    torch.compiler.reset()
    contest = Contest(name, NETWORKS[name], device)
    with missed_quietly(), kernels_of_zeros() if device.type == "cpu" else nullcontext():
        if way == "eager":
            return Bought(*count_bytes(contest.of(as_it_is, False), device)[:2])
        job = contest.of(buyer(name, share, way), True)
        if way == "compiler":
            repeated = of_compiler(name)[share].repeated
        else:
            repeated = sum(graph.repeated for graph in fusedseg.compiler.report(job.net).graphs)
        return Bought(*count_bytes(job, device)[:2], repeated)


@once
def run_budget(name: str, share: float, device: torch.device) -> dict[str, Result]:
    """The timed steps of eager mode and of the ways with a budget of ``share``."""
    contest = Contest(name, {**NETWORKS, **WIDE}[name], device)

    def build(way: str) -> NetJob:
        return contest.of(as_it_is if way == "eager" else buyer(name, share, way), way != "eager")

    with missed_quietly():
        return compete_networks(BUDGET_STEP_WAYS, build, False, Timing(device, SECONDS[device.type]))


@once
def run(case: str, device: torch.device) -> dict[str, Result]:
    contest = Contest(case, {**NETWORKS, **WIDE}[case], device)
    return compete_networks(STEP_WAYS, contest.build, False, Timing(device, SECONDS[device.type]))


@once
def run_host(case: str, device: torch.device) -> dict[str, Result]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        contest = Contest(case, Network(partial(ResNet50, width=4), (4, 3, 16, 16)), device)
        return compete_networks(HOST_WAYS, contest.build, False, Timing(device, SECONDS[device.type]))
    finally:
        torch.set_num_threads(threads)


def steps_of(report: Any) -> Steps:
    return report.section("compiler", Steps("torch.compile, a training step"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = {
        "test_bytes": (NETWORKS, WAYS),
        "test_budget": (BOUGHT, list(BUYERS)),
        "test_budget_step": ([*BOUGHT, *list(WIDE)[1:]], BUDGET_STEP_WAYS),
        "test_first_step": (TIMED[:-1], [way for way in STEP_WAYS if way in COMPILED]),
        "test_step": (TIMED, STEP_WAYS),
        "test_host_time": ([HOST], HOST_WAYS),
    }
    names, ways = cases[metafunc.function.__name__]
    parametrize_pairs(metafunc, [(name, ways, True) for name in names])


def test_bytes(case, contender, device, report):
    network = NETWORKS[case]
    if not network.is_here():
        pytest.skip(f"needs the package {network.package}")
    section = report.section("compiler-bytes", Sizes("torch.compile, bytes of a training step"))
    result = section.cases.setdefault(title_of(case), {})[contender] = count(case, contender, device)
    if result.missing:
        pytest.skip(result.missing)


@pytest.mark.parametrize("share", SHARES)
def test_budget(case, contender, share, device, report):
    network = NETWORKS[case]
    if not network.is_here():
        pytest.skip(f"needs the package {network.package}")
    section = report.section("compiler-budgets", Budgets("torch.compile, budgets, as shares of eager mode"))
    ways = section.bought.setdefault(f"{title_of(case)}, {share}", {"eager": buy(case, SHARES[0], "eager", device)})
    ways[contender] = buy(case, share, contender, device)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.benchmark(timer=CLOCK)
def test_budget_step(case, contender, share, device, report, benchmark):
    network = {**NETWORKS, **WIDE}[case]
    if not network.is_here():
        pytest.skip(f"needs the package {network.package}")
    section = report.section("compiler-budget-steps", BudgetSteps("torch.compile, a training step with a budget"))
    title = f"{title_of(case)}, {share}"
    results = section.cases[title] = run_budget(case, share, device)
    report_step(benchmark, f"step of {title}", contender, results[contender])


def test_first_step(case, contender, device, report):
    try:
        seconds = first_steps(case, contender, device)
    except Missing as reason:
        pytest.skip(str(reason))
    steps_of(report).first.setdefault(title_of(case), {})[contender] = seconds


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    results = steps_of(report).cases[title_of(case)] = run(case, device)
    report_step(benchmark, f"step of {case}", contender, results[contender])


@pytest.mark.benchmark(timer=CLOCK)
def test_host_time(case, contender, device, report, benchmark):
    """Nearly all of the time is Python's: the tensors are small, and there is one thread."""
    results = steps_of(report).cases[case] = run_host(case, device)
    report_step(benchmark, case, contender, results[contender])
