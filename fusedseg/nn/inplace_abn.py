"""``InPlaceABN``: BatchNorm and activation in one module that keeps one tensor."""

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .invertible import Invertible
from .norm_statistics import BatchStatistics


class InPlaceABN(Invertible, BatchStatistics, _BatchNorm):
    """Batch normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    whose two tensors kept for backward become one: the output.  ``state_dict`` is that of ``nn.BatchNorm2d``, so its
    checkpoints load, strictly, and give the same function for any weight, also negative, tiny or zero.

    Use it on a tensor that nobody else reads, such as a convolution's output, and use what it returns.

    ``forward(x, residual)`` adds the residual, of the shape of x, before the activation, as residual blocks do.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``; ``momentum=None`` averages cumulatively.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; unused where there is none.
        device, dtype: of parameters and buffers.

    Kept for backward: the output, 1 / sqrt(var + eps), the parameters and the residual; and the normalised input of
    those channels whose weight is too small beside their bias, or beside the residual, to rebuild it (see
    ``functional.inplace_abn``).  On a GPU that list of channels follows an optimizer's step without making the host
    wait, and may lag behind it by a step; loading a state dict or changing the parameters in place refreshes it at once
    (changes through ``.data`` are not seen).  A captured CUDA graph keeps the list of the time of its capture.

    Under ``torch.utils.checkpoint`` running statistics move once; those of ``nn.BatchNorm2d`` move twice.

    Falls back: an input that is neither contiguous nor channels_last is copied once; ``momentum=None`` breaks the graph
    under ``torch.compile``, as in ``nn.BatchNorm2d``.

    It is a ``torch.nn.modules.batchnorm._BatchNorm``, as which ``torch.optim.swa_utils.update_bn`` and FSDP find it.

    Raises:
        RuntimeError: from ``nn.SyncBatchNorm.convert_sync_batchnorm``, which would replace it by a norm without an
            activation: call ``fusedseg.convert_sync`` instead.
        ValueError: an activation that cannot be inverted, naming the module that is exact for it; an input of another
            number of channels or dimensions, or otherwise unfit (see ``functional.inplace_abn``).
        TypeError: an integer or complex input or dtype.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceABN"
    EXACT = "BatchNormAct"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        device=None,
        dtype=None,
    ) -> None:
        act = self._parse(activation, activation_param, dtype)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._invert(act)

    @classmethod
    def from_batchnorm(cls, bn: nn.Module, activation: str = "leaky_relu", activation_param: float = 0.01) -> Any:
        """``from_norm``, for an ``nn.BatchNorm1d``, ``2d`` or ``3d``."""
        return cls.from_norm(bn, activation, activation_param)

    def to_batchnorm(self, dims: int = 2) -> nn.Module:
        """``to_norm``: the ``nn.BatchNorm{dims}d``."""
        return self.to_norm(dims)
