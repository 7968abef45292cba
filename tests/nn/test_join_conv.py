"""Compares JoinConv2d and JoinConv3d with stock convolutions of the concatenation."""

import pytest
import torch
from torch import nn

from fusedseg.nn import JoinConv2d, JoinConv3d

OPTIONS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "same": {"padding": "same", "dilation": 2},
    "same, even kernel": {"padding": "same", "kernel_size": 2},
    "reflected": {"padding": 1, "padding_mode": "reflect"},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("join", "stock", "size"), [(JoinConv2d, nn.Conv2d, (7, 6)), (JoinConv3d, nn.Conv3d, (5, 6, 7))]
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_equals_the_stock_module(join, stock, size, options):
    options = {"kernel_size": 3, **options}
    ours, theirs = (cls(5, 4, **options, dtype=torch.float64) for cls in (join, stock))
    ours.load_state_dict(theirs.state_dict())
    a, b = (torch.randn(2, C, *size, dtype=torch.float64, requires_grad=True) for C in (3, 2))
    torch.testing.assert_close(ours((a, b)), theirs(torch.cat([a, b], 1)))
    torch.testing.assert_close(ours(torch.cat([a, b], 1)), theirs(torch.cat([a, b], 1)))
    grads = [
        torch.autograd.grad(out.square().sum(), (a, b, *net.parameters()))
        for net, out in ((ours, ours((a, b))), (theirs, theirs(torch.cat([a, b], 1))))
    ]
    torch.testing.assert_close(*grads)
