"""With the option "bits" a step keeps no more than without it, and its measured peak is no higher with aten."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg import compiler
from tests.compiler.networks import Dense, compiled, kept, needs_inductor, peak_of


def erode(x):
    """The erosion of clDice's soft skeleton: a minimum over a cross."""
    rows, columns = F.max_pool2d(-x, (3, 1), 1, (1, 0)), F.max_pool2d(-x, (1, 3), 1, (0, 1))
    return torch.min(-rows, -columns)


def erode_square(x):
    return -F.max_pool2d(-x, 3, 1, 1)


def skeleton(x, erode, times):
    found = F.relu(x - F.max_pool2d(erode(x), 3, 1, 1))
    for _ in range(times):
        x = erode(x)
        delta = F.relu(x - F.max_pool2d(erode(x), 3, 1, 1))
        found = found + F.relu(delta - found * delta)
    return found


class CenterlineDice(nn.Module):
    """A network and the loss of its skeleton; without a network, the logits are a parameter."""

    def __init__(self, net, erode, times=4):
        super().__init__()
        self.net, self.skeleton = net, functools.partial(skeleton, erode=erode, times=times)
        self.logits = nn.Parameter(torch.randn(2, 4, 64, 64))

    def forward(self, x):
        logits = self.logits if self.net is None else self.net(x)
        p, t = logits.softmax(1)[:, :1], (x[:, :1] > 0).float()
        of_p, of_t = self.skeleton(p), self.skeleton(t)
        precision, recall = (of_p * t).sum() / (of_p.sum() + 1), (of_t * p).sum() / (of_t.sum() + 1)
        return 1 - 2 * precision * recall / (precision + recall + 1)


def group():
    """The two group norms are rebuilt beside the copies that the convolution makes: the peak rose by 5 %."""
    first, last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 4, 1)
    inner = [nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU()]
    return nn.Sequential(first, *inner, nn.MaxPool2d(2), last)


def residual():
    """A sum of two rounded values: packing needs three copies of it, and the peak rose by 26 %."""
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Sum(), nn.Conv2d(16, 8, 1))


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.norm = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)

    def forward(self, x):
        return F.selu(self.norm(self.short(x)) + x)


# Each network, and whether bits save anything there.
NETWORKS = {
    "skeleton": (lambda: CenterlineDice(None, erode), None),
    "skeleton behind a network": (lambda: CenterlineDice(plain(3, 4), erode, 1), 0.5),
    "concatenations": (lambda: Dense(F.leaky_relu, 3), 0.5),
    "group norms": (group, None),
    "residual": (residual, None),
}


def bytes_of(net, x, codegen, **options):
    """What a step keeps, and the peak that the allocator sees."""
    torch._dynamo.reset()
    run = compiled(net, codegen, **options)
    return kept(net, run, [x]), peak_of(net, run, x)


# One number of bits each: a compilation takes seconds.
BITS = {"skeleton behind a network": 8, "concatenations": 8}


def check(name, most):
    """Keeps no more than exact mode, or the share ``most`` of it, and peaks no higher.

    Vectors, such as statistics in another form, are a few hundred bytes, so the bound of the peak is 1.001.
    """
    torch.manual_seed(0)
    net, x = NETWORKS[name][0](), torch.randn(2, 3, 64, 64)
    exact = bytes_of(net, x, "aten")
    nbytes, peak = bytes_of(net, x, "aten", bits=BITS.get(name, 4))
    assert nbytes <= exact[0]
    assert peak <= 1.001 * exact[1]
    assert most is None or nbytes <= most * exact[0]


@pytest.mark.usefixtures("norms_of_a_gpu")
# The skeleton alone is the one behind a network.
@pytest.mark.parametrize("name", list(NETWORKS)[1:])
def test_aten(name):
    """A skeleton behind a few pools kept as much as before and peaked twice as high: a bit, or a position, of each of
    its values was kept, and the values that the questions compare lived until the end of forward."""
    check(name, NETWORKS[name][1])


@pytest.mark.slow
@needs_inductor
@pytest.mark.parametrize("name", ["skeleton", "concatenations", "group norms"])
def test_inductor_keeps_no_more(name):
    """Peaks differ from the count: Inductor's code for a CPU allocates the results of many kernels at once."""
    torch.manual_seed(0)
    net, x = NETWORKS[name][0](), torch.randn(2, 3, 64, 64)
    exact, _ = bytes_of(net, x, "inductor")
    assert bytes_of(net, x, "inductor", bits=BITS.get(name, 4))[0] <= exact


def test_a_skeleton_is_exact():
    """It follows from one value, which is kept as it is: the answers would take more bytes than its rounding saves."""
    torch.manual_seed(0)
    net, x, found = CenterlineDice(None, erode_square), torch.randn(2, 3, 64, 64), []
    for run in (net, compiled(net, bits=4)):
        found += torch.autograd.grad(run(x), [net.logits])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-9)


def test_the_report_says_where_bits_are_not_used():
    """The option was accepted and ignored without a word."""
    torch.manual_seed(0)
    # Small tensors are not packed.  To pack beside the group norms takes more workspace than the peak loses.
    cases = (plain(), (16, 4, 4), True), (plain(), (16, 32, 32), False), (group(), (3, 64, 64), True)
    for net, shape, unused in cases:
        run = compiled(net, dynamic=False, bits=4)
        run(torch.randn(2, *shape)).mean().backward()
        (graph,) = compiler.report(run).graphs
        assert (graph.unpacked, "bits               not used" in str(compiler.report(run))) == (unused, unused)


def plain(cin=16, out=16):
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.LeakyReLU(0.1))
        for i, o in ((cin, 16), (16, 16), (16, out))
    ]
    return nn.Sequential(*blocks)
