"""Concatenations in channels_last and their gradients, for the codegen "aten"; the interpreter runs the kernels."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

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
from tests.compiler.networks import close, compiled, results
from tests.compiler.test_passes import names, traced
from tests.tools.traffic import traffic

aten = torch.ops.aten
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch, needs_interpreter):
    monkeypatch.setattr(fusedseg, "backend", "triton")


class Skip(nn.Module):
    """A stage of a U-Net: the skip is a norm's output, and the other source comes from below by ``up``."""

    def __init__(self, dims, up):
        super().__init__()
        conv, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "InstanceNorm"))
        self.first, self.norm = conv(2, 8, 3, padding=1), norm(8, affine=True)
        self.down = conv(8, 16, 3, stride=2, padding=1)
        self.transposed = getattr(nn, f"ConvTranspose{dims}d")(16, 8, 2, 2) if up is None else None
        self.up, self.last = up, conv(16 if up is None else 24, 2, 3, padding=1)

    def forward(self, x):
        skip = F.leaky_relu(self.norm(self.first(x)))
        below = F.leaky_relu(self.down(skip))
        if self.transposed is not None:
            below = self.transposed(below)
        elif self.up == "pool":
            below = F.max_pool2d(F.interpolate(below, scale_factor=4), 2)
        else:
            below = F.interpolate(below, scale_factor=2, mode=self.up)
        return self.last(torch.cat([skip, below], 1))


CASES = {"transposed": (2, None), "3d": (3, None), "interpolated": (2, "bilinear"), "pooled": (2, "pool")}


def pair(name):
    torch.manual_seed(0)
    dims, up = CASES[name]
    net = Skip(dims, up).to(memory_format=LAST[dims])
    x = torch.randn(2, 2, *(8, 12, 6)[:dims]).to(memory_format=LAST[dims])
    return net, copy.deepcopy(net).double(), x


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_float64(name):
    net, twin, x = pair(name)
    options = {"memory_format": LAST[x.dim() - 2]}
    close(results(net, compiled(net, **options), [x]), results(twin, twin, [x.double()]))


def test_the_kernel_moves_every_byte_once():
    """Forward and backward form the concatenation; of its gradient the half of the transposed convolution is copied."""
    net, _, x = pair("transposed")
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


@pytest.mark.parametrize("name", ["transposed", "3d"])
def test_the_kernel_adds_the_bias_of_a_transposed_convolution(name, unreplayed):
    """No pass adds it, in forward and where backward forms the concatenation again."""
    net, _, x = pair(name)
    compiled(net, memory_format=LAST[x.dim() - 2])(x).square().mean().backward()
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


@pytest.mark.parametrize("options", [{}, {"budget": 0.6}, {"bits": 8}], ids=str)
def test_late_biases_cost_no_bytes(options, monkeypatch):
    """By PyTorch's allocator, and in the report."""
    net, _, x = pair("transposed")
    found = []
    for rewrite in (late_bias.defer_biases, lambda graph: 0):
        torch._dynamo.reset()
        monkeypatch.setattr(late_bias, "defer_biases", rewrite)
        run = compiled(net, memory_format=torch.channels_last, **options)
        run(x).square().mean().backward()
        graph = report(run).graphs[-1]
        peak = allocator_peak(lambda run=run: run(x).square().mean().backward())
        found.append((graph.ours.kept, graph.ours.peak, peak))
    for ours, without in zip(*found, strict=True):
        # The vector of biases is small.
        assert ours <= without + 256


class Twice(Skip):
    """Two concatenations of the map from below."""

    def forward(self, x):
        skip = F.leaky_relu(self.norm(self.first(x)))
        below = self.transposed(F.leaky_relu(self.down(skip)))
        return self.last(torch.cat([skip, below], 1)) * self.last(torch.cat([below, skip], 1)).sigmoid()


