"""Drop-in modules over the ops."""

from .conv_abn import ConvABN2d, ConvABN3d
from .inplace_abn import InPlaceABN

__all__ = ["ConvABN2d", "ConvABN3d", "InPlaceABN"]
