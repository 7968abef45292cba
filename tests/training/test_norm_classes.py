"""Code that looks for norms by their class, in a model built of this package's modules.

``tests/conversion/test_found_by_class.py`` has the same habits for converted models.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.optim.swa_utils import update_bn

import fusedseg
from tests.conversion import networks

# The classes that torchvision and mmseg leave out of weight decay.
NORMS = _BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm


def built() -> tuple[nn.Module, nn.Module]:
    """A network of this package's norms, and its stock twin."""
    ours = nn.Sequential(
        fusedseg.ConvABN2d(3, 4, 3),
        nn.Conv2d(4, 4, 3), fusedseg.InPlaceABN(4),
        nn.Conv2d(4, 4, 3), fusedseg.BatchNormAct(4, activation="relu"),
        nn.Conv2d(4, 4, 3), fusedseg.InPlaceInstanceNormAct(4, affine=True),
        nn.Conv2d(4, 4, 3), fusedseg.GroupNormAct(2, 4),
    ).double()  # fmt: skip
    leaky = nn.LeakyReLU(0.01)
    stock = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.BatchNorm2d(4), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.InstanceNorm2d(4, affine=True), leaky),
        nn.Conv2d(4, 4, 3), nn.Sequential(nn.GroupNorm(2, 4), leaky),
    ).double()  # fmt: skip
    for mine, theirs in zip(ours.parameters(), stock.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    return ours, stock


def batches(count=3):
    return [3 + torch.randn(4, 3, 16, 16, dtype=torch.float64) for _ in range(count)]


def test_frozen_by_the_class_that_serves_every_dimension():
    """mmseg's ``norm_eval``, and freezing: the modules are a ``_BatchNorm``, like ``nn.SyncBatchNorm``."""
    ours, stock = built()
    x, found = batches(1)[0], []
    for model in (ours, stock):
        for module in model.train().modules():
            if isinstance(module, _BatchNorm):
                module.eval().requires_grad_(False)
        model(x).square().sum().backward()
        found.append(list(model.parameters()))
    for mine, theirs in zip(*found, strict=True):
        assert mine.requires_grad == theirs.requires_grad
        assert mine.grad is None or torch.allclose(mine.grad, theirs.grad, rtol=1e-8, atol=1e-9)
    assert all(buffer.abs().max() in (0, 1) for buffer in ours.buffers())


def test_they_are_not_of_the_class_of_one_dimension():
    """Code that exchanges every ``nn.BatchNorm2d`` for another norm would drop their activations without an error."""
    norms = [m for m in built()[0].modules() if isinstance(m, _BatchNorm)]
    assert len(norms) == 3
    assert not any(isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) for m in norms)


def test_weight_decay_by_class():
    def decayed(model):
        norms = {id(p) for m in model.modules() if isinstance(m, NORMS) for p in m.parameters(recurse=False)}
        return [id(p) not in norms for p in model.parameters()]

    ours, stock = built()
    assert decayed(ours) == decayed(stock)


def test_update_bn():
    ours, stock = built()
    data = batches()
    for model in (ours, stock):
        update_bn(data, model)
    for mine, theirs in zip(ours.buffers(), stock.buffers(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9)
    assert ours[2].num_batches_tracked == 3


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """What timm's function of this name does, which is a copy of PyTorch's."""
    out = module
    if isinstance(module, _BatchNorm):
        out = nn.SyncBatchNorm(module.num_features)
        if hasattr(module, "qconfig"):
            out.qconfig = module.qconfig
    for name, child in module.named_children():
        out.add_module(name, convert_sync_batchnorm(child))
    return out


@pytest.mark.parametrize("convert", [nn.SyncBatchNorm.convert_sync_batchnorm, convert_sync_batchnorm])
def test_synchronisation_that_would_drop_activations(convert):
    """timm's copy of PyTorch's function replaced fused norms by norms without an activation, and raised nothing."""
    converted = networks.UNet()
    fusedseg.convert(converted)
    for model in (built()[0], converted):
        with pytest.raises(RuntimeError, match=r"call fusedseg\.convert_sync"):
            convert(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fusedseg.convert_sync(built()[0])(batches(1)[0])


def test_a_replaced_norm_of_a_converted_model_is_noticed():
    """timm's ``freeze_batch_norm_2d`` and detectron2's ``convert_frozen_batchnorm`` replace ``nn.BatchNorm2d``."""
    model = networks.UNet().eval()
    fusedseg.convert(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
    with pytest.raises(RuntimeError, match=r"was replaced or removed, but .* still leaves its work to it"):
        model(torch.randn(1, 3, 16, 16))
