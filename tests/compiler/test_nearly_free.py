"""Compute-intensive ops whose second run is nearly free."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg.compiler import report
from tests.compiler.networks import compiled, kept, results, same
from tests.compiler.programs import Function, Net


class Windows(nn.Module):
    """Attention in windows with a bias of positions, whose scores are much larger than queries and keys."""

    def __init__(self, shifts=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(2, 64, 64))
        self.shift = nn.Linear(8, 1) if shifts else None

    def forward(self, x):
        B, N, C = x.shape
        x = F.layer_norm(x, [C])
        q, k, v = self.qkv(x).reshape(B, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        scores = (q * 0.5) @ k.transpose(-2, -1) + self.bias
        if self.shift is not None:
            scores = scores + self.shift(x).view(B, 1, 1, N)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


@pytest.mark.parametrize("shifts", [False, True], ids=["", "shifts"])
def test_scores_of_attention_are_not_kept(shifts):
    """They were nine tenths of what a SwinUNETR kept.

    With shifts, the sum of both was kept instead of the scores and the small shifts, which cost more bytes.
    """
    torch.manual_seed(0)
    net, x = Windows(shifts), torch.randn(6, 64, 8)
    twin, scores = copy.deepcopy(net), 6 * 2 * 64 * 64 * 4
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))
    assert kept(twin, twin, [x]) > scores
    assert kept(net, compiled(net), [x]) < scores / 2


@pytest.mark.parametrize(("bits", "factor"), [(8, 1), (4, 4)], ids=["8-flat", "4-sharp"])
def test_scores_of_attention_are_not_kept_with_bits(bits, factor):
    """They were exact, because softmax was: a SwinUNETR with 4 bits kept seven times what it keeps without."""
    torch.manual_seed(0)
    net, x = Windows(), torch.randn(24, 64, 8)
    with torch.no_grad():
        net.qkv.weight.mul_(factor)
    scores = 24 * 2 * 64 * 64 * 4
    # Products of two activations read exact values: query, key and value are a quarter of the scores.
    assert kept(net, compiled(net, bits=bits), [x]) <= scores / 4


def test_a_fiftieth_of_the_arithmetic_runs_again():
    """A 1x1 convolution of an image runs again; another one, of as many bytes for more arithmetic, does not."""

    def run(x, shortcut, first, second, norms):
        y = second(torch.relu(norms[0](first(x))))
        return torch.relu(norms[1](y) + norms[2](shortcut(x))).mean()

    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
    net = Net(run, shortcut=nn.Conv2d(1, 8, 1), first=first, second=second, norms=norms)
    x = torch.randn(1, 1, 32, 32)
    twin, plane = copy.deepcopy(net), 8 * 32 * 32 * 4
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))
    assert 2 * plane <= kept(net, compiled(net), [x]) < 2.1 * plane


def test_a_product_whose_input_would_have_to_be_kept_runs_once():
    """The weight is frozen, so that backward needs no input of the product."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 8, 5), Function(torch.exp), nn.Conv2d(8, 1, 1), Function(torch.sin), nn.Conv2d(1, 16, 7)
    )
    net[2].weight.requires_grad_(False)
    x = torch.randn(1, 2, 20, 20)
    twin = copy.deepcopy(net)
    assert same(results(net, compiled(net), [x], 1), results(twin, twin, [x], 1))
    assert kept(net, compiled(net), [x]) <= kept(twin, twin, [x])


def test_what_reads_an_enlarged_value_runs_once():
    """Backward would enlarge the value twice, which took a CPU 6 % of a U-Net's step for no byte of its peak."""
    for enlarges, repeated in ((True, False), (False, True)):
        torch.manual_seed(0)
        x = torch.randn(1, 4, 20, 20)
        first = nn.Sequential(nn.Conv2d(4, 16, 5), nn.BatchNorm2d(16), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8), nn.ReLU())
        up = nn.Upsample(scale_factor=2, mode="bilinear") if enlarges else nn.Identity()
        net = nn.Sequential(first, up, second, nn.Conv2d(8, 64, 5))
        twin, ours = copy.deepcopy(net), compiled(net)
        assert same(results(net, ours, [x]), results(twin, twin, [x]))
        (graph,) = report(ours).graphs
        assert (graph.repeated > 0) == repeated
