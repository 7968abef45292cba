"""``checkpoint_blocks``: the blocks that it chooses, and that they change no gradient."""

from functools import partial

import pytest
import torch
from torch import nn

from fusedseg.memory import checkpoint_blocks, measure
from fusedseg.unet import UNet
from tests.resnet import ResNet18

UNETS = {"plain": partial(UNet, 3, 4, widths=(8, 16, 32), plain=True), "ours": partial(UNet, 3, 4, widths=(8, 16, 32))}


def test_blocks_are_the_largest_with_few_convolutions():
    assert checkpoint_blocks(ResNet18(10, 4)) == [
        "stem",
        "layers.0",
        *(f"layers.{i}.{j}" for i in (1, 2, 3) for j in (0, 1)),
    ]
    blocks = checkpoint_blocks(UNETS["plain"]())
    assert blocks == ["incs.0", "downs.0.0", "downs.0.1", "ups.0", "ups.1"]
    with pytest.raises(ValueError, match="ReLU has no module with 1 to 4 convolutions"):
        checkpoint_blocks(nn.ReLU())
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        checkpoint_blocks(UNETS["plain"](), 0)


@pytest.mark.parametrize("make", UNETS.values(), ids=UNETS)
def test_checkpoints_change_no_gradient_and_keep_less(make):
    net, other = make().double(), make().double()
    other.load_state_dict(net.state_dict())
    checkpoint_blocks(other)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    assert measure(other, x).held < 0.7 * measure(net, x).held
    for model in (net, other):
        model.zero_grad()
        model(x).square().mean().backward()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
