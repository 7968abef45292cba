"""The noise of the option "bits" over networks, norms and activations: gradients are right on average."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import _torch
from tests.compiler.bits_cases import ACTIVATIONS, EVERY, IMAGE, MOST, NORMS, Around, Shortcut, Sum
from tests.compiler.networks import compiled, kept, make
from tests.compiler.test_bits import Plain, error_of

# These networks judge the rounding, and are so small that some are exact without this; test_bits_peak.py has the bytes.
pytestmark = pytest.mark.usefixtures("packed")

STOCK = ("batch", "instance", "group", "layer")

OURS = [name for name in NORMS if name not in STOCK]

LARGE = {"U-Net": 0.08, "two encoders": 0.09, "3D U-Net": 0.09, "nnU-Net": 0.1, "ResNet": 0.16}

SIDES = {"ResNet": 128, "3D U-Net": 16, "nnU-Net": 16}

# A U-Net of this package is below, and its twin of three dimensions is built as nnU-Net is.
IMPLIED = ("U-Net", "3D U-Net")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in IMPLIED else ()) for name in LARGE]
)
def test_networks(name):
    net, inputs = make(name)
    inputs = [torch.randn(2, x.shape[1], *(SIDES.get(name, 32),) * (x.dim() - 2)) for x in inputs]
    stock = kept(net, net, inputs)
    torch._dynamo.reset()
    assert kept(net, compiled(net, bits=4), inputs) < LARGE[name] * stock
    torch._dynamo.reset()
    # The error needs fewer values than the bytes.
    found = error_of(net, [x[..., :64, :64].clone() for x in inputs], 4, 16)
    assert 0 < found.size < 0.12
    assert found.bias < MOST


# The slow ones have a norm and an activation of the others.
PAIRS = [
    pytest.param(norm, act, marks=() if norm == "group" or act == "ReLU" else pytest.mark.slow)
    for norm in STOCK
    for act in ACTIVATIONS
]


@pytest.mark.parametrize(("norm", "act"), PAIRS)
def test_a_norm_of_a_concatenation_that_another_convolution_reads(norm, act):
    # Statistics of a batch of one are those of one sample.
    for batch in (1, 2) if act == "ReLU" else (2,):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = Shortcut(NORMS[norm](), ACTIVATIONS[act]())
        found = error_of(net, [torch.randn(batch, 3, 32, 32)], 4, 32)
        assert found.size > 0
        assert found.bias < MOST, batch


@pytest.mark.parametrize("norm", OURS)
def test_a_norm_of_this_package_of_such_a_concatenation(norm):
    torch.manual_seed(0)
    found = error_of(Shortcut(NORMS[norm](), nn.Identity()), [torch.randn(2, 3, 32, 32)], 4, 32)
    assert found.size > 0
    assert found.bias < MOST


@pytest.mark.parametrize("act", ["relu", "leaky_relu", "selu", "silu", "relu6"])
def test_a_norm_of_this_package_with_a_residual(act):
    """The sign of the sum of two rounded tensors is not exact."""
    torch.manual_seed(0)
    assert error_of(Sum(fusedseg.BatchNormAct(16, activation=act)), [IMAGE], 8, 32).bias < MOST


# The most error, relative to a gradient in float64, that an order of sums explains.
LAST_BITS = 1e-14

# Functions without a bound of their error read exact values, and so does all else in that network.
EXACT = ("glu", "LogSigmoid")

# The compiler turns a call in place into the same graph; two of them show it.
ONCE = [name for name in EVERY if not name.endswith(("in place", "_")) or name in ("ELU in place", "ReLU in place")]


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, bits, marks=() if bits == 4 and name in ONCE else pytest.mark.slow)
        for name in EVERY
        for bits in (8, 4)
    ],
)
def test_every_activation(name, bits):
    torch.manual_seed(0)
    found = error_of(Around(EVERY[name]), [IMAGE], bits, 48)
    assert (found.size > LAST_BITS) == (name not in EXACT)
    assert found.size <= LAST_BITS or found.bias < MOST


# One network for each activation, norm, batch and structure.
ALL = [
    pytest.param(act, norm, batch, around, id=f"{act}, {norm}, {batch}{', shortcut' if around is Shortcut else ''}")
    for around in (Plain, Shortcut)
    for batch in (1, 2)
    for norm in STOCK
    for act in EVERY
]


@pytest.mark.slow
@pytest.mark.parametrize(("act", "norm", "batch", "around"), ALL)
def test_every_activation_after_every_norm(act, norm, batch, around):
    """The two tests above have some of these cases.  The noise of 24 roundings is about .02, so more decide then.

    Where nothing is rounded, last bits may differ, because gradients are added source by source.
    """
    torch.manual_seed(0)
    net = around(NORMS[norm](), EVERY[act]())
    x = torch.randn(batch, 3, 32, 32)
    found = error_of(net, [x], 4, 24)
    if found.bias >= MOST and found.size > LAST_BITS:
        torch._dynamo.reset()
        found = error_of(net, [x], 4, 256)
    assert found.bias < MOST or found.size <= LAST_BITS


@pytest.mark.skipif(bool(_torch.inductor_problem()), reason="Inductor needs a C++ compiler")
def test_inductor():
    """Inductor lays 2D tensors out as channels_last, which the graph's strides do not say."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1), nn.Conv2d(8, 2, 1)
    )
    found = error_of(net, [IMAGE], 4, 64, codegen="inductor")
    assert 0 < found.size < 0.05
    assert found.bias < MOST
