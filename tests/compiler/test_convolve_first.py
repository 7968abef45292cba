"""A 1x1 convolution behind an interpolation runs before it: what is swapped, what is left alone, and the values."""

import copy

import pytest
import torch
from torch.nn import functional as F

import fusedseg
from fusedseg.compiler.capture import convolve_first
from fusedseg.compiler.settings import Settings
from tests.compiler.networks import compiled
from tests.compiler.programs import Up, step
from tests.reference import relative_error
from tests.tools.spy import spied

pytestmark = pytest.mark.usefixtures("compiled_afresh")


def swapping(net, codegen="inductor", dynamic=None):
    """The numbers of pairs that the pass swaps in the graphs of Dynamo, and a network that runs these graphs."""
    counts = []

    def backend(module, _):
        counts.append(convolve_first.swap_interpolations(module, Settings(codegen=codegen)))
        module.graph.lint()
        return module

    return counts, torch.compile(net, backend=backend, dynamic=dynamic)


def swapped(net, *inputs, **options):
    """The number of pairs that the pass swaps, and the result of the graph after it."""
    counts, run = swapping(net, **options)
    out = run(*inputs)
    return sum(counts), out


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "rows"), [(True, False), (False, True)], ids=["contiguous", "channels_last"])
def test_codegens(codegen, bias, rows, monkeypatch, needs_interpreter, device):
    """Both codegens convolve first where Triton serves the tensors, and so does Inductor elsewhere."""
    monkeypatch.setattr(fusedseg, "backend", "triton")
    swaps = spied(monkeypatch, convolve_first, "_swap")
    net = Up(bias=bias)
    exact, x = copy.deepcopy(net).double(), torch.randn(2, 3, 5, 4)
    net, x = net.to(device), x.to(device)
    if rows:
        net, x = net.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    wanted = step(exact, exact, x.cpu().double())
    found = step(net, compiled(net, codegen), x)
    for name, theirs in wanted.items():
        assert relative_error(found[name], theirs) <= 1e-5, name
    assert len(swaps) == 1
    assert found["output 0"].stride() == net(x).stride()


def test_aten_keeps_the_bits_of_eager_mode_without_triton():
    net, x = Up(), torch.randn(2, 3, 5, 4)
    assert swapped(net, x, codegen="aten")[0] == 0
    found, wanted = step(net, compiled(net), x), step(net, net, x)
    assert all(torch.equal(found[name], theirs) for name, theirs in wanted.items())


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Up(channels=8), "the result would have more channels than the input"),
        (Up(kernel=3), "it reads several positions"),
        (Up(stride=2), "it leaves positions out"),
        (Up(padding=1), "it adds positions, where it gives the bias"),
        (Up(groups=2), "groups"),
        (Up(mode="area"), "no backward that we know"),
    ],
    ids=lambda of: of if isinstance(of, str) else "",
)
def test_others_stay(net, why):
    x = torch.randn(1, 3, 4, 4)
    count, out = swapped(net, x)
    assert count == 0, why
    assert torch.equal(out, net(x))


class Between(Up):
    """What happens between the interpolation and the convolution is in ``between``."""

    def __init__(self, between, **options):
        super().__init__(**options)
        self.between = between

    def forward(self, x):
        small = self.first(x)
        up = F.interpolate(small, **self.how)
        extra = self.between(small, up, self)
        return self.reduce(up), extra


# What happens, and how many pairs are swapped.
BETWEEN = {
    "written over": (lambda small, up, net: small.mul_(2), 0),
    "written through a view": (lambda small, up, net: (small.view(-1).add_(1), None)[1], 0),
    "second reader": (lambda small, up, net: up.sum(), 0),
    "weight changed": (lambda small, up, net: (net.reduce.weight.mul_(2), None)[1], 0),
    "unrelated": (lambda small, up, net: small.sin().sum() + small.exp().mean(), 1),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_readers_and_writers_in_between(name):
    """A tensor that is written over after its interpolation would give other values.

    A write that nobody reads counts as one to this tensor, whatever it writes to.
    """
    between, count = BETWEEN[name]
    net, x = Between(between), torch.randn(1, 3, 4, 4)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        found, (out, extra) = swapped(net, x)
        assert found == count
        wanted, wanted_extra = twin(x)
    torch.testing.assert_close(out, wanted)
    if extra is not None:
        torch.testing.assert_close(extra, wanted_extra)


def test_a_mode_that_changes_in_between():
    """The small tensor gets no gradient through an interpolation that is not recorded."""

    class Net(Up):
        def forward(self, x):
            small = self.first(x)
            with torch.no_grad():
                up = F.interpolate(small, **self.how)
            return self.reduce(up) + small.mean()

    net, x = Net(), torch.randn(1, 3, 4, 4)
    count, out = swapped(net, x)
    assert count == 0
    found, wanted = (torch.autograd.grad(of.sum(), net.first.weight)[0] for of in (out, net(x)))
    torch.testing.assert_close(found, wanted)


def test_autocast_on_a_cpu_stays():
    """There autocast interpolates in fp32, and the result of the convolution is in half precision."""
    net, x = Up(), torch.randn(1, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        count, out = swapped(net, x)
        wanted = net(x)
    assert count == 0
    assert out.dtype == wanted.dtype
    assert torch.equal(out, wanted)


def test_dynamic_sizes_stay():
    """A question about a symbolic size would compile the graph again for each size."""
    net = Up()
    counts, run = swapping(net, dynamic=True)
    for n in (4, 6, 7):
        x = torch.randn(1, 3, n, n + 1)
        torch.testing.assert_close(run(x), net(x))
    assert counts == [0]


def test_calls_by_name_and_several_pairs():
    def run(x, w, b):
        up = F.interpolate(input=x, size=(9, 7), mode="bilinear")
        y = torch.conv2d(input=up, weight=w, bias=b)
        return F.conv2d(F.interpolate(y, scale_factor=2.0), w[:, :2].contiguous(), stride=(1, 1), padding=0)

    x, w, b = torch.randn(1, 3, 4, 4), torch.randn(2, 3, 1, 1), torch.randn(2)
    count, out = swapped(run, x, w, b)
    assert count == 2
    torch.testing.assert_close(out, run(x, w, b))
