"""The order of what backward computes again: the graph before and after, and peaks."""

import copy
from math import inf

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg.compiler.plan import schedule
from fusedseg.compiler.plan.schedule import PeakTarget
from fusedseg.memory import allocator_peak
from tests.compiler.networks import CODEGENS, compiled, peak_of, results, same
from tests.compiler.test_passes import names, traced
from tests.tools.spy import spied

aten = torch.ops.aten


def reordered(run, *inputs, **given):
    """The calls of a function before and after ``reorder``, which changes no result."""
    module = traced(run, *inputs)
    expected, before = module(*inputs), names(module.graph)
    schedule.reorder(module, **given)
    assert same(module(*inputs), expected)
    return before, names(module.graph)


def test_a_value_is_computed_twice_around_the_peak():
    """It is read first and last, and its input lives as long, so it need not lie beside the large tensor."""

    def run(kept, tangents):
        value = aten.sigmoid(kept)
        large = aten.cat([aten.mul(tangents, value)] * 8)
        small = aten.mean(large, [0])
        return aten.mul(aten.mul(small, value), kept)

    before, after = reordered(run, torch.randn(2, 50), torch.randn(2, 50))
    assert before == ["sigmoid", "mul", "cat", "mean", "mul", "mul"]
    assert after == ["sigmoid", "mul", "cat", "mean", "sigmoid", "mul", "mul"]


def test_the_input_of_a_convolution_is_gone_before_its_gradient():
    """Input, gradient of the output and gradient of the input lay side by side."""
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
    x = torch.randn(2, 8, 32, 32)
    run = compiled(net)
    assert same(results(net, run, [x]), results(net, net, [x]))
    # It was 7.1.
    assert allocator_peak(lambda: run(x).mean().backward()) < 6.5 * x.nbytes


@pytest.mark.parametrize(
    "convolve",
    [lambda y, w: F.conv2d(y[:, ::2], w, padding=1), lambda y, w: F.conv2d(y, y, padding=8)],
    ids=["some channels", "itself"],
)
def test_a_convolution_whose_input_cannot_go_first(convolve):
    """Backward raised: nothing of the strides of ``x`` fits in ``dy``; and ``x`` was gone before its second reader."""
    x, w = torch.randn(8, 8, 8, 8, requires_grad=True), torch.randn(4, 4, 3, 3, requires_grad=True)

    def run(x, w):
        return convolve(x * 2, w).square().mean() + w.sum()

    compiled_run = torch.compile(run, backend="fusedseg", options={"codegen": "aten"})
    ours, expected = (torch.autograd.grad(of(x, w), (x, w)) for of in (compiled_run, run))
    assert same(ours, expected)


def test_the_input_that_needs_the_most_memory_comes_first():
    def run(a, b, tangents):
        small = aten.sigmoid(a)
        large = aten.mean(aten.cat([aten.cos(b)] * 8), [0], True)
        return aten.mul(tangents, aten.add(small, large))

    _, after = reordered(run, torch.randn(1, 50), torch.randn(2, 50), torch.randn(1, 50))
    assert after == ["cos", "cat", "mean", "sigmoid", "add", "mul"]


def test_all_results_of_a_call_are_computed_again_by_one_call(monkeypatch):
    """Each of them ran the norm once more, because each of them lies at the peak."""
    monkeypatch.setattr(schedule, "MOST_TRAFFIC", 1000)

    def run(kept, tangents):
        results = aten.native_group_norm(kept, None, None, 2, 4, 9, 4, 1e-5)
        y, mean, rstd = results[0], *(aten.view(t, [2, 4, 1, 1]) for t in results[1:])
        large = aten.cat([aten.mul(aten.mul(aten.mul(tangents, y), mean), rstd)] * 8)
        small = aten.mean(large, [0])
        return aten.mul(aten.mul(aten.mul(small, y), mean), rstd)

    _, after = reordered(run, torch.randn(2, 4, 3, 3), torch.randn(2, 4, 3, 3))
    assert after.count("native_group_norm") == 2


@pytest.mark.parametrize(("price", "products"), [(0, 1), (1, 1), (1000, 2)])
def test_a_product_runs_again_where_the_peak_is_worth_it(price, products):
    """The target was met without it, and so the result lay at the peak however cheap the product was."""

    def run(kept, primals, tangents):
        value = aten.mm(kept, primals)
        small = aten.mean(aten.cat([aten.mul(tangents, value)] * 8), [0])
        return aten.mul(aten.mul(small, value), kept)

    inputs = torch.randn(2, 50), torch.randn(50, 50), torch.randn(2, 50)
    _, after = reordered(run, *inputs, peak_target=PeakTarget(inf, inf, price))
    assert after.count("mm") == products


