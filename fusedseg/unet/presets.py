"""Networks that people brought, with exactly their layers."""

from typing import Any

from .unet import MultiEncoderUNet, UNet


def lidar_optical_unet(in_channels: tuple[int, int] = (5, 3), num_classes: int = 3, **options) -> MultiEncoderUNet:
    """Two encoders, lidar (5 channels) and optical (3), of widths 64 ... 1024, and one decoder.

    ``net(lidar, optical)`` maps two images (N, 5, H, W) and (N, 3, H, W) to logits (N, 3, H, W).  Every level up:
    bilinear interpolation and a 1x1 convolution that halves the channels, both encoders' skips, two 3x3 convolutions.
    ``options`` are those of ``MultiEncoderUNet``.
    """
    return MultiEncoderUNet(in_channels, num_classes, **{"bias": True, **options})


def unet3d_large(in_channels: int = 1, num_classes: int = 5, **options) -> UNet:
    """3D U-Net of 40,158,853 parameters: widths 64, 128, 256, 512, 512; up 256, 128, 64, 64; trilinear, biased."""
    widths, up_widths = (64, 128, 256, 512, 512), (256, 128, 64, 64)
    return _unet3d(in_channels, num_classes, widths, up_widths, options)


def unet3d_small(in_channels: int = 1, num_classes: int = 5, **options) -> UNet:
    """3D U-Net of 14,496,517 parameters: widths 64, 128, 256, 256; up 256, 128, 64; trilinear, biased."""
    return _unet3d(in_channels, num_classes, (64, 128, 256, 256), (256, 128, 64), options)


def _unet3d(in_channels, num_classes, widths, up_widths, options) -> UNet:
    fixed: dict[str, Any] = {"dims": 3, "widths": widths, "up_widths": up_widths, "reduce": False, "bias": True}
    return UNet(in_channels, num_classes, **{**fixed, **options})
