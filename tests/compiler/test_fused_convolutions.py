"""The option ``fused_convolutions``: PyTorch's ops stand for the vendor's kernels here, in float64 on a CPU."""

import copy
import functools
import re

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.compiler import backend
from fusedseg.ops.conv import cudnn_graphs, norm_conv
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.low_bit import graph as low_bit
from tests.compiler import networks
from tests.compiler.networks import beside_eager, compiled, results, under_autocast
from tests.nnunet import PlainConvUNet
from tests.resnet import ResNet18

pytestmark = pytest.mark.usefixtures("interpreted")


def chain(norm, act, dims=2):
    """Two convolutions with a norm each, and a last one with a bias."""
    conv = (nn.Conv2d, nn.Conv3d)[dims - 2]
    return nn.Sequential(conv(2, 4, 3, padding=1), norm(4), act, conv(4, 4, 3, stride=2), norm(4), act, conv(4, 3, 1))


class Skip(nn.Module):
    """The norm's output has two readers; what the second norm makes has a residual."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        h = self.first(x)
        return self.last((self.second(h) + h).relu())


IMAGE, VOLUME = (2, 2, 9, 8), (2, 2, 6, 5, 7)
# The network, its input, and the numbers of convolutions of forward and of backward that become such ops.
NETWORKS = {
    "batch, ReLU": (lambda: chain(nn.BatchNorm2d, nn.ReLU(True)), IMAGE, (3, 2)),
    "batch, no activation": (lambda: chain(nn.BatchNorm2d, nn.Identity()), IMAGE, (3, 2)),
    "batch without parameters": (lambda: chain(lambda c: nn.BatchNorm2d(c, affine=False), nn.ReLU()), IMAGE, (3, 2)),
    "batch without statistics": (
        lambda: chain(lambda c: nn.BatchNorm2d(c, track_running_stats=False), nn.ReLU()), IMAGE, (3, 2),
    ),
    "batch, 3D": (lambda: chain(nn.BatchNorm3d, nn.LeakyReLU(0.01, True), 3), VOLUME, (3, 2)),
    "instance": (lambda: chain(lambda c: nn.InstanceNorm2d(c, affine=True), nn.LeakyReLU(0.01)), IMAGE, (3, 2)),
    "instance, 3D": (lambda: chain(lambda c: nn.InstanceNorm3d(c, affine=True), nn.LeakyReLU(0.01), 3), VOLUME, (3, 2)),
    # These norms stay as they are: with an activation of another kind the convolution behind finds nothing before it.
    "batch, SiLU": (lambda: chain(nn.BatchNorm2d, nn.SiLU()), IMAGE, (2, 0)),
    "group": (lambda: chain(lambda c: nn.GroupNorm(2, c), nn.ReLU()), IMAGE, (0, 0)),
    # Their statistics are found by the norm, for which backward is the same.
    "instance with running statistics": (
        lambda: chain(lambda c: nn.InstanceNorm2d(c, track_running_stats=True), nn.ReLU()), IMAGE, (0, 2),
    ),
    "skip": (Skip, IMAGE, (2, 0)),
    "nnU-Net": (lambda: PlainConvUNet(widths=(4, 8)), (2, 1, 8, 8, 8), (7, 4)),
    "ResNet": (lambda: ResNet18(10, width=4, stages=2), (2, 3, 32, 32), (10, 4)),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    make, shape, wanted = NETWORKS[name]
    net = make().double()
    for module in net.modules():
        if getattr(module, "weight", None) is not None and "Norm" in type(module).__name__:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return net, torch.randn(shape).double(), wanted


close = functools.partial(networks.close, rtol=1e-7, atol=1e-9)


def written(texts):
    """How often the code of forward and that of backward calls the ops."""
    names = [[name for name in networks.calls(text) if "norm_conv" in name] for text in texts]
    assert all("backward" not in name for name in names[0])
    return len(names[0]), sum("backward" in name for name in names[-1])


@pytest.mark.parametrize(
    ("name", "rows"),
    # What becomes an op is decided without the layout.
    [
        *(pytest.param(name, True, marks=[pytest.mark.slow] * (name == "ResNet")) for name in NETWORKS),
        *((name, False) for name in ("batch, ReLU", "instance, 3D")),
    ],
)
def test_steps_are_those_of_float64(name, rows, sources):
    """Outputs, gradients and running statistics of two steps."""
    net, x, wanted = made(name)
    options = {}
    if rows:
        options["memory_format"] = FORMATS[x.dim()]
        net, x = net.to(**options), x.contiguous(**options)
    close(*beside_eager(net, [x], fused_convolutions=True, **options))
    assert written(sources) == wanted


def test_with_bits_gradients_are_those_of_the_unfused_graph(sources, packed):
    """The same values are packed with the same random numbers, so that only the order of sums differs."""
    net, x, _ = made("batch, ReLU")
    net, x = net.float(), x.float()
    twin = copy.deepcopy(net)
    found = results(net, compiled(net, bits=4, seed=3, fused_convolutions=True), [x], steps=1)
    # Activations are apart when the graphs are divided, so that convolutions find statistics alone.
    assert written(sources) == (2, 0)
    low_bit._steps.clear()
    torch._dynamo.reset()
    close(found, results(twin, compiled(twin, bits=4, seed=3), [x], steps=1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("triton", {}), ("triton", {"fused_convolutions": False}), ("aten", {"fused_convolutions": True})],
)
def test_without_the_option_and_where_norms_are_pytorchs_nothing_is_written(backend, options, monkeypatch, sources):
    monkeypatch.setattr(fusedseg, "backend", backend)
    net, x, _ = made("batch, ReLU")
    compiled(net, **options)(x).sum().backward()
    assert written(sources) == (0, 0)


# How a step runs, and the numbers of convolutions of forward and of backward that become such ops.
HOW = {
    "a frozen convolution": ({}, (3, 2)),
    # Norms stay as they are.
    "eval mode": ({}, (0, 0)),
    "symbolic sizes": ({"dynamic": True}, (0, 0)),
    "a budget": ({"budget": 0.5}, (3, 1)),
    "flops": ({"extra_flops": 0.2}, (3, 2)),
    "autocast": ({}, (3, 2)),
}


@pytest.mark.parametrize("how", HOW)
def test_ways_of_a_step(how, sources):
    net, x, _ = made("batch, ReLU")
    options, wanted = HOW[how]
    net[3].weight.requires_grad_(how != "a frozen convolution")
    net.train(how != "eval mode")
    rough, run = {}, compiled(net, fused_convolutions=True, **options)
    twin = copy.deepcopy(net)
    if how == "autocast":
        # Convolutions compute in bf16, and statistics in fp32; the gradient of a weight is a sum over 144 positions.
        net, x, rough = net.float(), x.float(), {"rtol": 5e-2, "atol": 2e-2}
    found = results(net, (lambda x: under_autocast(run)(x).double()) if rough else run, [x])
    close(found, results(twin, twin, [x.double()]), **rough)
    assert written(sources) == wanted


def test_kernels_of_a_gpu_take_half_precision_in_channels_last(monkeypatch):
    """What the rule refuses would be copied, or computed in another precision."""
    monkeypatch.setattr(norm_conv._backend, "on_gpu", lambda t: True)
    relu, w = norm_conv.norm_of("relu", 0.0, False).act, torch.zeros(8, 16, 3, 3)

    def fits(x, w=w, act=relu):
        return norm_conv.fits(x, w.to(x.dtype), act)

    x = torch.zeros(2, 16, 5, 5).to(torch.bfloat16, memory_format=torch.channels_last)
    assert fits(x)
    assert not fits(x.float())
    assert not fits(x.contiguous())
    assert not fits(x[:, :4].contiguous(memory_format=torch.channels_last), w[:, :4])
    assert not fits(x, w[:3])
    assert not fits(x, act=norm_conv.norm_of("silu", 0.0, False).act)


def test_without_the_package_the_option_says_so(monkeypatch, sources):
    monkeypatch.setattr(cudnn_graphs, "is_installed", lambda: False)
    monkeypatch.setitem(backend.__globals__, "on_gpu", lambda t: True)
    net, x, _ = made("batch, ReLU")
    with pytest.warns(UserWarning, match=re.escape("pip install 'fusedseg[cudnn]'")):
        compiled(net, fused_convolutions=True)(x)
    assert written(sources) == (0, 0)
