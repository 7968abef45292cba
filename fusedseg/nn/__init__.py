"""Modules that replace stock modules and call the ops."""

from ..ops.conv.sources import Interpolated
from .conv_abn import ConvABN2d, ConvABN3d
from .conv_head import ConvHead2d, ConvHead3d
from .inplace_norm_act import InPlaceABN, InPlaceGroupNormAct, InPlaceInstanceNormAct
from .join_conv import JoinConv2d, JoinConv3d
from .max_pool import MaxPool2d, MaxPool3d
from .norm_act import BatchNormAct, GroupNormAct, InstanceNormAct
from .sync import BatchNormActSync, InPlaceABNSync, convert_sync

__all__ = [
    "BatchNormAct",
    "BatchNormActSync",
    "ConvABN2d",
    "ConvABN3d",
    "ConvHead2d",
    "ConvHead3d",
    "GroupNormAct",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceGroupNormAct",
    "InPlaceInstanceNormAct",
    "InstanceNormAct",
    "Interpolated",
    "JoinConv2d",
    "JoinConv3d",
    "MaxPool2d",
    "MaxPool3d",
    "convert_sync",
]


__dir__ = __all__.copy
