"""The error of 4 bits in the gradient of small networks stays that of an earlier engine."""

import pytest
import torch
from torch import nn

import fusedseg
from tests.compiler.test_bits import IMAGE, MOST, error_of

pytestmark = pytest.mark.usefixtures("packed")


def plain(norm=nn.BatchNorm2d, act=nn.ReLU):
    """Three convolutions with 16,384 values each; the pool's output has 4,096."""
    norms = [norm(8), norm(8)]
    convs = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    model = nn.Sequential(convs[0], norms[0], act(), convs[1], norms[1], act(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    for parameters in (each.parameters() for each in norms):
        for parameter, middle in zip(parameters, (1.0, 0.0), strict=False):
            nn.init.uniform_(parameter, middle - 0.5, middle + 0.5)
    return model


class Residual(nn.Module):
    """The activation follows a sum, which is rebuilt from rounded values."""

    def __init__(self, act, blocks=1):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act, self.blocks = nn.BatchNorm2d(8), act, blocks
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.act(self.stem(x))
        for _ in range(self.blocks):
            # As in torchvision's ResNets.
            out = self.norm(self.conv(x))
            out += x
            x = self.act(out)
        return self.head(x)


# Each network, and the error that an earlier engine, the recompute scope, had with the same weights (64 or 256
# roundings).
NETWORKS = {
    "BatchNorm, ReLU": (plain, 0.0285),
    "GroupNorm, ReLU": (lambda: plain(lambda channels: nn.GroupNorm(2, channels)), 0.0157),
    "`InPlaceABN`, LeakyReLU": (lambda: plain(fusedseg.InPlaceABN, nn.Identity), 0.0290),
    "ReLU in place after three sums": (lambda: Residual(nn.ReLU(inplace=True), 3), 0.0192),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_small_networks(name):
    build, of_scope = NETWORKS[name]
    torch.manual_seed(0)
    found = error_of(build(), [IMAGE], 4, 64)
    assert 0 < found.size <= 1.1 * of_scope
    assert found.bias < MOST
