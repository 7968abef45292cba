"""Small networks of each kind, and what a few training steps of them give."""

import copy
import re

import pytest
import torch
from torch import nn

from fusedseg import _torch
from fusedseg.memory import SavedBytes, allocator_peak
from fusedseg.memory.meter import mean_of
from fusedseg.unet import MultiEncoderUNet, UNet
from tests.resnet import ResNet18

HAS_CXX = not _torch.inductor_problem()
needs_inductor = pytest.mark.skipif(not HAS_CXX, reason="Inductor needs a C++ compiler")
CODEGENS = ["aten", pytest.param("inductor", marks=[pytest.mark.slow, needs_inductor])]
# A test runs with Inductor too where a pass hands Inductor something that no other test of the pass has.
BOTH = pytest.mark.parametrize("codegen", CODEGENS)
INDUCTOR = CODEGENS[1].marks


def in_both(cases, *chosen):
    """Each case with aten, and the chosen ones with Inductor."""
    return [*((case, "aten") for case in cases), *(pytest.param(case, "inductor", marks=INDUCTOR) for case in chosen)]


def relu(channels):
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def relu3d(channels):
    return nn.Sequential(nn.BatchNorm3d(channels), nn.ReLU(inplace=True))


def instance(channels):
    return nn.Sequential(nn.InstanceNorm3d(channels, affine=True), nn.LeakyReLU(0.01, inplace=True))


class Attention(nn.Module):
    """Group norm, SiLU, layer norm and attention over positions, as in a diffusion network."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)
        self.group, self.layer = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        h = self.group(self.first(x))
        t = h.flatten(2).transpose(1, 2)
        u = self.layer(t)
        t = t + self.attention(u, u, u, need_weights=False)[0]
        return self.last(t.transpose(1, 2).reshape(h.shape))


class Dense(nn.Module):
    """Each convolution reads all results before it."""

    def __init__(self, act, count, norm=None):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 + 8 * i, 8, 3, padding=1) for i in range(count))
        self.norms, self.act = nn.ModuleList(norm(8) if norm else nn.Identity() for _ in range(count)), act

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.cat([x, self.act(norm(conv(x)))], 1)
        return x


def mixed():
    """Norms, activations, a pool, dropout and interpolation."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), *relu(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.Dropout(0.1), nn.Conv2d(8, 4, 3),
    )  # fmt: skip


# The first four have the structure of the networks of docs/results.md.
NETWORKS = {
    "U-Net": (lambda: UNet(3, 4, widths=(8, 16), plain=True, norm_act=relu), [(2, 3, 16, 16)]),
    "two encoders": (
        lambda: MultiEncoderUNet((2, 1), 3, widths=(4, 8), plain=True, norm_act=relu),
        [(2, 2, 8, 8), (2, 1, 8, 8)],
    ),
    "3D U-Net": (lambda: UNet(1, 2, dims=3, widths=(4, 8), plain=True, norm_act=relu3d), [(2, 1, 8, 8, 4)]),
    "nnU-Net": (
        lambda: UNet(1, 3, dims=3, widths=(4, 8), mode="transposed", plain=True, norm_act=instance),
        [(2, 1, 8, 8, 8)],
    ),
    "ResNet": (lambda: ResNet18(10, width=4, stages=2), [(2, 3, 32, 32)]),
    "attention": (Attention, [(2, 3, 8, 8)]),
    "mixed": (mixed, [(2, 3, 16, 16)]),
}


def make(name):
    build, shapes = NETWORKS[name]
    torch.manual_seed(0)
    return build(), [torch.randn(shape) for shape in shapes]


def compiled(model, codegen="aten", dynamic=None, **options):
    """``options`` are those of the backend."""
    return torch.compile(model, backend="fusedseg", dynamic=dynamic, options={"codegen": codegen, **options})


class TwoBlocks(nn.Module):
    """Two blocks, the second of which adds the first one's output before its activation."""

    def __init__(self, norm, act, shared=False, channels=3):
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.last, one = nn.Conv2d(4, 2, 1), norm()
        self.norms, self.act = nn.ModuleList([one, one if shared else norm()]), act

    def forward(self, x):
        h = self.act(self.norms[0](self.first(x)))
        return self.last(self.act(self.norms[1](self.second(h)) + h))


def under_autocast(run):
    """Calls ``run`` under autocast to bf16."""

    def cast(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return run(*inputs)

    return cast


def loss_of(outputs):
    """A loss of all outputs of a network, whose gradients differ from place to place."""
    return sum(y.square().mean() for y in (outputs if isinstance(outputs, (tuple, list)) else [outputs]))


def calls(source):
    """The names of what generated code calls, in their order."""
    return re.findall(r"_of_(\w+?)_\d+\(", source)


def is_backward(graph):
    return any("tangents" in node.name for node in graph.find_nodes(op="placeholder"))


def close(found, wanted, rtol=1e-4, atol=1e-5):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


def results(net, run, inputs, steps=2):
    """Outputs, gradients and buffers of a few training steps, with the same random numbers in each run.

    Frozen parameters have no gradient.
    """
    found = []
    for seed in range(steps):
        torch.manual_seed(seed)
        out = run(*inputs)
        trained = [p for p in net.parameters() if p.requires_grad]
        found += [out.detach().clone(), *torch.autograd.grad(out.square().mean(), trained)]
    return [*found, *(buffer.clone() for buffer in net.buffers())]


def beside_eager(net, inputs, steps=2, **options):
    """What training steps of a compiled network give, and what those of a copy give in eager mode."""
    twin = copy.deepcopy(net)
    return results(net, compiled(net, **options), inputs, steps), results(twin, twin, inputs, steps)


def beside_float64(net, x, steps=2, **options):
    """What training steps of a compiled network give, and what those of a copy give in eager mode in float64."""
    twin = copy.deepcopy(net).double()
    return results(net, compiled(net, **options), [x], steps), results(twin, twin, [x.double()], steps)


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def peak_of(net, run, x):
    """The allocator's peak of a step, without what a first step compiles or keeps."""

    def step():
        mean_of(run(x)).backward()
        net.zero_grad()

    step()
    return allocator_peak(step)


def kept(net, run, inputs):
    """Bytes that autograd keeps; the second call is counted, because a first call of compiled code compiles."""
    run(*inputs)
    with SavedBytes([*net.parameters(), *net.buffers(), *inputs]) as saved:
        out = run(*inputs)
    assert out.requires_grad
    return saved.nbytes
