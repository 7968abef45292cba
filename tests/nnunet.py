"""nnU-Net's plain network, written as its package ``dynamic_network_architectures`` builds it by default."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

# The default widths and strides of nnU-Net for a 3D patch of 128; a patch of 64 has one stage less.
WIDTHS = (32, 64, 128, 256, 320)


def block(cin: int, cout: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv3d(cin, cout, 3, stride, padding=1)
    return nn.Sequential(conv, nn.InstanceNorm3d(cout, affine=True), nn.LeakyReLU(0.01, inplace=True))


class PlainConvUNet(nn.Module):
    """An encoder whose stages begin with a strided convolution, and a decoder of transposed convolutions."""

    def __init__(self, cin: int = 1, classes: int = 3, widths: Sequence[int] = WIDTHS) -> None:
        super().__init__()
        stages = [(cin, widths[0], 1), *((a, b, 2) for a, b in pairwise(widths))]
        self.encoder = nn.ModuleList(nn.Sequential(block(*stage), block(stage[1], stage[1])) for stage in stages)
        ups = list(pairwise(reversed(widths)))
        self.ups = nn.ModuleList(nn.ConvTranspose3d(a, b, 2, 2) for a, b in ups)
        self.decoder = nn.ModuleList(nn.Sequential(block(2 * b, b), block(b, b)) for _, b in ups)
        self.out = nn.Conv3d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        for up, stage, skip in zip(self.ups, self.decoder, reversed(skips[:-1]), strict=True):
            x = stage(torch.cat([up(x), skip], 1))
        return self.out(x)