@pytest.mark.parametrize(
    ("op", "by_inductor", "times"), [("sigmoid", False, 2), ("sigmoid", True, 1), ("bmm", True, 2)]
)
def test_inductor_would_fuse_two_runs_but_those_of_products(op, by_inductor, times):
    """A 1x1 convolution that runs again lay at the peak of UNETR with Inductor: 33.98 MiB, now 29.99."""

    def run(kept, primals, tangents):
        value = aten.sigmoid(kept) if op == "sigmoid" else aten.squeeze(aten.bmm(kept.unsqueeze(0), primals[None]), 0)
        large = aten.cat([aten.mm(aten.t(value), tangents)] * 4)
        return aten.mul(aten.mm(value, aten.mul(primals, aten.mean(large, [0]))), kept)

    inputs = torch.randn(2, 50), torch.randn(50, 50), torch.randn(2, 50)
    _, after = reordered(run, *inputs, by_inductor=by_inductor)
    assert after.count(op) == times


@pytest.mark.parametrize(("reads", "moved"), [("the sum", True), ("nothing", True), ("the product", False)], ids=str)
def test_a_sum_comes_after_the_product_that_reads_the_same_value(reads, moved):
    """Inductor computed the value again for a sum before it.  What another op reads of the sum stays before it."""

    def run(kept, tangents):
        value = aten.mul(tangents, kept)
        total = aten.squeeze(aten.sum(value, [0], True), 0)
        scaled = aten.mul(kept, 2 if reads == "nothing" else total if reads == "the product" else 3)
        return aten.mm(aten.t(value), scaled), aten.cos(total)

    inputs = torch.randn(4, 5), torch.randn(4, 5)
    _, after = reordered(run, *inputs)
    assert after.index("sum") < after.index("mm")
    _, after = reordered(run, *inputs, by_inductor=True)
    assert (after.index("sum") > after.index("mm")) == moved


class Biased(nn.Module):
    """Attention of two heads with a bias for each pair of positions, whose gradient is a sum over the batch."""

    def __init__(self, positions):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2, positions, positions))
        self.inputs = nn.Linear(8, 24)

    def forward(self, x):
        queries, keys, values = self.inputs(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return ((queries @ keys.mT + self.bias).softmax(-1) @ values).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("codegen", CODEGENS)
def test_two_tensors_of_scores_at_the_peak_of_an_attention(codegen):
    """The gradient of the scores was a third one, beside the softmax and its gradient."""
    torch.manual_seed(0)
    net, x = Biased(192), torch.randn(3, 192, 8)
    twin, run = copy.deepcopy(net), compiled(net, codegen)
    for found, wanted in zip(results(net, run, [x]), results(twin, twin, [x]), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    scores = x.new_empty(3, 2, 192, 192).nbytes
    peaks = [allocator_peak(lambda call=call: call(x).square().mean().backward()) for call in (run, twin)]
    # The gradient of the bias has a third of the bytes of the scores.
    assert peaks[0] < 2.8 * scores < 3 * scores < peaks[1]


class Residual(nn.Module):
    """Blocks whose sums are read by the next block, by its shortcut and by their own gate."""

    def __init__(self, blocks):
        super().__init__()
        conv, norm = nn.Conv3d, nn.InstanceNorm3d
        self.stem, self.head = conv(2, 12, 3), conv(12, 3, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(12, 6, 1), norm(6), nn.ReLU(), conv(6, 12, 3, padding=1), norm(12))
            for _ in range(blocks)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(block(x) + x)
        return self.head(x)


def test_a_lower_peak_than_eager_mode():
    """The sums of several blocks were held together."""
    torch.manual_seed(0)
    net, x = Residual(3), torch.randn(2, 2, 14, 14, 14)
    twin = copy.deepcopy(net)
    run = compiled(net)
    assert same(results(net, run, [x], 1), results(twin, twin, [x], 1))
    peaks = [peak_of(of, call, x) for call, of in ((run, net), (twin, twin))]
    print(peaks[0] / peaks[1])
    assert peaks[0] < 0.9 * peaks[1]


class Chain(nn.Module):
    """Residual blocks of one size: the output of each is rebuilt from that of the one before it."""

    def __init__(self, length):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(length))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(length))

    def forward(self, x):
        x = self.first(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)) + x)
        return self.last(x)


@pytest.fixture
def norms_in_backward(monkeypatch):
    """How many norms each scheduled graph computes."""
    return spied(monkeypatch, schedule, "reorder", lambda none, module, *given: names(module.graph).count("norm"))


def test_with_bits_a_chain_is_not_rebuilt_for_each_of_its_blocks(norms_in_backward):
    """With bits the schedule had the least peak, whatever it repeated: 8 blocks took 33 norms."""
    torch.manual_seed(0)
    net = Chain(8)
    compiled(net, bits=4)(torch.randn(2, 3, 32, 32)).mean().backward()
    assert norms_in_backward[0] <= 13


def test_a_chain_of_residual_blocks_is_not_rebuilt_from_its_beginning(norms_in_backward):
    """It was rebuilt from its beginning for each of its blocks: 16 outputs of ResNet-50 took 41 norms."""
    torch.manual_seed(0)
    net, x = Chain(8), torch.randn(2, 3, 16, 16)
    twin = copy.deepcopy(net)
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))
    assert norms_in_backward[0] <= 12
