"""Each pass on a small graph, before and after it."""

import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fusedseg.compiler.codegen import divided_norms as norms
from fusedseg.compiler.codegen import in_place, shorter
from fusedseg.compiler.codegen.aten import emit
from fusedseg.compiler.graph import Joint, Outputs, name_of
from fusedseg.compiler.low_bit import rule
from fusedseg.compiler.rewrite import simplify, split_convolutions
from tests.compiler.networks import compiled, same
from tests.compiler.networks import kept as kept_bytes
from tests.tools.spy import spied

aten = torch.ops.aten


def names(graph):
    return [name_of(node) or str(node.target) for node in graph.nodes if node.op == "call_function"]


def traced(function, *inputs):
    """The graph of a function; the results of its nodes are tensors without values."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def rewritten(function, rewrite, *inputs):
    """A traced function after a pass, what the pass returns, and the results before and after it."""
    module = traced(function, *inputs)
    before = module(*inputs)
    count = rewrite(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module, count, before, module(*inputs)


def test_simplify_drops_copies():
    def run(x):
        y = aten.relu(x)
        same = aten.copy(aten.new_empty_strided(y, [2, 3], [3, 1]), y)
        other = aten.clone(y.t(), memory_format=torch.contiguous_format)
        return aten.detach(same) + 1, other

    module, count, before, after = rewritten(run, simplify.remove_copies, torch.randn(2, 3))
    # The copy and the detached form; the transposed clone has other strides.
    assert count == 2
    assert names(module.graph) == ["relu", "t", "clone", "add"]
    assert same(after, before)


def test_split_needs_no_concatenation():
    def run(a, b, w, dy):
        x = aten.cat([a, b], 1)
        dx, dw, db = aten.convolution_backward(
            dy, x, w, [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]
        )
        return aten.slice(dx, 1, 0, 2), aten.slice(dx, 1, 2, 5), dw, db

    inputs = [torch.randn(2, n, 6, 6) for n in (2, 3)] + [torch.randn(4, 5, 3, 3), torch.randn(2, 4, 6, 6)]
    module, count, before, after = rewritten(run, split_convolutions.split_backward, *inputs)
    assert count == 1
    # The only concatenation left is that of the weight's gradient.
    assert names(module.graph).count("cat") == 1
    # The larger source first, and its gradient right after: the count took a call's results for gone until then.
    parts = [node for node in module.graph.nodes if name_of(node) == "convolution_backward"]
    assert [part.args[1].meta["val"].shape[1] for part in parts] == [3, 2]
    assert all(part.next.target is operator.getitem for part in parts)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_split_adds_gradients_source_by_source():
    """Two convolutions read the concatenation, as in a residual block; their sum was a concatenation again."""

    def run(a, b, w, v, dy):
        x = aten.cat([a, b], 1)
        rest = [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        dx, dz = (aten.convolution_backward(dy, x, weight, [4], *rest)[0] for weight in (w, v))
        both = aten.add(dz, dx)
        return aten.slice(both, 1, 0, 2), aten.slice(both, 1, 2, 5)

    inputs = [torch.randn(2, n, 6, 6) for n in (2, 3)] + [torch.randn(4, 5, 1, 1) for _ in range(2)]
    inputs.append(torch.randn(2, 4, 6, 6))
    module, count, before, after = rewritten(run, split_convolutions.split_backward, *inputs)
    assert count == 2
    assert [names(module.graph).count(name) for name in ("convolution_backward", "cat", "add")] == [4, 0, 2]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def read_later(x):
    """x is the caller's, and z is read after the sigmoid."""
    z = aten.relu(aten.mul(x, 2))
    return (aten.add(aten.sigmoid(z), z),)


def sums(x):
    """The first term is the caller's; a scaled second term stays where it is."""
    return aten.add(x, aten.cos(x)), aten.add(x, aten.sin(x), alpha=2)


def views(x):
    """Only the sum may be written over v, whose memory nobody reads after it.  What is returned is no view then."""
    y = aten.mul(x, 2)
    v = aten.permute(y, [1, 0])
    z = aten.relu(y)
    return z, aten.add(v, 1)


def parts(x):
    y = aten.mul(x, 2)
    return aten.relu(aten.slice(y, 0, 0, 2)), aten.relu(aten.expand(aten.slice(y, 0, 0, 1), [3, 2]))


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (read_later, ["mul", "relu_", "sigmoid", "add_"]),
        (sums, ["cos", "add_", "sin", "add"]),
        (views, ["mul", "permute", "relu", "add_"]),
        (parts, ["mul", "slice", "relu", "slice", "expand", "relu"]),
    ],
)
def test_reinplace_writes_over_what_nobody_reads(function, wanted):
    module, _, before, after = rewritten(function, in_place.write_in_place, torch.randn(4, 2))
    assert [name for name in names(module.graph) if "without_views" not in name] == wanted
    assert same(after, before)


