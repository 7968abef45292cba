"""Losses of segmentation that keep nothing but the logits.

Each loss computes the sums of ``fusedseg.functional.segmentation_sums`` in one pass, and the value in a few lines of
stock PyTorch from these sums.  Names, arguments and values are those of the libraries that the losses replace.
"""

from .cross_entropy import CrossEntropyLoss
from .focal import DiceFocalLoss, FocalLoss
from .monai import DiceCELoss, DiceLoss, TverskyLoss
from .nnunet import DC_and_BCE_loss, DC_and_CE_loss, DC_and_topk_loss, DeepSupervision, TopKLoss
from .smp import SMPDiceLoss, SMPTverskyLoss

__all__ = [
    "CrossEntropyLoss",
    "DC_and_BCE_loss",
    "DC_and_CE_loss",
    "DC_and_topk_loss",
    "DeepSupervision",
    "DiceCELoss",
    "DiceFocalLoss",
    "DiceLoss",
    "FocalLoss",
    "SMPDiceLoss",
    "SMPTverskyLoss",
    "TopKLoss",
    "TverskyLoss",
]


def __dir__() -> list[str]:
    return __all__
