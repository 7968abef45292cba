"""Segmentation networks: U-Nets in two and three dimensions, their blocks, and presets."""

from .blocks import ConvNormAct, DoubleConv, Down, Up
from .presets import lidar_optical_unet, unet3d_large, unet3d_small
from .unet import MultiEncoderUNet, UNet

__all__ = [
    "ConvNormAct",
    "DoubleConv",
    "Down",
    "MultiEncoderUNet",
    "UNet",
    "Up",
    "lidar_optical_unet",
    "unet3d_large",
    "unet3d_small",
]


__dir__ = __all__.copy
