"""The bytes of whole networks in a scope with ``bits``, in fp16, on tensors without values."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

from fusedseg import recompute
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.unet import lidar_optical_unet, unet3d_large, unet3d_small
from tests.ops.test_recompute_networks import UNET2D, UNET3D
from tests.resnet import ResNet50

VOLUME, IMAGES = [(2, 1, 320, 150, 26)], [(8, 5, 256, 256), (8, 3, 256, 256)]


class Case(NamedTuple):
    """A network, and the most MiB: {bits: (kept, peak)}."""

    make: Callable[[], nn.Module]
    shapes: list[tuple[int, ...]]
    most: dict[int, tuple[int, int]]


def case(make, shapes, most, **options):
    return Case(lambda: make(**options), shapes, most)


CASES = {
    "3D large": case(unet3d_large, VOLUME, {8: (811, 1720), 4: (420, 1477)}, **UNET3D),
    "3D small": case(unet3d_small, VOLUME, {8: (853, 2215), 4: (442, 1956)}, **UNET3D),
    "two encoders": case(lidar_optical_unet, IMAGES, {8: (664, 1166), 4: (345, 943)}, **UNET2D),
    "3D large, fused": case(unet3d_large, VOLUME, {8: (786, 1424), 4: (408, 1198)}),
    "3D small, fused": case(unet3d_small, VOLUME, {8: (829, 1505), 4: (429, 1258)}),
    "two encoders, fused": case(lidar_optical_unet, IMAGES, {8: (542, 790), 4: (283, 563)}),
    "ResNet-50": case(ResNet50, [(128, 3, 224, 224)], {8: (1563, 1764), 4: (861, 1378)}),
}
# A fourth of these cases shows all that the others do.
SELDOM = ("3D small", "3D small, fused", "3D large, fused", "ResNet-50")


def cases():
    for name in CASES:
        for bits in (8, 4):
            seldom = name in SELDOM or bits == 8
            yield pytest.param(name, bits, id=f"{name}-{bits}", marks=[pytest.mark.slow] if seldom else [])


@pytest.mark.parametrize(("name", "bits"), [*cases()])
def test_bytes(name, bits):
    make, shapes, most = CASES[name]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with fake_mode():
            net, images = make(), [torch.empty(shape) for shape in shapes]
            found = measure(recompute(bits=bits)(net), *images, owned=[*net.parameters(), *net.buffers()])
    finally:
        torch.set_default_dtype(before)
    print(f"\n{name}, {bits} bits: {found}")
    kept, peak = most[bits]
    assert found.saved <= kept * 2**20
    assert found.peak <= peak * 2**20
