"""Networks of published packages, built as their users build them; a package that is not installed is skipped."""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import nn


class Network(NamedTuple):
    """make: builds the network, or skips the test; shape: the shape of an input.

    after_activation: the number of norms that an activation follows in the flow; others: the number of other norms.
    saved: the goal for bytes kept after the conversion, divided by bytes kept before.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    after_activation: int
    others: int
    saved: float


@cache
def _library() -> torch.library.Library:
    """Declares torchvision's binary ops: its wheel for GPUs does not load them beside a CPU build of PyTorch."""
    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _need(distribution: str) -> None:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed: see tests/conversion/packages.txt")
    if torch.version.cuda is None:
        _library()


def torchvision(name: str) -> nn.Module:
    _need("torchvision")
    import torchvision

    return torchvision.models.get_model(name)


def smp_unet() -> nn.Module:
    _need("segmentation_models_pytorch")
    import segmentation_models_pytorch

    return segmentation_models_pytorch.Unet("resnet18", encoder_weights=None)


def timm_resnet18() -> nn.Module:
    _need("timm")
    import timm

    return timm.create_model("resnet18")


def monai_basic_unet() -> nn.Module:
    _need("monai")
    from monai.networks.nets import BasicUNet

    return BasicUNet(3, 1, 2)


def monai_unet() -> nn.Module:
    _need("monai")
    from monai.networks.nets import UNet

    return UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2)


def nnunet(name: str, dims: int, widths: tuple[int, ...] = (32, 64, 128), **options) -> nn.Module:
    _need("dynamic_network_architectures")
    from dynamic_network_architectures.architectures import unet

    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    return getattr(unet, name)(
        1, len(widths), widths, conv, 3, (1, *(2 for _ in widths[1:])), num_classes=2, conv_bias=True, norm_op=norm,
        norm_op_kwargs={"eps": 1e-5, "affine": True}, nonlin=nn.LeakyReLU, nonlin_kwargs={"inplace": True}, **options,
    )  # fmt: skip


def plain(dims: int) -> nn.Module:
    return nnunet("PlainConvUNet", dims, n_conv_per_stage=2, n_conv_per_stage_decoder=2)


def residual() -> nn.Module:
    return nnunet("ResidualEncoderUNet", 2, n_blocks_per_stage=(1, 2, 2), n_conv_per_stage_decoder=1)


def bolts_unet() -> nn.Module:
    _need("lightning-bolts")
    # The file is imported by itself, because the package imports pytorch_lightning.
    files = importlib.metadata.files("lightning-bolts") or []
    path = next(file for file in files if str(file).endswith("models/vision/unet.py"))
    spec = importlib.util.spec_from_file_location("bolts_unet", str(path.locate()))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.UNet(2)


NETWORKS = {
    "torchvision resnet18": Network(lambda: torchvision("resnet18"), (2, 3, 96, 96), 9, 11, 0.62),
    "torchvision resnet50": Network(lambda: torchvision("resnet50"), (2, 3, 96, 96), 33, 20, 0.62),
    "smp Unet(resnet18)": Network(smp_unet, (2, 3, 96, 96), 19, 11, 0.62),
    "MONAI BasicUNet 3D": Network(monai_basic_unet, (1, 1, 32, 32, 32), 18, 0, 0.55),
    "MONAI UNet 3D": Network(monai_unet, (1, 1, 32, 32, 32), 0, 9, 0.62),
    "nnU-Net PlainConvUNet 2D": Network(lambda: plain(2), (2, 1, 64, 64), 10, 0, 0.55),
    "nnU-Net PlainConvUNet 3D": Network(lambda: plain(3), (1, 1, 24, 24, 24), 10, 0, 0.55),
    "nnU-Net ResidualEncoderUNet 2D": Network(residual, (2, 1, 64, 64), 8, 7, 0.62),
    "lightning-bolts UNet": Network(bolts_unet, (2, 3, 64, 64), 18, 0, 0.55),
    "timm resnet18": Network(timm_resnet18, (2, 3, 96, 96), 9, 11, 0.62),
}
