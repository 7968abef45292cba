"""U-Nets and the blocks they are made of, in two and three dimensions."""

from .blocks import ConvNormAct, DoubleConv, Down, Up
from .unet import UNet

__all__ = ["ConvNormAct", "DoubleConv", "Down", "UNet", "Up"]
