"""Small networks with the structures of published libraries."""

import torch
from torch import nn
from torch.nn import functional as F


def double_conv(cin: int, cout: int, act: nn.Module | None = None) -> nn.Sequential:
    """The block of milesial's U-Net, of lightning-bolts, and of smp's Conv2dReLU."""
    act = nn.ReLU(inplace=True) if act is None else act
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout), act)


class UNet(nn.Module):
    """A U-Net of two levels with concatenated skips and bilinear upsampling."""

    def __init__(self, act=nn.ReLU) -> None:
        super().__init__()
        self.inc = nn.Sequential(double_conv(3, 8, act()), double_conv(8, 8, act()))
        self.pool = nn.MaxPool2d(2)
        self.down = nn.Sequential(double_conv(8, 16, act()), double_conv(16, 16, act()))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.dec = nn.Sequential(double_conv(24, 8, act()), double_conv(8, 8, act()))
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.inc(x)
        y = self.up(self.down(self.pool(skip)))
        y = F.pad(y, [0, skip.shape[3] - y.shape[3], 0, skip.shape[2] - y.shape[2]])
        return self.out(self.dec(torch.cat([skip, y], dim=1)))


class Twice(nn.Module):
    """A norm whose output is read twice."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), act or nn.ReLU()

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.act(y) + y
