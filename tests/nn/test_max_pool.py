"""Compares the modules with nn.MaxPool2d and nn.MaxPool3d."""

import copy

import pytest
import torch
from torch import nn

from fusedseg import MaxPool2d, MaxPool3d


@pytest.mark.parametrize(
    ("ours", "stock", "shape"),
    [(MaxPool2d, nn.MaxPool2d, (2, 3, 7, 6)), (MaxPool3d, nn.MaxPool3d, (2, 3, 5, 4, 6))],
    ids=["2d", "3d"],
)
@pytest.mark.parametrize("arguments", [(2,), (3, 2, 1), (3, 1, 1, 1, False, True), ((2,), ())], ids=str)
def test_as_stock(backend, device, ours, stock, shape, arguments):
    x = torch.randn(shape, device=device, requires_grad=True)
    module, plain = ours(*arguments), stock(*arguments)
    assert isinstance(module, stock)
    assert repr(module) == repr(plain)
    assert module.state_dict() == {}
    z, expected = module(x), plain(x)
    assert torch.equal(z, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (z, expected)]
    torch.testing.assert_close(*grads)
    assert torch.equal(copy.deepcopy(module)(x[0]), plain(x[0]))
