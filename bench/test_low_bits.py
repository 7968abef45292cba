"""Trains networks in which the backend keeps 8 or 4 bits a value beside the exact network, from equal weights.

The control is the exact network with initial weights that differ by a millionth.  Two such trainings drift apart, and
their difference shows how much of a difference in IoU means nothing.  All cases are slow: they train for minutes.
"""

import copy
import importlib
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
import torch
from torch import nn

from examples.demo import training
from fusedseg.compiler import backend

from .results import markdown

TASKS = ("slices", "encoders")
SEEDS = range(5)
EXACT, CONTROL = "exact", "exact, weights 1e-6 apart"
BITS = {"8 bits": 8, "4 bits": 4}
APART = 1e-6
# Half of the steps of the demos.
STEPS = 100
# The last loss is the mean of this many steps, because batches differ.
LAST = 10


class Outcome(NamedTuple):
    """What one training has led to: the mean IoU of the classes on the held-out part, kept bytes, and all losses."""

    iou: float
    kept: int
    losses: list[float]

    @property
    def last(self) -> float:
        return fmean(self.losses[-LAST:])


def perturbed(net: nn.Module, seed: int) -> nn.Module:
    """A copy of the network, whose parameters differ by about a millionth of their size."""
    net = copy.deepcopy(net)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1 + APART * torch.randn(p.shape, generator=generator).to(p.device))
    return net


def train(task: str, seed: int, device: torch.device, steps: int = STEPS) -> dict[str, Outcome]:
    """Trains the exact network, the control and those with fewer bits, step by step in turn."""
    problem = importlib.import_module(f"examples.demo.{task}").problem(device)
    exact = training.build(problem, device, seed)["eager"]
    networks = {EXACT: exact, CONTROL: perturbed(exact, seed)}
    for name, bits in BITS.items():
        networks[name] = copy.deepcopy(exact)
        networks[name].compile(backend=backend, options={"codegen": "aten", "bits": bits, "seed": seed})
    trainings = training.train(problem, networks, steps, seed, dict.fromkeys(networks, True))
    batch = problem.batch(torch.Generator().manual_seed(seed))
    outcomes = {}
    for name, trained in trainings.items():
        predicted = training.predict(trained.net, problem.held_out.images)
        iou = training.intersection_over_union(predicted, problem.held_out.labels, problem.classes)
        kept, _ = training.count_bytes(trained.net, True, problem, batch)
        outcomes[name] = Outcome(fmean(iou.values()), kept, trained.losses)
    return outcomes


def table(task: str, by_seed: dict[int, dict[str, Outcome]]) -> list[str]:
    """A row for each network.  The difference is that from the exact network of the same seed."""
    rows = [["network", "kept / exact", "IoU", "difference", "largest", "last loss"]]
    for name in (EXACT, CONTROL, *BITS):
        found = [of[name] for of in by_seed.values()]
        apart = [of[name].iou - of[EXACT].iou for of in by_seed.values()]
        rows.append(
            [
                name,
                f"{found[0].kept / by_seed[next(iter(by_seed))][EXACT].kept:.2f}",
                spread([one.iou for one in found]),
                "" if name == EXACT else spread(apart, sign="+"),
                "" if name == EXACT else f"{max(map(abs, apart)):.4f}",
                spread([one.last for one in found]),
            ]
        )
    steps = len(found[0].losses)
    title = f"{task}: mean IoU of the classes on the held-out part, {len(by_seed)} seeds, {steps} steps"
    return [title, "", *markdown(rows[0], rows[1:])]


def spread(values: list[float], sign: str = "") -> str:
    """The mean and the standard deviation."""
    return f"{fmean(values):{sign}.4f} ± {stdev(values):.4f}" if len(values) > 1 else f"{fmean(values):{sign}.4f}"


@pytest.fixture(scope="module")
def outcomes(report):
    """task -> seed -> network -> outcome.  At the end it prints the tables and writes the JSON."""
    found: dict[str, dict[int, dict[str, Outcome]]] = {}
    yield found
    for task, by_seed in found.items():
        report.notes.append("\n".join(table(task, by_seed)))
    json = {
        task: {seed: {n: o._asdict() for n, o in of.items()} for seed, of in by.items()} for task, by in found.items()
    }
    report.write("low_bits", json)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("task", TASKS)
def test_training(task, seed, outcomes, device):
    found = outcomes.setdefault(task, {})[seed] = train(task, seed, device)
    # The forward pass is exact, so the first losses are equal to the last bit.
    assert len({found[name].losses[0] for name in (EXACT, *BITS)}) == 1
    for name, of in found.items():
        assert of.iou > 0.5, f"{name} does not segment"
        assert of.last < 0.5 * of.losses[0]
