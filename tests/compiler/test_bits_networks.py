"""The bytes of whole networks with the option "bits", in fp16, on tensors without values."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.unet import UNet, lidar_optical_unet, unet3d_large, unet3d_small
from tests.compiler.fake_step import fake_step
from tests.ops.test_low_bit_networks import IMAGES, VOLUME
from tests.ops.test_recompute_networks import UNET2D, UNET3D


class Named(UNet):
    """The small network, whose own forward names the skip, the enlarged map and the concatenation."""

    def forward(self, x):
        skips = [self.incs[0](x)]
        for (down,) in zip(*self.downs, strict=True):
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.ups:
            skip = skips.pop()
            enlarged = F.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=False)
            joined = torch.cat([skip, enlarged], 1)
            x = up.conv(joined)
        return self.out(x)


def named():
    widths = {"widths": (64, 128, 256, 256), "up_widths": (256, 128, 64)}
    return Named(1, 5, dims=3, reduce=False, bias=True, **widths, **UNET3D)


# The network, its inputs, and the most bytes at the peak as a share of eager mode's, with 4 bits.
CASES = {
    "3D large": (lambda: unet3d_large(**UNET3D), VOLUME, 0.28),
    "3D small": (lambda: unet3d_small(**UNET3D), VOLUME, 0.33),
    "3D small, named": (named, VOLUME, 0.33),
    "two encoders": (lambda: lidar_optical_unet(**UNET2D), IMAGES, 0.25),
}
KEPT = 0.11


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n != "3D small, named" else []) for n in CASES]
)
def test_bytes(name):
    make, shapes, most = CASES[name]
    torch.set_default_dtype(torch.float16)
    try:
        with fake_mode():
            net, images = make(), [torch.empty(shape) for shape in shapes]
            stock = measure(net, *images)
            found = fake_step(net, images, bits=4)
    finally:
        torch.set_default_dtype(torch.float32)
    print(f"\n{name}: {found}, stock {stock}")
    assert found.kept <= KEPT * stock.saved
    assert max(found.forward, found.backward) <= most * stock.peak
