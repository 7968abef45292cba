"""Functional forms of the ops."""

from ..ops.conv.sources import Interpolated
from ..ops.segmentation.call import SegmentationSums, TpFpFn, segmentation_sums, tp_fp_fn
from ..ops.segmentation.conv_logits import ConvLogits
from ..ops.segmentation.positions import argmax_labels
from .convolutions import conv_abn, join_conv
from .norms import inplace_abn, inplace_group_norm_act, inplace_instance_norm_act, norm_act
from .pools import max_pool
from .upsampling import upsample

__all__ = [
    "ConvLogits",
    "Interpolated",
    "SegmentationSums",
    "TpFpFn",
    "argmax_labels",
    "conv_abn",
    "inplace_abn",
    "inplace_group_norm_act",
    "inplace_instance_norm_act",
    "join_conv",
    "max_pool",
    "norm_act",
    "segmentation_sums",
    "tp_fp_fn",
    "upsample",
]


__dir__ = __all__.copy
