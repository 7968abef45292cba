"""Norm and activation by Triton kernels in graphs of the codegen "aten"; here the interpreter runs them on a CPU."""

import copy
import re

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.compiler.rewrite import joined_norms
from fusedseg.ops.low_bit import graph as low_bit
from tests.compiler import networks
from tests.compiler.networks import TwoBlocks, beside_float64, close, compiled, kept, results
from tests.compiler.programs import BY_KERNELS, NORM_ACTS, Blocks, made
from tests.compiler.test_programs import check, of_a_gpu
from tests.tools.traffic import traffic

aten = torch.ops.aten
STOCK = ("norm", "relu", "elu", "silu", "hardtanh", "mish", "swish", "softplus", "threshold")


pytestmark = pytest.mark.usefixtures("interpreted")


def batch():
    return nn.BatchNorm2d(4)


def instance():
    return nn.InstanceNorm2d(4, affine=True)


def blocks(name):
    torch.manual_seed(0)
    net = TwoBlocks(*NORM_ACTS[name], channels=2)
    for p in net.norms.parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return net


FORWARD = ("norm", "norm_moving", "norm_over", "norm_moving_over")
BACKWARD = ("norm_backward", "norm_backward_over")


def calls(sources):
    """What the graphs call, in their order: the names of ops and functions; "forward" and "backward" of our norms."""
    found = [name for text in sources for name in networks.calls(text)]
    return ["forward" if name in FORWARD else "backward" if name in BACKWARD else name for name in found]


@pytest.mark.usefixtures("packed", "strides_of_a_gpu")
@pytest.mark.parametrize("name", BY_KERNELS)
def test_no_stock_norm_and_no_stock_activation_is_left(name, sources, monkeypatch):
    """And values and gradients are those of float64."""
    check(name, of_a_gpu(name), monkeypatch)
    found = calls(sources)
    # Two outputs of forward, which backward computes again unless they are kept, and their gradients.
    assert found.count("forward") >= 2
    assert found.count("backward") == 2
    left = [call for call in found if call.startswith("aten") and any(word in call for word in STOCK)]
    assert not left


def test_an_instance_norm_of_rows_returns_planes():
    """As PyTorch's does, which copies its input; the kernels could compute in rows."""
    norm, x = instance(), torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
    assert compiled(norm)(x).stride() == norm(x).stride() == (144, 36, 6, 1)


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_eval_mode(name, sources):
    """With gradients, and without: then each result is written over its input."""
    net, x = blocks(name).eval(), torch.randn(2, 2, 14, 13)
    close(*beside_float64(net, x))
    assert calls(sources).count("backward") == 2
    sources.clear()
    with torch.no_grad():
        close([compiled(net)(x)], [copy.deepcopy(net).double()(x.double())])
    assert calls(sources).count("forward") == 2
    assert "norm_over" in "".join(sources)


def test_keeps_what_aten_keeps(monkeypatch):
    net = blocks("relu")
    x = torch.randn(2, 2, 16, 16)
    ours = kept(net, compiled(net), [x])
    torch._dynamo.reset()
    monkeypatch.setattr(fusedseg, "backend", "aten")
    assert ours == kept(net, compiled(net), [x])


def test_statistics_are_kept(sources):
    """Backward computes no statistics again: it reads those of forward."""
    net = blocks("running instance")
    results(net, compiled(net), [torch.randn(2, 2, 14, 13)], 1)
    _, backward = sources
    given = re.findall(r"_of_norm_\d+\(direct_stream, (.*?)\)", backward)
    assert given
    for call in given:
        *_, running_mean, running_var, mean, rstd = call.split(", ")[:8]
        assert (running_mean, running_var) == ("None", "None")
        assert mean.startswith("getitem")
        assert rstd.startswith("getitem")


def test_bits_keep_the_inputs_of_norms():
    """With bits, backward rebuilds the output of a norm from its packed input, and the kernels pack."""
    net = blocks("relu")
    x = torch.randn(2, 2, 34, 34)
    run = compiled(net, bits=4)
    run(x)
    with traffic() as moved:
        run(x).sum().backward()
    # A result of a convolution in fp32, and the numbers of its groups.  The first norm has a kink for each group.
    nbytes, groups = 4 * 2 * 4 * 32 * 32, 2 * 4 * 4
    assert moved.launches.count("low_bit_pack_kernel") == 2
    # The second read of a tile is from L1.
    assert moved.loaded("low_bit_pack_kernel") == 2 * (2 * nbytes) + 4 * groups
    assert moved.stored("low_bit_pack_kernel") == 2 * (nbytes // 8 + 8 * groups)
    # A value at the peak is unpacked twice.
    assert moved.stored("low_bit_unpack_kernel") == nbytes * moved.launches.count("low_bit_unpack_kernel")


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize(("name", "dtype"), [("relu", torch.float32), ("gelu", torch.float16)])
def test_bits_leave_norms_in_place(name, dtype, sources):
    """The packing of its input kept a norm from writing over it."""
    norm, act = NORM_ACTS[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), norm(), act, nn.Conv2d(4, 4, 3), norm(), act, nn.Conv2d(4, 2, 1)).to(dtype)
    found, wanted = beside_float64(net, torch.randn(2, 2, 36, 36, dtype=dtype), bits=8)
    assert sources[0].count("_of_statistics_moving") == sources[0].count("_of_norm_over") == 2
    assert calls(sources).count("backward") == 2
    for a, b in zip(found, wanted, strict=True):
        assert (a.double() - b.double()).norm() <= 0.03 * b.double().norm() + 1e-3


