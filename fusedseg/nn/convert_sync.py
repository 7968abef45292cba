"""``convert_sync``: the BatchNorms of a model get the statistics of all processes."""

from torch import nn

from .inplace_abn import InPlaceABN
from .inplace_abn_sync import InPlaceABNSync
from .norm_act import BatchNormAct
from .norm_act_sync import BatchNormActSync
from .norm_statistics import BatchStatistics
from .synchronised import Synchronised

SYNCHRONISED: dict[type, type] = {
    InPlaceABN: InPlaceABNSync,
    BatchNormAct: BatchNormActSync,
    **dict.fromkeys(BatchStatistics.stock, nn.SyncBatchNorm),
}


def convert_sync(model: nn.Module, process_group: object = None) -> nn.Module:
    """Makes every ``InPlaceABN`` of a model an ``InPlaceABNSync``, every ``BatchNormAct`` a ``BatchNormActSync`` and
    every ``nn.BatchNorm`` an ``nn.SyncBatchNorm``.

    The modules stay the same objects, with their parameters, buffers, mode and hooks; ``model`` is returned.  A
    ``ConvABN`` then convolves and normalises in two steps, which keep the same bytes.  ``nn.SyncBatchNorm`` runs on
    GPUs only.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusedseg.convert_sync: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        module.__class__ = SYNCHRONISED.get(type(module), type(module))
        if isinstance(module, (Synchronised, nn.SyncBatchNorm)):
            module.process_group = process_group
    return model
