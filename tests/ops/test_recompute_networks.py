"""Whole networks of stock modules under the scope: bytes, and gradients that are the same to the last bit."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fusedseg import recompute
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.unet import UNet, lidar_optical_unet, unet3d_large, unet3d_small
from tests.compiler.networks import instance, relu, relu3d
from tests.resnet import ResNet18, ResNet50


class Case(NamedTuple):
    """A network, its inputs at full size and at a small size for values, and the limit of kept bytes against eager."""

    make: Callable[..., nn.Module]
    shapes: list[tuple[int, ...]]
    small: dict[str, Any]
    small_shapes: list[tuple[int, ...]]
    most: float


UNET2D = {"plain": True, "norm_act": relu}
UNET3D = {"plain": True, "norm_act": relu3d}
SMALL = {"widths": (4, 8, 8), "up_widths": (8, 4)}
CASES = {
    "U-Net": Case(partial(UNet, 3, 4, **UNET2D), [(8, 3, 256, 256)], {"widths": (8, 16, 16)}, [(2, 3, 32, 32)], 0.45),
    "U-Net, transposed": Case(
        partial(UNet, 3, 4, mode="transposed", **UNET2D),
        [(8, 3, 256, 256)],
        {"widths": (8, 16, 16)},
        [(2, 3, 33, 32)],
        0.5,
    ),
    "two encoders": Case(
        partial(lidar_optical_unet, **UNET2D),
        [(8, 5, 256, 256), (8, 3, 256, 256)],
        {"widths": (8, 16, 16)},
        [(2, 5, 32, 32), (2, 3, 32, 32)],
        0.45,
    ),
    "3D large": Case(partial(unet3d_large, **UNET3D), [(2, 1, 320, 150, 26)], SMALL, [(1, 1, 20, 10, 6)], 0.45),
    "3D small": Case(partial(unet3d_small, **UNET3D), [(2, 1, 320, 150, 26)], SMALL, [(1, 1, 20, 10, 6)], 0.45),
    "3D instance norm": Case(
        partial(UNet, 1, 4, dims=3, plain=True, norm_act=instance),
        [(1, 1, 64, 128, 128)],
        {"widths": (4, 8, 8)},
        [(2, 1, 16, 12, 8)],
        0.45,
    ),
    "ResNet-18": Case(ResNet18, [(128, 3, 224, 224)], {"width": 8}, [(2, 3, 64, 64)], 0.55),
    "ResNet-50": Case(ResNet50, [(128, 3, 224, 224)], {"width": 8}, [(2, 3, 64, 64)], 0.62),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def sizes():
    """Each network in fp32, and one network in fp16.  ``-m slow`` adds the other networks in fp16."""
    for name, case in CASES.items():
        for of, dtype in DTYPES.items():
            seldom = of == "fp16" and name != "U-Net"
            yield pytest.param(case, dtype, id=f"{name}-{of}", marks=[pytest.mark.slow] if seldom else [])


@pytest.mark.parametrize(("case", "dtype"), [*sizes()])
def test_bytes(case, dtype):
    """The kept bytes at full size, on tensors without values."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fake_mode():
            net, images = case.make(), [torch.empty(shape) for shape in case.shapes]
            owned = [*net.parameters(), *net.buffers()]
            eager, ours = (measure(fn, *images, owned=owned) for fn in (net, recompute()(net)))
    finally:
        torch.set_default_dtype(before)
    print(f"\neager: {eager}; ours: {ours}; {ours.saved / eager.saved:.3f}, {ours.peak / eager.peak:.3f}")
    assert ours.saved <= case.most * eager.saved
    # Rebuilt tensors are alive for a moment in addition.
    assert ours.peak <= 0.8 * eager.peak


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case, precision):
    """Gradients, output and running statistics are equal to the last bit."""
    net = case.make(**case.small)
    images = [torch.randn(shape) for shape in case.small_shapes]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    results = []
    for fn in (net, recompute()(net)):
        net.load_state_dict(state)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "amp"):
            out = fn(*images)
        grads = torch.autograd.grad(out.double().square().mean(), list(net.parameters()))
        results.append([out.detach(), *grads, *(buffer.clone() for buffer in net.buffers())])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
