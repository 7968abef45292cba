"""Random networks with random budgets: the gradients are those without a budget, to the last bit."""

import copy
import dataclasses
import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.ops.recompute import knapsack

NORMS = (nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, affine=True), lambda c: nn.GroupNorm(2, c), nn.Identity)
ACTIVATIONS = (
    lambda: nn.ReLU(inplace=True), nn.ReLU, lambda: nn.LeakyReLU(0.1, inplace=True), nn.GELU, nn.SiLU, nn.ELU,
)  # fmt: skip
PRECISIONS = ("fp32", "fp64", "amp")


class Net(nn.Module):
    """Units of convolution, norm and activation, with pools, transposed convolutions, sums and concatenations."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.units, self.joins = nn.ModuleList(), []
        # The channels and the level of resolution of each value so far.
        values = [(3, 0)]
        for _ in range(rng.randint(4, 9)):
            (c, level), out = values[-1], rng.choice((4, 6, 8))
            join = None
            same = [i for i, (_, at) in enumerate(values[:-1]) if at == level]
            kind = rng.choice(("conv", "conv", "narrow", "down" if level < 2 else "up", "up" if level else "conv"))
            if same and rng.random() < 0.5:
                join = rng.choice(same)
                if values[join][0] != c or rng.random() < 0.5:
                    c, join = c + values[join][0], (join, "cat")
                else:
                    join = (join, "sum")
            self.joins.append(join)
            conv = {
                "conv": lambda c=c, out=out: nn.Conv2d(c, out, 3, padding=1),
                "narrow": lambda c=c, out=out: nn.Conv2d(c, out, 1, bias=False),
                "down": lambda c=c, out=out: nn.Conv2d(c, out, 3, stride=2, padding=1),
                "up": lambda c=c, out=out: nn.ConvTranspose2d(c, out, 2, 2),
            }[kind]()
            self.units.append(nn.Sequential(conv, rng.choice(NORMS)(out), rng.choice(ACTIVATIONS)()))
            values.append((out, level + {"down": 1, "up": -1}.get(kind, 0)))
        self.head = nn.Conv2d(values[-1][0], 2, 1)

    def forward(self, x):
        values = [x]
        for unit, join in zip(self.units, self.joins, strict=True):
            x = values[-1]
            if join is not None:
                other = values[join[0]]
                x = torch.cat([x, other], 1) if join[1] == "cat" else x + other
            values.append(unit(x))
        return self.head(F.max_pool2d(values[-1], 2))


def gradients(net, x, precision):
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
        out = net(x)
    out.double().square().mean().backward()
    return [out.detach(), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def compared(seed, choose, monkeypatch):
    """Compares a network with and without a budget; returns how many calls run twice, and how many are held."""
    rng, precision = random.Random(seed), PRECISIONS[seed % 3]
    torch.manual_seed(seed)
    plain = Net(rng).to(torch.float64 if precision == "fp64" else torch.float32)
    x = torch.randn(2, 3, 24, 32).to(next(plain.parameters()).dtype)
    ours, inplace = copy.deepcopy(plain), rng.random() < 0.7
    fusedseg.convert(plain, example_inputs=x, inplace=inplace)

    def chosen(*args):
        choice = choose(*args)
        if rng.random() < 0.5:
            choice = dataclasses.replace(choice, hold=frozenset(i for i in choice.again if rng.random() < 0.5))
        return choice

    monkeypatch.setattr(sys.modules["fusedseg.conversion.budget"], "choose", chosen)
    report = fusedseg.convert(ours, example_inputs=x, inplace=inplace, budget=rng.choice((0.4, 0.3, 0.25, 0.2, 0.1)))
    for _ in range(2):
        expected, got = (gradients(net, x, precision) for net in (plain, ours))
        for g, e in zip(got, expected, strict=True):
            assert torch.equal(g, e), f"seed {seed}, {precision}"
    return len(report.twice.choice.again), len(report.twice.choice.hold)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:fusedseg.convert")
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(1_000), marks=pytest.mark.slow)], ids=["few", "many"])
def test_the_same_bits(seeds, monkeypatch):
    # The vectors of these small networks weigh as much as activations, so the peak is no condition here.
    monkeypatch.setattr(knapsack, "SAME", 1e9)
    choose = sys.modules["fusedseg.conversion.budget"].choose
    found = [compared(seed, choose, monkeypatch) for seed in seeds]
    repeating, calls = sum(1 for again, _ in found if again), sum(again for again, _ in found)
    print(
        f"{repeating} of {len(seeds)} networks repeat {calls} calls; {sum(1 for _, hold in found if hold)} hold values"
    )
    assert repeating >= 0.6 * len(seeds)