@pytest.mark.parametrize("make", [Skip, Twice], ids=lambda of: of.__name__)
@pytest.mark.parametrize("options", [{}, {"budget": 0.6}, {"bits": 8}], ids=str)
def test_no_bias_is_added_to_a_map_in_memory(make, options, unreplayed):
    """The kernel adds all of them.  Budgets and bits split the convolution, whose bias then stays where it is.

    The bugs: a split convolution read the sum in backward, and the sum of two concatenations stayed in both graphs.
    """
    torch.manual_seed(0)
    net = make(2, None).to(memory_format=LAST[2])
    twin, x = copy.deepcopy(net).double(), torch.randn(2, 2, 8, 12).to(memory_format=LAST[2])
    found = results(net, compiled(net, memory_format=torch.channels_last, **options), [x])
    nodes = [node for graph in unreplayed for node in graph.nodes]
    assert options or any(node.target is concat_biased_op for node in nodes)
    sums = [node for node in nodes if name_of(node) in ("add", "add_")]
    assert not [node for node in sums if any(t.meta["val"].shape[2:] == (1, 1) for t in node.all_input_nodes)]
    for a, b in zip(found, results(twin, twin, [x.double()]), strict=True):
        assert (a - b).norm() <= (0.03 if "bits" in options else 1e-4) * b.norm() + 1e-3


def test_a_bias_that_somebody_else_reads_stays():
    """The result of the transposed convolution is returned too."""

    class Both(Skip):
        def forward(self, x):
            skip = self.first(x)
            below = self.transposed(self.down(skip))
            return self.last(torch.cat([skip, below], 1)), below

    torch.manual_seed(0)
    net = Both(2, None).to(memory_format=LAST[2])
    twin, x = copy.deepcopy(net).double(), torch.randn(2, 2, 8, 12).to(memory_format=LAST[2])
    close(compiled(net)(x), twin(x.double()))


def test_a_sum_of_two_dtypes_keeps_its_dtype():
    """The concatenation of a map in half precision and a bias in float32 came out in half precision."""
    bias = torch.randn(4, requires_grad=True)
    half = torch.randn(2, 4, 6, 6, dtype=torch.float16).to(memory_format=torch.channels_last)

    def join(x):
        return torch.cat([x + bias.view(1, -1, 1, 1), x], 1)

    found, wanted = compiled(join)(half), join(half)
    assert found.dtype == wanted.dtype == torch.float32
    assert torch.equal(found, wanted)


class Clicked(nn.Module):
    """Segmentation with clicks of a user: a mask of booleans, and coordinates in another precision, are channels."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        rows = torch.linspace(0, 1, x.shape[-1], dtype=torch.float32).expand(len(x), 1, *x.shape[2:])
        return self.last(torch.cat([x[:, :1] > 0.5, self.first(x).relu(), rows], 1))


class Collected(nn.Module):
    """A concatenation of a list of maps whose first one may be missing: an empty vector stands for it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        return self.last(torch.cat([self.first(x).relu(), torch.empty(0, dtype=x.dtype), x], 1))


@pytest.mark.parametrize("make", [Clicked, Collected], ids=lambda of: of.__name__)
@pytest.mark.parametrize("options", [{"budget": 0.2}, {"bits": 8}], ids=str)
def test_sources_that_are_not_convolved_alone(make, options):
    """Backward of a convolution of the mask alone raised "not implemented for 'Bool'", and a vector has no channels."""
    net, x = make().double(), torch.randn(2, 2, 16, 16, dtype=torch.float64)
    found = results(net, compiled(net, **options), [x], steps=1)
    for a, b in zip(found, results(net, net, [x], steps=1), strict=True):
        assert (a - b).norm() <= (0.1 if "bits" in options else 1e-12) * b.norm()


