"""Times one training step within a byte budget, beside the arithmetic that the step repeats.

The contenders are eager mode, the scope without a budget (ours), ``fusedseg.convert`` with budgets, the same compiled,
``torch.compile`` with its own memory budget that keeps about the same bytes, and checkpoints.
``pytest -s bench/test_budget.py -m slow`` also prints the time and the arithmetic of a step, divided by those of eager
mode.
"""

from collections.abc import Callable
from functools import cache, partial
from statistics import median

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusedseg
from fusedseg.memory import measure
from fusedseg.memory.compiled import Partition, partitions
from tests.nnunet import PlainConvUNet

from .contenders import Compiled
from .data import parametrize_pairs
from .harness import Result, Timing, once
from .jobs import NetJob, compete_networks
from .replay import CLOCK, report_step
from .results import Section
from .test_recompute import CLASSES, Checkpointed, Scoped, Segments, checkpointed

SECONDS = {"cpu": 12.0, "cuda": 15.0}
SHARES = (0.4, 0.3, 0.2)
BUDGETS = {f"budget {share}": share for share in SHARES}
COMPILED = {f"{name}, compiled": share for name, share in BUDGETS.items()}
# The compiler with its own budget that keeps about as much as ours with this one.
COMPILERS = {f"compiler like {name}": share for name, share in BUDGETS.items()}
CONTENDERS = ["eager", "ours", *BUDGETS, *COMPILED, "compiled", *COMPILERS, "checkpoint"]
# The compiler's own budgets that are tried.
GRID = tuple(i / 20 for i in range(1, 21))
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "nnU-Net's plain network, 2x1x32x32x32": (
        partial(PlainConvUNet, classes=CLASSES, widths=(16, 32, 64)),
        (2, 1, 32, 32, 32),
    ),
    "ResNet-18, 4x3x128x128": (partial(Segments, width=32), (4, 3, 128, 128)),
}


def checkpointed_stages(net: nn.Module) -> nn.Module:
    """Checkpoints every stage of nnU-Net's network, or every block of a ResNet."""
    if not isinstance(net, PlainConvUNet):
        return checkpointed(net)
    for stages in (net.encoder, net.decoder):
        for i, stage in enumerate(stages):
            stages[i] = Checkpointed(stage)
    return net


def arithmetic(job: NetJob) -> int:
    """The floating-point operations of the convolutions and matrix products of a step."""
    with FlopCounterMode(display=False) as counter:
        job.backward(job.forward(job.prepare()))
    return counter.get_total_flops()


def converted(net: nn.Module, x: torch.Tensor, share: float) -> nn.Module:
    fusedseg.convert(net, example_inputs=x, budget=share)
    return net


@cache
def of_compiler(case: str) -> dict[float, Partition]:
    """What the compiler keeps and repeats with each of its own budgets."""
    make, shape = CASES[case]
    with FakeTensorMode():
        return partitions(make(), [torch.empty(shape)], GRID)


@cache
def of_ours(case: str, share: float) -> tuple[int, Partition]:
    """The bytes that the converted network keeps in eager mode, and what it keeps and repeats compiled."""
    make, shape = CASES[case]
    with FakeTensorMode():
        net, x = make(), torch.empty(shape)
        return measure(converted(net, x, share), x).saved, *partitions(net, [x]).values()


def like(case: str, share: float) -> float:
    """The compiler's own budget whose bytes are nearest to those that ours keeps."""
    kept, _ = of_ours(case, share)
    found = of_compiler(case)
    return min(found, key=lambda budget: (abs(found[budget].kept - kept), -budget))


@cache
def inputs(case: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    make, shape = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(shape, device=device)
    return x, torch.randint(CLASSES, (shape[0], *shape[2:]), device=device), make().state_dict()


@once
def run(case: str, device: torch.device) -> tuple[dict[str, Result], dict[str, float]]:
    """The results of all contenders, and the arithmetic of each divided by that of eager mode."""
    x, target, state = inputs(case, device)
    work: dict[str, float] = {}

    def build(name: str) -> NetJob:
        net = CASES[case][0]()
        net.load_state_dict(state)
        net = net.to(device)
        partition = None
        if name in BUDGETS:
            net = converted(net, x, BUDGETS[name])
        elif name in COMPILED:
            partition = of_ours(case, COMPILED[name])[1]
            net = Compiled(converted(net, x, COMPILED[name]))
        elif name == "compiled" or name in COMPILERS:
            budget = like(case, COMPILERS[name]) if name in COMPILERS else 1.0
            partition = of_compiler(case)[budget]
            net = Compiled(net, activation_memory_budget=budget)
        net = Scoped(net) if name == "ours" else checkpointed_stages(net) if name == "checkpoint" else net
        job = NetJob(net, x, target)
        # Compiled code cannot be counted while it runs.
        work[name] = arithmetic(job) if partition is None else work["eager"] + partition.repeated * partition.flops
        return job

    results = compete_networks(CONTENDERS, build, False, Timing(device, SECONDS[device.type]))
    eager = work["eager"]
    return results, {name: flops / eager for name, flops in work.items()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_pairs(metafunc, [(case, CONTENDERS, True) for case in CASES])


@pytest.mark.benchmark(timer=CLOCK)
def test_step(case, contender, device, report, benchmark):
    results, work = run(case, device)
    report.section("budget", Section("A training step within a byte budget")).cases[case] = results
    result, eager = results[contender], results["eager"]
    if result.step:
        time = median(ours / theirs for ours, theirs in zip(result.step, eager.step, strict=True))
        print(
            f"\n| {case} | {contender} | kept {result.kept / eager.kept:.2f} | peak {result.peak / eager.peak:.2f} "
            f"| arithmetic {work[contender]:.3f} | time {time:.3f} | over {time / work[contender] - 1:+.1%} |",
            flush=True,
        )
    report_step(benchmark, f"step of {case}", contender, result)
