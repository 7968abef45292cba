"""``InPlaceABNSync``: InPlaceABN with the statistics of all processes."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..ops import inplace_abn_sync as op
from .inplace_abn import InPlaceABN

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@functools.cache
def _warn_alone() -> None:
    warnings.warn(
        "fusedseg.InPlaceABNSync: torch.distributed is not initialised, so statistics are those of this process alone",
        stacklevel=5,
    )


class InPlaceABNSync(InPlaceABN):
    """``InPlaceABN`` whose statistics, in training, are those of the batches of all processes of a group together.

    Equals ``nn.Sequential(nn.SyncBatchNorm(C, ..., process_group), nn.LeakyReLU(0.01))``, on GPUs and CPUs (by gloo).
    Every process merges the (count, mean, M2) of all in the order of their ranks: statistics are the same bits on each,
    whatever their batch sizes; a process may have an empty batch.  One collective forward, one backward; every process
    of the group must take part in both.

    Args:
        num_features, eps, momentum, affine, track_running_stats, activation, activation_param, device, dtype: as in
            ``InPlaceABN``.
        process_group: of ``torch.distributed``; None for that of all processes.

    Kept for backward: as in ``InPlaceABN``, and the number of values a channel of all processes.

    Falls back to ``InPlaceABN``: in eval mode; in a group of one process; and, with a warning, where
    ``torch.distributed`` is not initialised.  Gradients of weight and bias are those of the process's own values, as
    ``DistributedDataParallel`` expects.  Under ``torch.compile`` it breaks the graph.

    Raises:
        ValueError: arguments that ``InPlaceABN`` does not take; one value a channel is enough here, if there are others
            on other processes.
        RuntimeError: from ``torch.distributed``, where a process of the group is gone.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceABNSync"
    process_group: Any = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        process_group: Any = None,
        *,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.process_group = process_group

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if not self._several():
            return super().forward(x, residual)
        return self._synchronised(x, residual)

    def _several(self) -> bool:
        """Whether there are statistics of others."""
        if not self.training and self.running_mean is not None:
            return False
        if not distributed.is_available() or not distributed.is_initialized():
            _warn_alone()
            return False
        return distributed.get_world_size(self.process_group) > 1

    @torch.compiler.disable
    def _synchronised(self, x: Tensor, residual: Tensor | None) -> Tensor:
        self._check_shape(x)
        _, running_mean, running_var, momentum = self._statistics()
        op.check(x, self.weight, self.bias, running_mean, running_var, residual)
        kept = self._kept_now(x.dtype, residual is not None)
        z = op.inplace_abn_sync(
            x, self.weight, self.bias, running_mean, running_var, momentum, self.eps, self._act, kept,
            self.process_group, residual,
        )  # fmt: skip
        self._count_batch()
        return z


def convert_sync(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Makes every ``InPlaceABN`` of a model an ``InPlaceABNSync``, and every ``nn.BatchNorm`` an ``nn.SyncBatchNorm``.

    The modules stay the same objects, with their parameters, buffers, mode and hooks; ``model`` is returned.  A
    ``ConvABN`` then convolves and normalises in two steps, which keep the same bytes.  ``nn.SyncBatchNorm`` runs on
    GPUs only.

    Raises:
        TypeError: ``model`` is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fusedseg.convert_sync: model must be an nn.Module, got {type(model).__name__}")
    for module in model.modules():
        if type(module) is InPlaceABN:
            module.__class__ = InPlaceABNSync
        elif type(module) in BATCH_NORMS:
            module.__class__ = nn.SyncBatchNorm
        if isinstance(module, (InPlaceABNSync, nn.SyncBatchNorm)):
            module.process_group = process_group
    return model