def test_reinplace_writes_gradients_over_gradients():
    def run(x, dy):
        first = aten.threshold_backward(aten.mul(dy, 2), x, 0)
        second = aten.leaky_relu_backward(first, x, 0.1, False)
        return aten.gelu_backward(second, x, approximate="tanh"), aten.threshold_backward(dy, x, 0)

    _, count, before, after = rewritten(run, in_place.write_in_place, torch.randn(4), torch.randn(4))
    assert count == 3
    assert same(after, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 130), (2, 3, 7, 33), (70, 3), (2, 17, 8, 8)])
def test_reinplace_writes_a_softmax_over_what_it_reads(shape, dtype):
    """In any dimension and layout: kernels would write contiguous values to a tensor in another layout."""

    def run(x, dy, dim):
        y, z = aten._softmax(aten.mul(x, 2), dim, False), aten._log_softmax(aten.mul(x, 3), dim, False)
        dz = aten._log_softmax_backward_data(aten.mul(dy, 3), z, dim, x.dtype)
        return aten._softmax_backward_data(aten.mul(dy, 2), y, dim, x.dtype), dz, aten._softmax(x, dim, False)

    x, dy = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    turned = [t.mT.contiguous().mT for t in (x, dy)]
    for dim in range(len(shape)):
        function = partial(run, dim=dim)
        module, count, before, after = rewritten(function, in_place.write_in_place, x, dy)
        # The last one would write over the caller's x.
        assert count == 4
        assert same(after, before)
        # What the trace says may be wrong.
        assert same(module(*turned), before)
        assert same(rewritten(function, in_place.write_in_place, *turned)[-1], before)


def test_reinplace_moves_statistics_where_they_are():
    def run(x, mean, var, count):
        more = aten.add(count, 1)
        out = aten._native_batch_norm_legit_functional(x, None, None, mean, var, True, 0.1, 1e-5)
        aten.copy_(count, more)
        aten.copy_(mean, out[3])
        aten.copy_(var, out[4])
        return out[0]

    module = traced(run, torch.randn(4, 3), torch.zeros(3), torch.ones(3), torch.tensor(0))
    assert norms.write_statistics(module.graph) == 2
    assert [name for name in names(module.graph) if "getitem" not in name] == ["add_", "_native_batch_norm_legit"]


def test_zeros_are_filled_at_once():
    """Each gradient of a dead bias was a kernel of its own.  Whoever writes to one must not change another.

    They were parts of one tensor then, which PyTorch's trees of CUDA graphs made anew in each replay.
    """

    def run(x):
        wide = aten.zeros([2], dtype=torch.float64, device="cpu", pin_memory=False)
        read = aten.zeros([5], dtype=torch.float32, device="cpu", pin_memory=False)
        return aten.add(x, read), *(aten.zeros([n], dtype=torch.float32, device="cpu") for n in (3, 4)), wide

    call = emit(traced(run, torch.ones(5)), [])
    found = call([torch.ones(5)])
    assert [(t.shape[0], t.dtype) for t in found[1:]] == [(3, torch.float32), (4, torch.float32), (2, torch.float64)]
    assert call.source.count("_of_zeros_") == 1
    assert len({t.untyped_storage().data_ptr() for t in found}) == 4
    found[1].add_(1)
    assert torch.equal(found[2], torch.zeros(4))
    assert torch.equal(found[0], torch.ones(5))


def test_zeros_are_made_under_a_mode():
    """A counter of operations around a step raised an AttributeError: the form of a vector had no ``size``."""

    def run(x):
        return x + 1, *(aten.zeros([n], dtype=torch.float64, device="cpu", pin_memory=False) for n in (2, 3))

    call = emit(traced(run, torch.ones(5)), [])
    assert "_of_zeros_" in call.source
    with FlopCounterMode(display=False):
        found = call([torch.ones(5)])
    assert same(found, run(torch.ones(5)))


def test_casts_are_calls_of_a_method():
    """They keep the strides; a copy to other strides stays as it is."""

    def run(x):
        return (
            aten._to_copy(x, dtype=torch.bfloat16),
            aten._to_copy(x, dtype=torch.float64, memory_format=torch.contiguous_format),
            aten._to_copy(x),
        )

    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    call = emit(traced(run, x), [])
    found, wanted = call([x]), run(x)
    assert same(found, wanted)
    assert [t.stride() for t in found] == [t.stride() for t in wanted]
    assert all(t.data_ptr() != x.data_ptr() for t in found)
    assert (call.source.count("_of_to_"), call.source.count("__to_copy_default_")) == (1, 2)