def test_only_what_needs_a_copy_gets_one():
    """A slice that two such ops read is copied once; a sum, and slices of planes or samples, stay as they are."""

    def backward(dy, x, weight, planes):
        left, right = aten.slice(dy, 1, 0, 3), aten.slice(dy, 1, 3, 8)
        rest = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]]
        both = [aten.convolution_backward(right, x, weight, *rest)[0] for _ in range(2)]
        other = aten.convolution_backward(aten.slice(planes, 1, 3, 8), x, weight, *rest)[0]
        sample = aten.convolution_backward(aten.slice(dy, 0, 0, 1), dy[:1], torch.eye(8)[:, :, None, None], *rest)[0]
        return both[0] + both[1], other, sample, left + 1

    dy = torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    given = dy, torch.randn(2, 2, 4, 5), torch.randn(5, 2, 1, 1), dy.contiguous()
    module = traced(backward, *given)
    expected = module(*given)
    assert concatenation.make_dense(module.graph) == 1
    assert len(module.graph.find_nodes(op="call_function", target=concatenation.dense)) == 1
    assert "clone" not in names(module.graph)
    module.recompile()
    torch.testing.assert_close(module(*given), expected)


def test_the_backend_decides(monkeypatch):
    def backward(dy, x, weight):
        rest = [None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]]
        return aten.convolution_backward(aten.slice(dy, 1, 3, 8), x, weight, *rest)[0]

    dy = torch.randn(2, 8, 4, 5).to(memory_format=torch.channels_last)
    for backend, count in (("auto", 0), ("aten", 0), ("triton", 1)):
        monkeypatch.setattr(fusedseg, "backend", backend)
        module = traced(backward, dy, torch.randn(2, 2, 4, 5), torch.randn(5, 2, 1, 1))
        assert concatenation.make_dense(module.graph) == count


SPLITS = {"no budget": ({}, 0), "share": ({"budget": 0.5}, 0), "peak": ({"budget": "peak 1GiB"}, 1)}


@pytest.mark.parametrize("name", SPLITS)
def test_on_a_gpu_a_peak_alone_splits_convolutions(name, monkeypatch):
    """Source by source, backward of such a convolution took 2 ms where the concatenation takes .5."""
    found, rewrite = [], split_convolutions.split_backward
    monkeypatch.setattr(split_convolutions, "split_backward", lambda graph: found.append(rewrite(graph)))
    monkeypatch.setattr(_backend, "on_gpu", lambda t: True)
    options, count = SPLITS[name]
    net, twin, x = pair("transposed")
    close(results(net, compiled(net, **options), [x]), results(twin, twin, [x.double()]))
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


class Biased(nn.Module):
    """Biases that are columns of a parameter: of a transposed convolution, and added by the program to two maps.

    The second map has one channel, which the sum repeats.
    """

    def __init__(self):
        super().__init__()
        self.first, self.one, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1), nn.Conv2d(12, 2, 1)
        self.below = nn.Parameter(torch.randn(4, 4, 2, 2))
        self.biases = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        x = self.first(x)
        below = F.conv_transpose2d(F.max_pool2d(x, 2), self.below, self.biases[:, 0], 2)
        dense = x.sin() + self.biases[:, 1].view(1, 4, 1, 1)
        repeated = self.one(x) + self.biases[:, 2].contiguous().view(1, 4, 1, 1)
        return self.last(torch.cat([x, below, dense], 1)) + self.last(torch.cat([x, repeated, x], 1))


def test_biases_with_gaps_and_sums_that_repeat_a_channel():
    """The bugs: the kernel read the biases as if they were dense, and took the sum's one channel for all of them."""
    torch.manual_seed(0)
    net = Biased().double().to(memory_format=LAST[2])
    twin, x = copy.deepcopy(net), torch.randn(2, 2, 8, 12, dtype=torch.float64).to(memory_format=LAST[2])
    run = compiled(net)
    for _ in range(3):
        # The first steps call the op, and later ones launch without it.
        found, wanted = run(x), twin(x)
        torch.testing.assert_close(found, wanted)
        for y in (found, wanted):
            y.square().mean().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
