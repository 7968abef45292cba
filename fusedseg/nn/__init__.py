"""Drop-in modules over the ops."""

from ..ops.sources import Interpolated
from .branch_sum import BranchSum
from .conv_abn import ConvABN2d, ConvABN3d
from .conv_bank import ConvBank2d, ConvBank3d
from .inplace_abn import InPlaceABN
from .join_conv import JoinConv2d, JoinConv3d
from .max_pool import MaxPool2d, MaxPool3d

__all__ = [
    "BranchSum",
    "ConvABN2d",
    "ConvABN3d",
    "ConvBank2d",
    "ConvBank3d",
    "InPlaceABN",
    "Interpolated",
    "JoinConv2d",
    "JoinConv3d",
    "MaxPool2d",
    "MaxPool3d",
]
