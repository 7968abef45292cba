"""Networks of users of this package, with exactly their layers."""

from typing import Any

from .unet import MultiEncoderUNet, UNet


def lidar_optical_unet(in_channels: tuple[int, int] = (5, 3), num_classes: int = 3, **options: Any) -> MultiEncoderUNet:
    """A U-Net with two encoders, for lidar (5 channels) and optical images (3 channels), and one decoder.

    ``net(lidar, optical)`` maps two images (N, 5, H, W) and (N, 3, H, W) to logits (N, 3, H, W).  The widths of the
    encoders are 64 to 1024.  A level of the decoder has a 1x1 convolution that halves the channels, bilinear
    interpolation, the skips of both encoders, and two 3x3 convolutions.  ``options`` go to ``MultiEncoderUNet``.
    """
    return MultiEncoderUNet(in_channels, num_classes, **{"bias": True, **options})


def unet3d_large(in_channels: int = 1, num_classes: int = 5, **options: Any) -> UNet:
    """A 3D U-Net with 40,158,853 parameters: (N, 1, D, H, W) to logits (N, 5, D, H, W).

    Its widths are 64, 128, 256, 512 and 512 on the way down, and 256, 128, 64 and 64 on the way up.  It interpolates
    trilinearly, and its convolutions have biases.  ``options`` are those of ``UNet``.
    """
    widths, up_widths = (64, 128, 256, 512, 512), (256, 128, 64, 64)
    return _unet3d(in_channels, num_classes, widths, up_widths, options)


def unet3d_small(in_channels: int = 1, num_classes: int = 5, **options: Any) -> UNet:
    """A 3D U-Net with 14,496,517 parameters: (N, 1, D, H, W) to logits (N, 5, D, H, W).

    Its widths are 64, 128, 256 and 256 on the way down, and 256, 128 and 64 on the way up.  It interpolates
    trilinearly, and its convolutions have biases.  ``options`` are those of ``UNet``.
    """
    return _unet3d(in_channels, num_classes, (64, 128, 256, 256), (256, 128, 64), options)


def _unet3d(in_channels, num_classes, widths, up_widths, options) -> UNet:
    fixed: dict[str, Any] = {"dims": 3, "widths": widths, "up_widths": up_widths, "reduce": False, "bias": True}
    return UNet(in_channels, num_classes, **{**fixed, **options})
