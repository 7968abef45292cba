"""``InPlaceABNSync``: ``InPlaceABN`` with the statistics of all processes."""

import torch

from .inplace_abn import InPlaceABN
from .synchronised import Synchronised


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
    processes that this process has.  Compiled code keeps the number of values of all processes too.

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
