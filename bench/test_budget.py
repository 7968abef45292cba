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
BUDGETS = {f"budget {budget}": budget for budget in (0.4, 0.3, 0.2)}
COMPILED = {f"{name}, compiled": name for name in BUDGETS}
PLAIN, RESNET = "nnU-Net's plain network, 2x1x32x32x32", "ResNet-18, 4x3x128x128"
# The compiler's own budgets that keep about the same bytes.
COMPILERS = {
    PLAIN: {f"compiler like {name}": budget for name, budget in zip(BUDGETS, (0.4, 0.3, 0.2), strict=True)},
    RESNET: {f"compiler like {name}": budget for name, budget in zip(BUDGETS, (0.5, 0.35, 0.2), strict=True)},
}
CONTENDERS = ["eager", "ours", *BUDGETS, *COMPILED, "compiled", *COMPILERS[PLAIN], "checkpoint"]
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    PLAIN: (
        partial(PlainConvUNet, classes=CLASSES, widths=(16, 32, 64)),
        (2, 1, 32, 32, 32),
    ),
    RESNET: (partial(Segments, width=32), (4, 3, 128, 128)),
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


@cache
def of_compiler(case: str) -> dict[float, Partition]:
    """What the compiler keeps and repeats by default and with its own budgets."""
    make, shape = CASES[case]
    with FakeTensorMode():
        return partitions(make(), [torch.empty(shape)], (1.0, *COMPILERS[case].values()))


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
    # It empties the compiler's caches, so it comes before the contenders.
    of_compiler(case)
    work: dict[str, float] = {}

    def build(name: str) -> NetJob:
        net = CASES[case][0]()
        net.load_state_dict(state)
        net = net.to(device)
        if name in BUDGETS or name in COMPILED:
            fusedseg.convert(net, example_inputs=x, budget=BUDGETS[COMPILED.get(name, name)])
        own = 1.0 if name == "compiled" else COMPILERS[case].get(name)
        if name in COMPILED:
            net = Compiled(net)
        elif own is not None:
            net = Compiled(net, activation_memory_budget=own)
        net = Scoped(net) if name == "ours" else checkpointed_stages(net) if name == "checkpoint" else net
        job = NetJob(net, x, target)
        # Compiled code cannot be counted while it runs.
        if own is not None:
            partition = of_compiler(case)[own]
            work[name] = work["eager"] + partition.repeated * partition.flops
        else:
            work[name] = work[COMPILED[name]] if name in COMPILED else arithmetic(job)
        return job

    results = compete_networks(CONTENDERS, build, False, Timing(device, SECONDS[device.type]))
    eager = work["eager"]
    return results, {name: flops / eager for name, flops in work.items()}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_pairs(metafunc, [(case, CONTENDERS, True) for case in CASES])


# The smallest budget asks for more than the default of `extra_flops` buys.
@pytest.mark.filterwarnings("ignore:.*cannot be reached")
@pytest.mark.filterwarnings("ignore:fusedseg.convert. compiled code")
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
