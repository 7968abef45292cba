"""``InPlaceABNSync``: InPlaceABN with the statistics of all processes."""

from typing import Any

from .inplace_abn import InPlaceABN
from .synchronised import Synchronised


class InPlaceABNSync(Synchronised, InPlaceABN):
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
    ``DistributedDataParallel`` expects.  Under ``torch.compile`` the group is that of the time of tracing, and all its
    processes must run graphs that call their norms in one order, as those of one network do.

    Raises:
        ValueError: arguments that ``InPlaceABN`` does not take; one value a channel is enough here, if there are others
            on other processes.
        RuntimeError: from ``torch.distributed``, where a process of the group is gone.

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
