"""Drop-in modules over the ops."""

from ..ops.sources import Interpolated
from .conv_abn import ConvABN2d, ConvABN3d
from .inplace_abn import InPlaceABN
from .join_conv import JoinConv2d, JoinConv3d

__all__ = ["ConvABN2d", "ConvABN3d", "InPlaceABN", "Interpolated", "JoinConv2d", "JoinConv3d"]
