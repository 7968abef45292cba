"""If no gradient reaches a module, its parameters have no gradient, as with stock modules.

Zeros would count as a gradient: momentum and weight decay would move the parameters.
"""

import pytest
import torch
from torch import nn

import fusedseg
from tests.tools.tensors import Cut

MODULES = {
    "stock": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()),
    "InPlaceABN": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), fusedseg.InPlaceABN(4)),
    "BatchNormAct": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), fusedseg.BatchNormAct(4)),
    "GroupNormAct": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), fusedseg.GroupNormAct(2, 4)),
    "InPlaceInstanceNormAct": lambda: nn.Sequential(nn.Conv2d(3, 4, 1), fusedseg.InPlaceInstanceNormAct(4)),
    "ConvABN": lambda: fusedseg.ConvABN2d(3, 4, 1),
    "JoinConv": lambda: fusedseg.nn.JoinConv2d(3, 4, 1),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_parameters_without_a_gradient(make):
    net, x, other = make(), torch.randn(2, 3, 4, 4, requires_grad=True), torch.ones(1, requires_grad=True)
    (Cut.apply(net(x)).sum() + other).backward()
    assert other.grad is not None
    assert [name for name, param in net.named_parameters() if param.grad is not None] == []
    assert x.grad is None
