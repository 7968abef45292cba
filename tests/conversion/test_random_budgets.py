"""Random networks with random budgets: the gradients are those without a budget, to the last bit."""

import copy
import dataclasses
import random
import sys
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.memory import Footprint
from fusedseg.ops.recompute import guide, knapsack

ACTIVATIONS = (
    lambda: nn.ReLU(inplace=True), nn.ReLU, lambda: nn.LeakyReLU(0.1, inplace=True), nn.GELU, nn.SiLU, nn.ELU,
)  # fmt: skip
# The precision of a network is that of its seed modulo 3.
PRECISIONS = ("fp32", "fp64", "amp")
# Three small networks, one of each precision, and with ``-m slow`` a thousand networks.
SEEDS = [
    pytest.param((15, 22, 23), id="few"),
    *(
        pytest.param(range(first, first + 100), id=f"from {first}", marks=pytest.mark.slow)
        for first in range(0, 1000, 100)
    ),
]


def norm_of(rng, dims, c):
    batch, instance = (getattr(nn, f"{kind}Norm{dims}d") for kind in ("Batch", "Instance"))
    return rng.choice((batch, lambda c: instance(c, affine=True), lambda c: nn.GroupNorm(2, c), nn.Identity))(c)


class Linear(nn.Linear):
    """A 1x1 convolution as a matrix product."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Attention(nn.Module):
    """Attention between the positions of each sample, as one function or as two products."""

    def __init__(self, channels, out, *, one_function):
        super().__init__()
        self.qkv, self.out, self.one_function = nn.Linear(channels, 3 * out), nn.Linear(out, out), one_function

    def forward(self, x):
        q, k, v = self.qkv(x.flatten(2).transpose(1, 2)).chunk(3, dim=2)
        if self.one_function:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.bmm((q @ k.transpose(1, 2) * 0.5).softmax(2), v)
        return self.out(y).transpose(1, 2).reshape(x.shape[0], -1, *x.shape[2:])


class Net(nn.Module):
    """Units of a convolution or matrix product, norm and activation, with pools, sums and concatenations."""

    def __init__(self, rng: random.Random, dims: int) -> None:
        super().__init__()
        self.units, self.joins, self.dims = nn.ModuleList(), [], dims
        conv, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        # The channels and the level of resolution of each value so far.
        values = [(3, 0)]
        for _ in range(rng.randint(4, 9)):
            (c, level), out = values[-1], rng.choice((4, 6, 8))
            join = None
            same = [i for i, (_, at) in enumerate(values[:-1]) if at == level]
            kinds = ["conv", "conv", "narrow", "depthwise", "linear", "down" if level < 2 else "up"]
            kinds += ["up", "attention"] if level else ["conv"]
            kind = rng.choice(kinds)
            if same and rng.random() < 0.5:
                join = rng.choice(same)
                if values[join][0] != c or rng.random() < 0.5:
                    c, join = c + values[join][0], (join, "cat")
                else:
                    join = (join, "sum")
            self.joins.append(join)
            out = c + c % 2 if kind == "depthwise" else out
            first = {
                "conv": lambda c=c, out=out: conv(c, out, 3, padding=1),
                "narrow": lambda c=c, out=out: conv(c, out, 1, bias=False),
                "depthwise": lambda c=c, out=out: conv(c, out, 3, padding=1, groups=c if out == c else 1),
                "linear": lambda c=c, out=out: Linear(c, out),
                "attention": lambda c=c, out=out: Attention(c, out, one_function=rng.random() < 0.5),
                "down": lambda c=c, out=out: conv(c, out, 3, stride=2, padding=1),
                "up": lambda c=c, out=out: up(c, out, 2, 2),
            }[kind]()
            self.units.append(nn.Sequential(first, norm_of(rng, dims, out), rng.choice(ACTIVATIONS)()))
            values.append((out, level + {"down": 1, "up": -1}.get(kind, 0)))
        self.head = conv(values[-1][0], 2, 1)

    def forward(self, x):
        values = [x]
        for unit, join in zip(self.units, self.joins, strict=True):
            x = values[-1]
            if join is not None:
                other = values[join[0]]
                x = torch.cat([x, other], 1) if join[1] == "cat" else x + other
            values.append(unit(x))
        pool = F.max_pool2d if self.dims == 2 else F.max_pool3d
        return self.head(pool(values[-1], 2))


def gradients(step, net, x, precision):
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
        out = step(x)
    out.double().square().mean().backward()
    return [out.detach(), *(p.grad for p in net.parameters()), *(b.clone() for b in net.buffers())]


def assert_same(expected, got, about):
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e), about


def compared(seed, monkeypatch, choose):
    """Compares a network with and without a budget; returns two choices: that of a converted model, and of a scope.

    The converted model is compared with a converted model without a budget.  The scope around the stock model is
    compared with PyTorch's eager mode.
    """
    rng, precision = random.Random(seed), PRECISIONS[seed % 3]
    torch.manual_seed(seed)
    dims = rng.choice((2, 2, 2, 3))
    if precision == "amp":
        # PyTorch's gradients of conv3d in bf16 with few positions differ from run to run, without fusedseg too.
        dims = 2
    stock = Net(rng, dims).to(torch.float64 if precision == "fp64" else torch.float32)
    x = torch.randn(2, 3, *((24, 32) if dims == 2 else (8, 8, 12))).to(next(stock.parameters()).dtype)
    if rng.random() < 0.3:
        layout = torch.channels_last if dims == 2 else torch.channels_last_3d
        stock, x = stock.to(memory_format=layout), x.to(memory_format=layout)
    budget, inplace = rng.choice((0.4, 0.3, 0.25, 0.2, 0.1)), rng.random() < 0.7
    ours, scoped = copy.deepcopy(stock), copy.deepcopy(stock)

    def chosen(graph, budget, *_):
        choice = choose(graph, budget, graph.eager)
        if rng.random() < 0.5:
            choice = dataclasses.replace(choice, hold=frozenset(i for i in choice.again if rng.random() < 0.5))
        return choice

    with monkeypatch.context() as patch:
        # Counting the bytes would take a third of the time; ``chosen`` reads those that autograd is about to save.
        patch.setattr(sys.modules["fusedseg.conversion.convert"], "_footprint", lambda *of: Footprint(1, 1, 1))
        patch.setattr(sys.modules["fusedseg.conversion.budget"], "choose", chosen)
        patch.setattr(guide, "choose", chosen)
        report = fusedseg.convert(ours, example_inputs=x, inplace=inplace, budget=budget)
        # The same converted model without the budget.
        plain = copy.deepcopy(ours)
        plain._fusedseg_wiring.make_guide = plain._fusedseg_wiring.choice = None
        about = f"seed {seed}, {precision}, {dims}D"
        for _ in range(2):
            expected, got = (gradients(net, net, x, precision) for net in (plain, ours))
            assert_same(expected, got, f"{about}, converted")
        guide.forget()
        step = fusedseg.recompute(budget=budget)(scoped)
        # The first step chooses, and the others follow.
        for _ in range(3):
            expected, got = gradients(stock, stock, x, precision), gradients(step, scoped, x, precision)
            assert_same(expected, got, f"{about}, scope")
    ((_, learned),) = guide._remembered
    return report.twice.choice, learned


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:fusedseg.convert", "ignore:fusedseg.recompute")
@pytest.mark.parametrize("seeds", SEEDS)
def test_the_same_bits(seeds, monkeypatch):
    # The vectors of these small networks weigh as much as activations, so the peak is no condition here.
    monkeypatch.setattr(knapsack, "SAME", 1e9)
    repeating: Counter[str] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        found = compared(seed, monkeypatch, guide.choose)
        for way, choice in zip(("converted", "scope"), found, strict=True):
            repeating[way] += bool(choice.again)
            repeating[f"{way}, holding values"] += bool(choice.hold)
            calls.update((way, choice.calls[i].function) for i in choice.again)
        repeating["either"] += any(choice.again for choice in found)
    print(f"{len(seeds)} networks; that repeat calls: {dict(repeating)}; {dict(calls)}", flush=True)
    assert repeating["either"] >= 0.8 * len(seeds)
