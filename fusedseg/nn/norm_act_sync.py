"""``BatchNormActSync``: BatchNormAct with the statistics of all processes."""

from typing import Any

from .norm_act import BatchNormAct
from .synchronised import Synchronised


class BatchNormActSync(Synchronised, BatchNormAct):
    """``BatchNormAct`` whose statistics, in training, are those of the batches of all processes of a group together.

    Equals ``nn.Sequential(nn.SyncBatchNorm(C, ..., process_group), nn.ReLU())`` for ``activation="relu"``, on GPUs and
    CPUs.  Processes, batch sizes, fallbacks and gradients: see ``InPlaceABNSync``.

    Args:
        process_group: a group of ``torch.distributed``; None means the group of all processes.

    All other arguments are those of ``BatchNormAct``.

    Kept for backward: as in ``BatchNormAct``, and two more vectors of C values.  On aten, backward has g = dz phi'(y)
    beside dx, in one piece each.

    Raises:
        ValueError: arguments that ``BatchNormAct`` does not take; one value a channel is enough here, if there are
            others on other processes.
        RuntimeError: from ``torch.distributed``, where a process of the group is gone.
    """

    OP = "fusedseg.BatchNormActSync"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        process_group: Any = None,
        *,
        num_slopes: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation, activation_param,
            num_slopes=num_slopes, device=device, dtype=dtype,
        )  # fmt: skip
        self.process_group = process_group
