"""The option "bits": an exact forward, few kept bytes, and gradients that are right on average."""

import copy

import pytest
import torch
from torch import nn

from fusedseg import _torch
from tests.compiler.networks import compiled, kept, make
from tests.ops.low_bit_cases import IMAGE, Error
from tests.ops.test_low_bit_bias import ACTIVATIONS, EVERY, MOST, NORMS, Around, Shortcut

STOCK = ("batch", "instance", "group", "layer")


def gradient(run, net, inputs):
    out = run(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * (weights + out)).mean(), [*net.parameters()])
    return out.detach(), torch.cat([g.flatten() for g in grads])


def error_of(net, inputs, bits, times, **options):
    """The error of one rounding relative to the gradient, and bias² / error²; forward is exact."""
    net, inputs = net.double(), [x.double() for x in inputs]
    out, expected = gradient(net, net, inputs)
    run = compiled(net, bits=bits, **options)
    found = [gradient(run, net, inputs) for _ in range(times)]
    assert all(torch.equal(of, out) if not options else torch.allclose(of, out) for of, _ in found)
    got = torch.stack([g for _, g in found])
    mean = got.mean(0)
    noise = (got - mean).square().sum() / (times - 1)
    squared = (got - expected).square().sum(1).mean()
    bias = (mean - expected).square().sum() - noise / times
    return Error((squared.sqrt() / expected.norm()).item(), (bias / squared).item())


LARGE = {"U-Net": 0.08, "two encoders": 0.09, "3D U-Net": 0.09, "nnU-Net": 0.1, "ResNet": 0.16}
SIDES = {"ResNet": 128, "3D U-Net": 16, "nnU-Net": 16}


@pytest.mark.parametrize("name", LARGE)
def test_networks(name):
    net, inputs = make(name)
    inputs = [torch.randn(2, x.shape[1], *(SIDES.get(name, 32),) * (x.dim() - 2)) for x in inputs]
    stock = kept(net, net, inputs)
    torch._dynamo.reset()
    assert kept(net, compiled(net, bits=4), inputs) < LARGE[name] * stock
    torch._dynamo.reset()
    found = error_of(net, inputs, 4, 16)
    assert 0 < found.size < 0.12
    assert found.bias < MOST


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("norm", STOCK)
def test_a_norm_of_a_concatenation_that_another_convolution_reads(norm, act):
    for batch in (1, 2):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = Shortcut(NORMS[norm](), ACTIVATIONS[act]())
        found = error_of(net, [torch.randn(batch, 3, 32, 32)], 4, 32)
        assert found.size > 0
        assert found.bias < MOST, batch


# Functions that backward cannot follow in fewer bits read exact values.
EXACT = ("glu",)


@pytest.mark.parametrize("bits", [pytest.param(8, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("name", EVERY)
def test_every_activation(name, bits):
    torch.manual_seed(0)
    found = error_of(Around(EVERY[name]), [IMAGE], bits, 48)
    assert (found.size > 0) == (name not in EXACT)
    assert not found.size or found.bias < MOST


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


def test_seeds():
    """Each step rounds anew, and PyTorch's generator is not moved."""
    net, _ = make("U-Net")
    inputs = [torch.randn(2, 3, 32, 32)]
    run = compiled(net, bits=4)
    before = torch.get_rng_state()
    (_, one), (_, two) = gradient(run, net, inputs), gradient(run, net, inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one, two)


def test_a_second_backward_reads_the_same_rounding():
    net, _ = make("U-Net")
    out = compiled(net, bits=4)(torch.randn(2, 3, 32, 32)).square().mean()
    one = torch.autograd.grad(out, [*net.parameters()], retain_graph=True)
    assert all(map(torch.equal, one, torch.autograd.grad(out, [*net.parameters()])))


def test_eval_is_exact():
    net, inputs = make("U-Net")
    twin = copy.deepcopy(net).eval()
    with torch.no_grad():
        assert torch.equal(compiled(net.eval(), bits=4)(*inputs), twin(*inputs))


@pytest.mark.parametrize(
    ("options", "error"), [({"bits": 3}, ValueError), ({"bits": True}, ValueError), ({"seed": 1.0}, TypeError)]
)
def test_wrong_options(options, error):
    with pytest.raises(Exception, match=r"option (bits|seed) must be") as raised:
        compiled(nn.Conv2d(3, 4, 3), **options)(torch.randn(1, 3, 8, 8))
    assert error.__name__ in repr(raised.value) or isinstance(raised.value, error)
