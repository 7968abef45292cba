"""The recompute scope with ``bits``: what is packed, and that the gradient is right on average."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg import recompute
from fusedseg.unet import UNet


def network(norm=nn.BatchNorm2d, act=nn.ReLU, width=8):
    layers, channels = [], 3
    for _ in range(3):
        layers += [nn.Conv2d(channels, width, 3, padding=1), norm(width), act()]
        channels = width
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Conv2d(width, 4, 1))


IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def gradient(model, x=IMAGE, **scope):
    # A converted model has a scope of its own, which the outermost scope would replace.
    with recompute(**scope) if scope else nullcontext():
        out = model(x)
    return out.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(out.square().mean(), model.parameters())])


def error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


# 8 bits: a step is 1 / 127 of half a range; 4 bits: 1 / 7 of it.
@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.15)])
def test_forward_is_exact_and_the_gradient_is_near(bits, most):
    torch.manual_seed(0)
    model = network()
    (out, expected), (rounded_out, got) = gradient(model), gradient(model, bits=bits)
    assert torch.equal(rounded_out, out)
    assert 0 < error(got, expected) < most


def test_the_gradient_is_right_on_average():
    torch.manual_seed(0)
    model = network().double()
    x = IMAGE.double()
    _, expected = gradient(model, x)
    one = [gradient(model, x, bits=4, seed=seed)[1] for seed in range(64)]
    # The mean of 64 independent errors is an eighth of one of them; a bias would stay.
    assert error(sum(one) / 64, expected) < 1.5 / 8 * max(error(g, expected) for g in one)


def test_seeds():
    model = network()
    before = torch.get_rng_state()
    first, same, other = (gradient(model, bits=4, seed=seed)[1] for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert not torch.equal(gradient(model, bits=4)[1], gradient(model, bits=4)[1])
    assert torch.equal(torch.get_rng_state(), before)


def test_converted():
    torch.manual_seed(0)
    model = UNet(3, 4, widths=(4, 8), plain=True)
    stock = copy.deepcopy(model)
    x = torch.randn(2, 3, 64, 64)
    fusedseg.convert(model, example_inputs=x, bits=4)
    (out, expected), (rounded_out, got) = gradient(stock, x), gradient(model, x)
    assert torch.allclose(rounded_out, out, atol=1e-5)
    assert 1e-3 < error(got, expected) < 0.15
    model.eval()
    stock.eval()
    # In eval mode nothing is rounded.
    assert error(gradient(model, x)[1], gradient(stock, x)[1]) < 1e-5


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"bits": 2}, ValueError, "bits must be 8, 4 or None, got 2"),
        ({"bits": "4"}, TypeError, "bits must be 8, 4 or None, got str"),
        ({"bits": True}, TypeError, "bits must be 8, 4 or None, got bool"),
        ({"bits": 4, "seed": 0.5}, TypeError, "seed must be an integer or None, got float"),
        ({"seed": 1}, ValueError, "seed is given without bits"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_refused(arguments, kind, text):
    for call in (recompute, lambda **given: fusedseg.convert(nn.Conv2d(3, 4, 3), **given)):
        with pytest.raises(kind, match=text):
            call(**arguments)
