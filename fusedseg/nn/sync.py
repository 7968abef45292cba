"""Modules whose statistics, in training, are those of all processes of a group, and ``convert_sync``."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, distributed, nn

from .._torch import assume_constant_result
from ..ops.norm.stock import BATCH_NORM
from .inplace_norm_act import InPlaceABN
from .norm_act import BatchNormAct


@functools.cache
def _warn_alone() -> None:
    warnings.warn(
        "fusedseg: torch.distributed is not initialised, so the statistics of synchronised norms are those of this "
        "process alone",
        stacklevel=9,
    )


def group_name(process_group: object) -> str | None:
    """The name of the group, or of the group of all processes for None; None if there are no other processes."""
    if not distributed.is_available() or not distributed.is_initialized():
        _warn_alone()
        return None
    group: Any = distributed.group.WORLD if process_group is None else process_group
    return group.group_name if distributed.get_world_size(group) > 1 else None


class Synchronised:
    """A base class that stands before the module without synchronisation, such as ``InPlaceABN``."""

    training: bool
    running_mean: Tensor | None
    process_group: object = None

    def _others(self) -> str | None:
        """The name of the group if the call uses its statistics and it has other members, otherwise None."""
        if not self.training and self.running_mean is not None:
            return None
        return self._group()

    @assume_constant_result
    def _group(self) -> str | None:
        """``group_name``, which in compiled code runs once, while the forward is traced."""
        return group_name(self.process_group)


class InPlaceABNSync(Synchronised, InPlaceABN):
    """``InPlaceABN`` whose statistics, in training, are computed over the batches of all processes of a group.

    Equals ``nn.Sequential(nn.SyncBatchNorm(C, ..., process_group), nn.LeakyReLU(0.01))``, on GPUs and CPUs (by gloo).
    Every process merges the (count, mean, M2) of all processes in the order of the ranks.  So the statistics have the
    same bits on every process, whatever the batch sizes; a process may have an empty batch.  There is one collective in
    forward and one in backward, and every process of the group must take part in both.

    Shapes are those of ``InPlaceABN``; the batch sizes of the processes may differ.

    Args:
        num_features, eps, momentum, affine, track_running_stats, activation, activation_param, bias, device, dtype: as
            in ``InPlaceABN``.
        process_group: a group of ``torch.distributed``; None means the group of all processes.

    Kept for backward: the tensors that ``InPlaceABN`` keeps, and for each channel the fraction of the values of all
    processes that this process has.

    Falls back to ``InPlaceABN`` in eval mode, in a group of one process, and, with a warning, if ``torch.distributed``
    is not initialised.  The gradients of weight and bias are sums over the process's own values, as
    ``DistributedDataParallel`` expects.  Under ``torch.compile`` the group is determined while the graph is traced.
    All processes of the group must then run graphs that call their norms in the same order, as graphs of one network
    do.

    Raises:
        ValueError: ``InPlaceABN`` does not take the arguments.  One value per channel is enough here, if other
            processes have values too.
        RuntimeError: ``torch.distributed`` raises it if a process of the group has ended.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceABNSync"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        process_group: object = None,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.process_group = process_group


class BatchNormActSync(Synchronised, BatchNormAct):
    """``BatchNormAct`` whose statistics, in training, are computed over the batches of all processes of a group.

    Equals ``nn.Sequential(nn.SyncBatchNorm(C, ..., process_group), nn.ReLU())`` for ``activation="relu"``, on GPUs and
    CPUs.  ``InPlaceABNSync`` describes processes, batch sizes, fallbacks, gradients and the errors that
    ``BatchNormAct`` does not raise.

    Args:
        process_group: a group of ``torch.distributed``; None means the group of all processes.

    All other arguments are those of ``BatchNormAct``.

    Kept for backward: the tensors that ``BatchNormAct`` keeps, and for each channel the fraction of the values of all
    processes that this process has.  On aten, backward holds g = dz phi'(y) beside dx, each in one piece.

    Shapes and source are those of ``BatchNormAct``.
    """

    OP = "fusedseg.BatchNormActSync"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        num_slopes: int = 1,
        process_group: object = None,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, num_slopes=num_slopes, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
        self.process_group = process_group


SYNCHRONISED: dict[type, type] = {
    InPlaceABN: InPlaceABNSync,
    BatchNormAct: BatchNormActSync,
    **dict.fromkeys(BATCH_NORM.modules, nn.SyncBatchNorm),
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
