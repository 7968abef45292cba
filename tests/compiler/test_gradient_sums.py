"""Norms whose output has two readers, in the code of "aten": their gradient reads both gradients of the output."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import fusedseg
from fusedseg.compiler.codegen import gradient_sums, replays
from fusedseg.memory import allocator_peak
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.norm.graph import Backward
from tests.compiler.networks import compiled, is_backward
from tests.nnunet import PlainConvUNet
from tests.resnet import ResNet18


class Pooled(nn.Module):
    """A skip over a pool; the skip lies before or behind the enlarged map in the concatenation."""

    def __init__(self, dims=2, first=True):
        super().__init__()
        conv, up, pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose", "MaxPool"))
        norm = getattr(nn, f"BatchNorm{dims}d")
        self.down = nn.Sequential(conv(2, 8, 3, padding=1), norm(8), nn.ReLU())
        self.middle = nn.Sequential(pool(2), conv(8, 16, 3, padding=1), norm(16), nn.ReLU(), up(16, 8, 2, 2))
        self.last, self.first = conv(16, 2, 3), first

    def forward(self, x):
        skip = self.down(x)
        large = self.middle(skip)
        return self.last(torch.cat([skip, large] if self.first else [large, skip], 1))


class Read(nn.Module):
    """The output of a norm that a program reads too, whose gradient has three terms."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right, self.more = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))

    def forward(self, x):
        z = self.first(x)
        return self.left(z) * self.right(z).sigmoid() + self.more(z)


class First(nn.Module):
    """A norm of the input, whose gradient nobody reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU())
        self.left, self.right = nn.AvgPool2d(2), nn.AvgPool2d(4, 2, 1)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        z = self.first(x)
        return self.last(self.left(z) + self.right(z))


# The network, its input, and the norms that read two gradients.
NETWORKS = {
    "ResNet-18": (lambda: ResNet18(10, width=4), (2, 3, 32, 32), 6),
    "PlainConvUNet": (lambda: PlainConvUNet(widths=(4, 8, 16)), (2, 1, 16, 16, 16), 2),
    "skip first": (Pooled, (2, 2, 12, 12), 1),
    "skip last, 3D": (lambda: Pooled(3, False), (2, 2, 8, 8, 8), 1),
    "three gradients": (Read, (2, 2, 9, 7), 1),
    # Nothing is written over the first gradient here, so the kernel allocates beside both of them.
    "norm of the input": (First, (2, 16, 32, 32), 0),
}


@pytest.fixture(autouse=True)
def on_triton(monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    # Replays hide the ops of a graph.
    monkeypatch.setattr(replays, "replay_launches", lambda graph: 0)


def made(name, rows):
    torch.manual_seed(0)
    make, shape, _ = NETWORKS[name]
    net, x = make(), torch.randn(shape)
    if rows:
        net, x = (of.to(memory_format=FORMATS[len(shape)]) for of in (net, x))
    return net, x


def loss(out):
    return sum(y.square().mean() for y in (out if isinstance(out, (tuple, list)) else [out]))


# The two published networks take seconds in the interpreter.  "skip last, 3D" is a small PlainConvUNet.
by_network = pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(name, rows, marks=[pytest.mark.slow] if "Net" in name and name != "ResNet-18" else [])
        for name in NETWORKS
        for rows in (False, True)
        # The layout of a large network is that of small ones.
        if rows or "Net" not in name
    ],
)


def joined(graph):
    return [node for node in graph.nodes if isinstance(node.target, Backward) and len(node.args) == 8]


@by_network
def test_gradients_in_float64(name, rows):
    net, x = made(name, rows)
    net, x = net.double(), x.double()
    twin = copy.deepcopy(net)
    loss(twin(x)).backward()
    options = {"memory_format": torch.channels_last_3d} if rows and x.dim() == 5 else {}
    loss(compiled(net, **options)(x)).backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-7, atol=1e-9)


@by_network
def test_no_sum_is_left_and_the_peak_does_not_rise(name, rows, emitted, monkeypatch):
    """Counted by PyTorch's allocator, with kernels in Triton's interpreter."""
    net, x = made(name, rows)
    options = {"memory_format": torch.channels_last_3d} if rows and x.dim() == 5 else {}
    peaks = []
    for rewrite in (gradient_sums.fuse_sums, lambda graph, liveness: 0):
        torch._dynamo.reset()
        monkeypatch.setattr(gradient_sums, "fuse_sums", rewrite)
        run = compiled(net, **options)
        loss(run(x)).backward()
        peaks.append(allocator_peak(lambda run=run: loss(run(x)).backward()))
    assert peaks[0] <= 1.001 * peaks[1]
    # In planes the slices of a concatenation have gaps that no kernel reads.
    wanted = NETWORKS[name][2] if rows or name == "ResNet-18" or name == "three gradients" else 0
    if rows and name == "ResNet-18":
        # In channels_last another op stands between one more sum and its norm, and there is memory for both gradients.
        wanted += 1
    assert [len(joined(graph)) for graph in emitted if is_backward(graph)] == [wanted, 0]


def test_a_gradient_that_somebody_reads_later_is_not_written_over(emitted):
    """The caller gets the gradient of the shortcut's input too."""
    torch.manual_seed(0)
    net, x = made("ResNet-18", True)
    net, x = net.double(), x.detach().double().requires_grad_()
    twin, leaf = copy.deepcopy(net), x.detach().requires_grad_()
    loss(twin(leaf)).backward()
    run = compiled(net)
    for _ in range(2):
        x.grad = None
        net.zero_grad()
        loss(run(x)).backward()
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-7, atol=1e-9)
    assert any(joined(graph) for graph in emitted if is_backward(graph))
