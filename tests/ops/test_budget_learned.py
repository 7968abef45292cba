"""A scope with a budget and without a model: it chooses at the end of its first step."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import recompute
from fusedseg.memory import measure
from fusedseg.ops.recompute import guide, knapsack
from tests.ops.test_budget import assert_bits, network

# Budgets of such small networks are often missed.
pytestmark = [
    pytest.mark.usefixtures("no_choices"),
    pytest.mark.filterwarnings("ignore:fusedseg.recompute", "ignore:fusedseg.convert"),
]


def test_a_bare_scope_learns_in_its_first_step():
    net, x = network(), torch.randn(2, 1, 32, 32)
    owned = [*net.parameters(), *net.buffers()]
    eager = measure(net, x, owned=owned)
    scoped = recompute(0.25, extra_flops=1.0)(net)
    first, second = measure(scoped, x, owned=owned), measure(scoped, x, owned=owned)
    assert second.saved <= 0.25 * eager.saved < first.saved
    # Another size has another plan, and a decorated function or a new scope shares the plans.
    small = torch.randn(2, 1, 16, 16)
    measure(recompute(0.25, extra_flops=1.0)(net), small, owned=owned)
    assert (
        measure(recompute(0.25, extra_flops=1.0)(net), small, owned=owned).saved
        < measure(recompute()(net), small, owned=owned).saved
    )


def test_a_scope_that_misses_its_budget_says_so_once():
    net, x = network(), torch.randn(2, 1, 32, 32)
    step = recompute(0.01)(net)
    with pytest.warns(
        UserWarning, match="fusedseg.recompute: .* cannot be reached .* nearest budget that can be met is"
    ):
        step(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x).sum().backward()


@pytest.mark.parametrize("converted", [False, True], ids=["scope", "converted"])
def test_more_sizes_than_are_remembered(converted, monkeypatch):
    """The first sizes were forgotten, so that with many sizes in turn each step searched and none kept its budget."""
    monkeypatch.setattr(guide, "REMEMBERED", 3)
    searches = []
    choose = guide.choose
    monkeypatch.setattr(guide, "choose", lambda *args: searches.append(1) or choose(*args))
    net, sizes = network(), (32, 36, 40, 44, 48)
    if converted:
        fusedseg.convert(net, example_inputs=torch.randn(1, 1, 20, 20), budget=0.25)
    else:
        net = recompute(0.25)(net)
    images = [torch.randn(2, 1, size, size) for size in sizes]
    with pytest.warns(UserWarning, match="a budget has been planned for 3 input sizes"):
        _ = [net(image).sum().backward() for image in images]
    found = len(searches)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for image in images * 2:
            net(image).sum().backward()
    assert len(searches) == found
    kept = [measure(net, image).saved / image.numel() for image in images]
    assert max(kept[:3]) < 1.05 * min(kept)


def test_a_scope_inside_of_a_checkpoint_chooses_nothing(monkeypatch):
    """The second forward of the checkpoint once followed the choice that the first one had made, and saved less."""
    # The peak of this small network is no condition.
    monkeypatch.setattr(knapsack, "SAME", 1e9)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    x, scope = torch.randn(2, 3, 16, 16), fusedseg.recompute(budget=0.3)

    def step(forward):
        return torch.autograd.grad(forward(x).square().sum(), list(net.parameters()))

    expected = step(net)
    guide.forget()
    for _ in range(2):
        assert_bits(step(lambda x: checkpoint(scope(net), x, use_reentrant=False)), expected)
    # A choice that was made outside of checkpoints is followed.
    for _ in range(2):
        assert_bits(step(scope(net)), expected)
    assert guide._remembered[0][1].again
    assert_bits(step(lambda x: checkpoint(scope(net), x, use_reentrant=False)), expected)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("act", "again"),
    [
        (F.relu, True), (F.relu_, True), (torch.sigmoid, True), (lambda t: F.relu(t + 1), True),
        # The scope has no recipe for such a result.
        (lambda t: (t + 1).index_fill_(1, torch.tensor([0]), 0.5), False),
    ],
    ids=["relu", "relu_", "sigmoid", "sum and relu", "sum and index_fill_"],
)  # fmt: skip
def test_a_result_that_only_its_reader_saves(act, again, monkeypatch):
    """Of a convolution and ReLU without a norm, autograd saves the result of ReLU alone; calls were never chosen."""
    monkeypatch.setattr(knapsack, "SAME", 1e9)
    convs = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8, 8))
    x = torch.randn(2, 3, 16, 16)

    def step(scope):
        y = x
        with scope:
            for conv in convs:
                y = act(conv(y))
        return torch.autograd.grad(y.square().sum(), list(convs.parameters()))

    guide.forget()
    expected = step(nullcontext())
    for _ in range(3):
        assert_bits(step(fusedseg.recompute(budget=0.3)), expected)
    assert bool(guide._remembered[0][1].again) == again
