"""The bytes of whole networks with the option "bits", in fp16, on tensors without values."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.compiler import chains, forms, norm_calls
from fusedseg.compiler.joint import is_tensor, value_of
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.ops.norm import passes
from fusedseg.ops.norm.spec import Gradients, Normalised, statistics_count, stats_dtype
from fusedseg.unet import UNet, lidar_optical_unet, unet3d_large, unet3d_small
from tests.compiler.fake_step import fake_step
from tests.ops.test_low_bit_networks import CASES as OF_SCOPE
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


def _statistics(x, spec, *_):
    return torch.empty(2, statistics_count(x, spec), dtype=stats_dtype(x)).unbind()


def _forward(passed, spec, layout, kept, out):
    return Normalised(torch.empty_like(passed.x) if out is None else out, *_statistics(passed.x, spec))


def _rebuild(saved, spec, out=None):
    return torch.empty_like(saved.source) if out is None else out


def _backward(dz, saved, spec, layout, kept, wanted):
    dx = torch.empty_like(dz) if wanted.into is None else wanted.into
    vectors = [torch.empty(dz.shape[1], dtype=dz.dtype) for _ in range(2)]
    return Gradients(dx, *vectors, None if saved.residual is None else torch.empty_like(dz))


@pytest.fixture
def on_gpu(monkeypatch):
    """Graphs call the norms of a GPU, which allocate what the Triton kernels do."""

    def is_served(x):
        return is_tensor(x) and value_of(x).is_floating_point() and norm_calls.is_planes_or_rows(value_of(x))

    for module in (chains, forms, norm_calls):
        monkeypatch.setattr(module, "is_served", is_served)
    for of in (_statistics, _forward, _rebuild, _backward):
        monkeypatch.setattr(passes, of.__name__[1:], of)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [name for name in OF_SCOPE if "fused" in name])
def test_fused_blocks_peak_no_higher_than_in_the_scope(name, bits, on_gpu):
    """They peaked at up to 1.19 of it."""
    torch.set_default_dtype(torch.float16)
    try:
        with fake_mode():
            found = fake_step(OF_SCOPE[name].make(), [torch.empty(s) for s in OF_SCOPE[name].shapes], bits=bits)
    finally:
        torch.set_default_dtype(torch.float32)
    print(f"\n{name}, {bits} bits: {found}")
    kept, peak = OF_SCOPE[name].most[bits]
    assert found.kept <= kept * 2**20
    assert max(found.forward, found.backward) <= 1.02 * peak * 2**20
