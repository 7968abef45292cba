"""Concatenations in channels_last and their gradients, for the codegen "aten"; the interpreter runs the kernels."""

import pytest
import torch

import fusedseg
from fusedseg import _backend
from fusedseg.compiler import report
from fusedseg.compiler.codegen import concatenation, replays
from fusedseg.compiler.graph import name_of
from fusedseg.compiler.rewrite import late_bias, split_convolutions
from fusedseg.memory import allocator_peak
from fusedseg.nn import JoinConv2d
from fusedseg.ops.concat import concat_biased_op
from fusedseg.ops.conv import convolutions
from fusedseg.ops.layout import FORMATS
from tests.compiler.networks import beside_float64, close, compiled
from tests.compiler.programs import made
from tests.compiler.test_passes import names, rewritten, traced
from tests.tools.spy import spied
from tests.tools.traffic import traffic

aten = torch.ops.aten
# The arguments of the gradients of a 1x1 convolution behind its weight.
OF_1X1 = None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]

pytestmark = pytest.mark.usefixtures("interpreted")


def laid_out(name):
    """A program of concatenations, and its input, in channels_last."""
    net, x = made(name)
    fmt = FORMATS[x.dim()]
    return net.to(memory_format=fmt), x.to(memory_format=fmt)


def test_the_kernel_moves_every_byte_once():
    """Forward and backward form the concatenation; of its gradient the half of the transposed convolution is copied."""
    net, x = laid_out("skip")
    run = compiled(net, memory_format=torch.channels_last)
    run(x).sum().backward()
    with traffic() as moved:
        run(x).sum().backward()
    source = 4 * 2 * 8 * 8 * 12
    assert moved.launches.count("concat_kernel") == 3
    assert moved.stored("concat_kernel") == (2 + 2 + 1) * source
    # A program reads the bias of its channels.
    assert moved.loaded("concat_kernel") == (2 + 2 + 1) * source + 2 * 4 * 8


@pytest.fixture
def unreplayed(emitted, monkeypatch):
    """The graphs; replays would hide their ops."""
    monkeypatch.setattr(replays, "replay_launches", lambda graph: 0)
    return emitted


@pytest.mark.parametrize("name", ["skip", "skip, 3D"])
def test_the_kernel_adds_the_bias_of_a_transposed_convolution(name, unreplayed):
    """No pass adds it, in forward and where backward forms the concatenation again."""
    net, x = laid_out(name)
    compiled(net, memory_format=FORMATS[x.dim()])(x).square().mean().backward()
    forward, _ = unreplayed
    for graph in unreplayed:
        (joined,) = graph.find_nodes(op="call_function", target=concat_biased_op)
        assert [bias is None for bias in joined.args[1]] == [True, False]
        large = [
            node for node in graph.find_nodes(op="call_function", target=aten.add.Tensor) if node.meta["val"].dim() > 3
        ]
        assert not large
    transposed = [node for node in forward.nodes if len(node.args) > 6 and node.args[6] is True]
    assert [node.args[2] for node in transposed] == [None]


def test_late_biases_cost_no_bytes(monkeypatch):
    """By PyTorch's allocator, and in the report."""
    net, x = laid_out("skip")
    found = []
    for rewrite in (late_bias.defer_biases, lambda graph: 0):
        torch._dynamo.reset()
        monkeypatch.setattr(late_bias, "defer_biases", rewrite)
        run = compiled(net, memory_format=torch.channels_last)
        run(x).square().mean().backward()
        graph = report(run).graphs[-1]
        peak = allocator_peak(lambda run=run: run(x).square().mean().backward())
        found.append((graph.ours.kept, graph.ours.peak, peak))
    for ours, without in zip(*found, strict=True):
        # The vector of biases is small.
        assert ours <= without + 256


