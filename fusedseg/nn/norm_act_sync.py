"""``BatchNormActSync``: ``BatchNormAct`` with the statistics of all processes."""

import torch

from .norm_act import BatchNormAct
from .synchronised import Synchronised


class BatchNormActSync(Synchronised, BatchNormAct):
    """``BatchNormAct`` whose statistics, in training, are computed over the batches of all processes of a group.

    Equals ``nn.Sequential(nn.SyncBatchNorm(C, ..., process_group), nn.ReLU())`` for ``activation="relu"``, on GPUs and
    CPUs.  ``InPlaceABNSync`` describes processes, batch sizes, fallbacks and gradients.

    Args:
        process_group: a group of ``torch.distributed``; None means the group of all processes.

    All other arguments are those of ``BatchNormAct``.

    Kept for backward: the tensors that ``BatchNormAct`` keeps, and for each channel the fraction of the values of all
    processes that this process has.  Compiled code keeps the number of values of all processes too.  On aten, backward
    holds g = dz phi'(y) beside dx, each in one piece.

    Raises:
        ValueError: ``BatchNormAct`` does not take the arguments.  One value per channel is enough here, if other
            processes have values too.
        RuntimeError: ``torch.distributed`` raises it if a process of the group has ended.

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