@pytest.fixture
def with_and_without(sources, monkeypatch):
    """A step with 4 bits with a pass and without it: the gradients are the same.

    Returns for both the calls of each graph, in forward and in backward.
    """

    def both(net, name):
        x, found, called = torch.randn(2, 2, 35, 33), [], []
        for apart in (False, True):
            if apart:
                monkeypatch.setattr(joined_norms, name, lambda graph: 0)
            # The same step of the same seed, compiled anew.
            low_bit._steps.clear()
            torch._dynamo.reset()
            sources.clear()
            model = copy.deepcopy(net)
            found.append(results(model, compiled(model, bits=4), [x], 1))
            called.append([calls([text]) for text in sources])
        close(*found)
        return called

    return both


class Skip(nn.Module):
    """The first activation has two readers, and the second norm's result has two as well."""

    def __init__(self, norm, act):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4, 8))
        self.norms, self.act = nn.ModuleList(norm() for _ in self.convs), act

    def forward(self, x):
        first = self.act(self.norms[0](self.convs[0](x)))
        second = self.norms[1](self.convs[1](first))
        return self.act(self.norms[2](self.convs[2](torch.cat([first, self.act(second)], 1)))) + second


# Norms, activations, and how many calls of activations and gates go.  Out of place, two of the second norm stay.
JOINED = {
    "instance": (instance, nn.LeakyReLU(0.2, True), 10),
    # What the gate of such a slope reads does not tell the side.
    "falling": (batch, nn.LeakyReLU(-0.2), 0),
}  # fmt: skip


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("name", JOINED)
def test_bits_put_activations_into_norms(name, with_and_without):
    """Activations were passes of their own with bits: 3.5 of 30 ms in the PlainConvUNet, by their bytes."""
    norm, act, joined = JOINED[name]
    torch.manual_seed(0)
    called = [[call for graph in of for call in graph] for of in with_and_without(Skip(norm, act), "fuse_activations")]
    of_activations = [sum("elu" in call or "threshold" in call for call in of) for of in called]
    assert of_activations[1] - of_activations[0] == joined
    assert [of.count("backward") for of in called] == [3, 3]


@pytest.mark.usefixtures("packed")
def test_bits_put_residuals_into_norms(with_and_without):
    """Sums with shortcuts, and the activations after them, were passes of their own: 4 of 29 ms in ResNet-50, by their
    bytes.

    In forward, norms of batches alone are divided, so that they may be last.
    """
    torch.manual_seed(0)
    called = with_and_without(Blocks(batch), "fuse_residuals")
    sums, relus = ([[sum(word in call for call in graph) for graph in of] for of in called] for word in ("add", "relu"))
    joined = [apart - whole for whole, apart in zip(*sums, strict=True)]
    assert joined[0] == 3
    # Backward rebuilds the outputs of all blocks.
    assert joined[1] >= 3
    assert sums[0][1] == 2
    assert relus[1][0] - relus[0][0] == 3


class Total(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(self.convs(x))).sum()


@pytest.mark.usefixtures("packed")
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_bits_gate_an_expanded_gradient(training, sources):
    """The gradient of a sum has one value in memory, and goes straight into the norm.

    In eval mode the sign of a norm is not exact, so that a mask answers the gates.
    """
    torch.manual_seed(0)
    net = Total().train(training)
    twin, x, found = copy.deepcopy(net).double(), torch.randn(2, 2, 38, 37), []
    for model, run, image in ((net, compiled(net, bits=8), x), (twin, twin, x.double())):
        run(image).backward()
        found.append([p.grad.double() for p in model.parameters()])
    called = "".join(calls(sources))
    assert "threshold" not in called
    assert ("where" in called) != training
    # The last norm was computed again for its gate alone, and the gate is in the gradient; the first one may be.
    assert calls(sources[1:]).count("forward") <= 1
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 0.03 * b.norm() + 1e-2


def test_a_dead_bias_before_a_norm_with_a_late_residual(sources):
    """The norm goes where the sum is; the mean, which moves by the bias after it, must still move after it."""
    close(*beside_float64(*made("late residual")))
    # The sum is in the norm.
    assert not [call for call in calls(sources[:1]) if "relu" in call]


def test_the_device_and_the_backend_decide(monkeypatch):
    """On a CPU without the interpreter, and with fusedseg.backend = "aten", no kernel runs."""
    net = blocks("relu")
    monkeypatch.setattr(fusedseg, "backend", "aten")
    with traffic() as moved:
        close(*beside_float64(net, torch.randn(2, 2, 14, 13), 1))
    assert not moved.launches
