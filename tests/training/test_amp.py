"""Mixed precision, default dtypes and channels_last, as a training run uses them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.ops.layout import FORMATS
from fusedseg.unet import UNet
from tests.tools.copies import Copies
from tests.training import jobs


def unet():
    torch.manual_seed(0)
    return UNet(3, 2, widths=(8, 16))


def batch(device):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 16, 16, generator=generator)
    return x.to(device), (x[:, 0] > 0).long().to(device)


def test_grad_scaler_skips_a_step_that_overflowed(device):
    """Parameters do not change, the scale is halved, running statistics stay finite, and the next step trains."""
    net = unet().to(device)
    x, target = batch(device)
    found = jobs.overflowing_steps(net, lambda net: F.cross_entropy(net(x).float(), target), device.type)
    assert found == ([False, True], 16.0)


def test_default_dtype(device):
    torch.set_default_dtype(torch.float64)
    try:
        net = unet().to(device)
        assert {p.dtype for p in net.parameters()} == {torch.float64}
        x, target = batch(device)
        F.cross_entropy(net(x.double()), target).backward()
        assert {p.grad.dtype for p in net.parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("strides_of_a_gpu")
@pytest.mark.parametrize("dims", [2, 3])
def test_channels_last_without_layout_copies(device, dims):
    """Forward and backward of ConvABN, pools and a single norm do not copy tensors into another layout."""
    fmt, size = FORMATS[dims + 2], {2: 48, 3: 20}[dims]
    conv, pool = (getattr(fusedseg, f"{name}{dims}d") for name in ("ConvABN", "MaxPool"))
    stock = nn.Conv2d if dims == 2 else nn.Conv3d
    net = nn.Sequential(
        conv(8, 8, 3, padding=1), pool(2), stock(8, 8, 3, padding=1), fusedseg.InPlaceABN(8), conv(8, 4, 1)
    )
    net = net.to(device).to(memory_format=fmt)
    x = torch.randn(2, 8, *(size,) * dims, device=device).contiguous(memory_format=fmt).requires_grad_()
    with Copies() as copies:
        z = net(x)
        z.backward(torch.randn_like(z))
    assert z.is_contiguous(memory_format=fmt)
    assert x.grad.is_contiguous(memory_format=fmt)
    assert copies.found == []
