"""Every op that writes into its arguments raises their versions, by which autograd notices a lost value."""

import pytest
import torch
from torch import nn

import fusedseg
from tests.contract import MODULES

C = 4


def activation(device):
    return torch.randn(2, C, 3, 5, device=device, requires_grad=True) * 1


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("InPlace")])
def test_the_input_gets_a_new_version(backend, device, name, training, grad):
    module, x = MODULES[name]().to(device).train(training), activation(device)
    before = x._version
    with torch.set_grad_enabled(grad):
        z = module(x)
    assert z.data_ptr() == x.data_ptr()
    assert x._version > before


@pytest.mark.parametrize("cls", [fusedseg.InPlaceABN, fusedseg.BatchNormAct], ids=lambda cls: cls.__name__)
def test_buffers_get_the_versions_that_the_stock_norm_gives_them(backend, device, cls):
    """aten moves running statistics without a new version, and counts batches with one."""
    ours, stock = cls(C).to(device), nn.BatchNorm2d(C).to(device)
    versions = []
    for module in (ours, stock):
        before = {name: t._version for name, t in module.named_buffers()}
        module(activation(device))
        versions.append({name: t._version > before[name] for name, t in module.named_buffers()})
    assert versions[0]["num_batches_tracked"] is versions[1]["num_batches_tracked"] is True