@pytest.mark.parametrize(
    ("channels", "dtype", "taps", "chosen"),
    [(16, torch.bfloat16, 3, 2), (16, torch.float32, 3, 0), (16, torch.bfloat16, 1, 0), (8, torch.bfloat16, 3, 0)],
    ids=["served", "fp32", "1x1x1", "8 channels"],
)
def test_convolutions_without_a_choice_are_the_vendors(channels, dtype, taps, chosen):
    """Every convolution of every step was asked whether a kernel for volumes computes it."""
    given = [1, 1, 1], [taps // 2] * 3, [1, 1, 1], False, [0, 0, 0], 1

    def run(dy, x, w):
        dx, _, _ = aten.convolution_backward(dy, x, w, None, *given, [True, False, False])
        return aten.convolution(x, w, None, *given), dx

    shape, weight = (1, channels, 4, 4, 4), (channels, channels, *[taps] * 3)
    inputs = [torch.randn(s, dtype=dtype) for s in (shape, shape, weight)]
    call = emit(traced(run, *inputs), [])
    assert call.source.count("aten_convolution") == chosen
    assert same(call(list(inputs)), run(*inputs))


def test_convolutions_of_several_sizes_are_the_vendors(monkeypatch):
    """Only graphs of one size had them, and PyTorch writes symbols for the second of two networks of one class."""
    written = spied(monkeypatch, shorter, "write_convolutions")
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    run = torch.compile(net, backend="fusedseg", dynamic=True, options={"codegen": "aten"})
    run(torch.randn(2, 3, 9, 9)).sum().backward()
    assert written == [2, 2]


def test_emit_lets_values_go():
    def run(x, unread):
        y = aten.mul(x, 2)
        z = aten.cos(y)
        return aten.cat([z, z])

    module = traced(run, torch.randn(4), torch.randn(1))
    call = emit(module, [])
    arguments = [torch.ones(4), torch.ones(1)]
    (found,) = call(arguments)
    assert not arguments
    assert torch.equal(found, torch.cat([torch.cos(torch.full((4,), 2.0))] * 2))
    lines = call.source.splitlines()
    assert lines[3].strip() == "del unread_1"
    assert [line.strip() for line in lines if line.strip().startswith("del")][1:] == ["del x_1", "del mul", "del cos"]


def forward_outputs(net, x):
    """(names of what is kept, names that backward computes) of a network's joint graph."""
    from fusedseg.compiler import partition

    with pytest.MonkeyPatch.context() as patch:
        seen = spied(patch, partition, "decide")
        compiled(net)(x)
    (decision,) = seen
    kept = sorted(name_of(n) or name_of(n.args[0]) for n in decision.saved)
    return kept, sorted(name_of(n) or name_of(n.args[0]) for n in decision.recomputed)


def test_keep_products_and_statistics():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 1, 1))
    kept, again = forward_outputs(net, torch.randn(2, 1, 6, 6))
    norm = "_native_batch_norm_legit_functional"
    assert kept == [norm, norm, "convolution"]
    assert again == [norm, "relu"]


def test_statistics_come_with_a_norm_that_runs_again():
    """The layer norm reads what a batch norm gives, so that backward has another node of it."""
    net = nn.Sequential(nn.Conv1d(1, 4, 1), nn.BatchNorm1d(4), nn.LayerNorm(8), nn.Conv1d(4, 1, 1))
    x = torch.randn(16, 1, 8)
    convolution, statistics = 16 * 4 * 8 * 4, 2 * 4 * 4
    assert kept_bytes(net, compiled(net), [x]) == convolution + statistics


def test_keep_the_activation_if_nobody_reads_the_product():
    kept, again = forward_outputs(
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 1, 1)), torch.randn(2, 1, 6, 6)
    )
    assert (kept, again) == (["relu"], [])


def test_prepare_ends_a_long_chain():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(40))

        def forward(self, x):
            for conv in self.convs:
                x = torch.relu(x + conv(x))
            return x

    kept, again = forward_outputs(Chain(), torch.randn(2, 2, 4, 4))
    assert kept.count("relu") >= 1
    assert again.count("relu") <= 39


def test_a_chain_of_twenty_calls_runs_again():
    """A chain ended after 16 calls: in a SwinUNETR with Inductor, which divides softmax, at the scores of attention."""
    small, large = [nn.Tanh() for _ in range(10)], [nn.Sigmoid() for _ in range(10)]
    net = nn.Sequential(nn.Conv2d(1, 1, 1), *small, nn.Upsample(scale_factor=2), *large, nn.Conv2d(1, 1, 1))
    x = torch.randn(1, 1, 64, 64)
    assert kept_bytes(net, compiled(net), [x]) < 1.1 * x.nbytes


def test_a_factor_is_looked_through_once(monkeypatch):
    """Each path to it was walked, and there are many to the masks of a SwinUNETR, which are written in 27 slices."""

    def run(x, factor):
        for _ in range(16):
            factor = factor + factor * 0.5
        return x * factor

    seen = spied(monkeypatch, rule, "row_of")
    nodes = [*traced(run, torch.randn(8, 8), torch.randn(1)).graph.nodes]
    (product,) = nodes[0].users
    facts = rule.Facts(Joint(product.graph, Outputs(1)))
    assert facts._is_steady_factor(product.args[1], product)
    assert len(seen) < 5 * len(nodes)