@pytest.mark.parametrize(
    ("name", "options"), [("skip twice", {}), *(("skip", of) for of in ({}, {"budget": 0.6}, {"bits": 8}))], ids=str
)
def test_no_bias_is_added_to_a_map_in_memory(name, options, unreplayed):
    """The kernel adds all of them.  Budgets and bits split the convolution, whose bias then stays where it is.

    The bugs: a split convolution read the sum in backward, and the sum of two concatenations stayed in both graphs.
    """
    found, wanted = beside_float64(*laid_out(name), memory_format=torch.channels_last, **options)
    nodes = [node for graph in unreplayed for node in graph.nodes]
    assert options or any(node.target is concat_biased_op for node in nodes)
    sums = [node for node in nodes if name_of(node) in ("add", "add_")]
    assert not [node for node in sums if any(t.meta["val"].shape[2:] == (1, 1) for t in node.all_input_nodes)]
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= (0.03 if "bits" in options else 1e-4) * b.norm() + 1e-3


def test_a_sum_of_two_dtypes_keeps_its_dtype():
    """The concatenation of a map in half precision and a bias in float32 came out in half precision."""
    bias = torch.randn(4, requires_grad=True)
    half = torch.randn(2, 4, 6, 6, dtype=torch.float16).to(memory_format=torch.channels_last)

    def join(x):
        return torch.cat([x + bias.view(1, -1, 1, 1), x], 1)

    found, wanted = compiled(join)(half), join(half)
    assert found.dtype == wanted.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_only_what_needs_a_copy_gets_one():
    """A slice that two such ops read is copied once; a sum, and slices of planes or samples, stay as they are."""

    def backward(dy, x, weight, planes):
        left, right = aten.slice(dy, 1, 0, 3), aten.slice(dy, 1, 3, 8)
        both = [aten.convolution_backward(right, x, weight, *OF_1X1)[0] for _ in range(2)]
        other = aten.convolution_backward(aten.slice(planes, 1, 3, 8), x, weight, *OF_1X1)[0]
        sample = aten.convolution_backward(aten.slice(dy, 0, 0, 1), dy[:1], torch.eye(8)[:, :, None, None], *OF_1X1)[0]
        return both[0] + both[1], other, sample, left + 1

    dy = torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    given = dy, torch.randn(2, 2, 4, 5), torch.randn(5, 2, 1, 1), dy.contiguous()
    module, count, before, after = rewritten(backward, concatenation.make_dense, *given)
    assert count == len(module.graph.find_nodes(op="call_function", target=concatenation.dense)) == 1
    assert "clone" not in names(module.graph)
    torch.testing.assert_close(after, before)


def test_the_backend_decides(monkeypatch):
    def backward(dy, x, weight):
        return aten.convolution_backward(aten.slice(dy, 1, 3, 8), x, weight, *OF_1X1)[0]

    dy = torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    for backend, count in (("auto", 0), ("aten", 0), ("triton", 1)):
        monkeypatch.setattr(fusedseg, "backend", backend)
        module = traced(backward, dy, torch.randn(2, 2, 4, 5), torch.randn(5, 2, 1, 1))
        assert concatenation.make_dense(module.graph) == count


SPLITS = {"no budget": ({}, 0), "share": ({"budget": 0.5}, 0), "peak": ({"budget": "peak 1GiB"}, 1)}


@pytest.mark.parametrize("name", SPLITS)
def test_on_a_gpu_a_peak_alone_splits_convolutions(name, monkeypatch):
    """Source by source, backward of such a convolution took 2 ms where the concatenation takes .5."""
    found = spied(monkeypatch, split_convolutions, "split_backward")
    monkeypatch.setattr(_backend, "on_gpu", lambda t: True)
    options, count = SPLITS[name]
    close(*beside_float64(*laid_out("skip"), **options))
    assert len(found) == count


@pytest.mark.parametrize("on_gpu", [False, True])
def test_compiled_joins_on_a_gpu_form_the_concatenation(on_gpu, monkeypatch):
    monkeypatch.setattr(convolutions, "FORMED_BYTES", 0)
    monkeypatch.setattr(_backend, "off_cpu", lambda t: on_gpu)
    net, seen = JoinConv2d(5, 4, 3), []

    def look(module, example_inputs):
        seen.append(sum(node.target is torch.convolution for node in module.graph.nodes))
        return module

    given = torch.randn(2, 2, 6, 6), torch.randn(2, 3, 6, 6)
    out = torch.compile(net, backend=look)(given)
    torch.testing.assert_close(out, net(given))
    assert seen == [1 if on_gpu else 2]
