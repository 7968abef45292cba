"""``torch.func``, forward mode and scripting raise a clear error before any tensor is changed."""

import pytest
import torch
from torch.autograd import forward_ad

from tests.contract import MODULES


@pytest.fixture(params=[name for name in MODULES if not name.endswith("3d")])
def layer(request):
    return MODULES[request.param]()


def test_func_grad(layer):
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    x = torch.randn(2, 4, 4, 4)

    def loss(x):
        return torch.func.functional_call(layer, (parameters, buffers), (x * 1,)).sum()

    before = {name: buffer.clone() for name, buffer in buffers.items()}
    with pytest.raises(RuntimeError, match=r"torch.func transforms \(grad, vmap, jvp, ...\) are not supported"):
        torch.func.grad(loss)(x)
    for name, buffer in before.items():
        assert torch.equal(buffer, dict(layer.named_buffers())[name])


def test_vmap(layer):
    with pytest.raises(RuntimeError, match=r"torch.func transforms \(grad, vmap, jvp, ...\) are not supported"):
        torch.func.vmap(layer.eval())(torch.randn(2, 1, 4, 4, 4))


@pytest.mark.parametrize("grad", [True, False], ids=["", "no_grad"])
def test_forward_mode(layer, grad):
    """Forward mode raises an error: tangents are not lost in silence, and statistics do not move."""
    x, tangent = torch.randn(2, 2, 4, 4, 4)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(RuntimeError, match="forward-mode differentiation is not supported"):
            layer(dual * 1)
        # An input without a tangent works as usual.
        layer.eval()(x.clone())
    torch.testing.assert_close(dict(layer.named_buffers()), before)


def test_functional_call_without_transforms(layer):
    """Gradients reach parameters that ``functional_call`` supplies, as in meta-learning."""
    other = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    z = torch.func.functional_call(layer, other, (torch.randn(2, 4, 4, 4),))
    if other:
        z.square().sum().backward()
    assert all(p.grad is not None for p in other.values())
    assert all(p.grad is None for p in layer.parameters())
