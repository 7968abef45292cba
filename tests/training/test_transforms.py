"""``torch.func``, forward mode and scripting: a clear error before anything is changed."""

import pytest
import torch
from torch.autograd import forward_ad

import fusedseg

LAYERS = {
    "InPlaceABN": lambda: fusedseg.InPlaceABN(3),
    "ConvABN2d": lambda: fusedseg.ConvABN2d(3, 3, 1),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    return LAYERS[request.param]()


def test_func_grad(layer):
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    x = torch.randn(2, 3, 4, 4)

    def loss(parameters):
        return torch.func.functional_call(layer, (parameters, buffers), (x * 1,)).sum()

    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with pytest.raises(RuntimeError, match=r"torch.func transforms \(grad, vmap, jvp, ...\) are not supported"):
        torch.func.grad(loss)(parameters)
    for name, buffer in before.items():
        assert torch.equal(buffer, dict(layer.named_buffers())[name])


def test_vmap(layer):
    with pytest.raises(RuntimeError, match=r"torch.func transforms \(grad, vmap, jvp, ...\) are not supported"):
        torch.func.vmap(layer.eval())(torch.randn(2, 1, 3, 4, 4))


def test_forward_mode(layer):
    x, tangent = torch.randn(2, 2, 3, 4, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises((NotImplementedError, RuntimeError), match=r"forward (mode )?AD|jvp"):
            layer(dual * 1)


def test_functional_call_without_transforms(layer):
    """Parameters of another place, as in meta-learning: gradients reach them."""
    other = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    z = torch.func.functional_call(layer, other, (torch.randn(2, 3, 4, 4),))
    z.square().sum().backward()
    assert all(p.grad is not None for p in other.values())
    assert all(p.grad is None for p in layer.parameters())
