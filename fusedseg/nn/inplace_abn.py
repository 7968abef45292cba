"""``InPlaceABN``: BatchNorm and activation in one module that keeps one tensor."""

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from .invertible import Invertible
from .norm_statistics import BatchStatistics


class InPlaceABN(Invertible, BatchStatistics, _BatchNorm):
    """Batch normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    The stock modules keep two tensors for backward; this module keeps one, the output.  The ``state_dict`` has the
    names and shapes of ``nn.BatchNorm2d``.  So its checkpoints load with ``strict=True``, and give the same function
    for any weight, also if the weight is negative, tiny or zero.

    Use it on a tensor that no other code reads, such as a convolution's output, and use the returned tensor.

    ``forward(x, residual)`` adds the residual before the activation, as residual blocks do.

    Shapes: x and the residual have one shape, in fp16, bf16, fp32 or fp64.  The result has the shape and dtype of x.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``; ``momentum=None`` averages cumulatively.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0.  Activations without a parameter
            ignore it.
        bias, device, dtype: as in ``nn.BatchNorm2d``.

    Kept for backward: the output, 1 / sqrt(var + eps), the parameters, the residual, and the normalised input of some
    channels.  These are the channels whose weight is too small, compared with the bias or the residual, to rebuild the
    normalised input from the output (see ``functional.inplace_abn``).  On a GPU the list of these channels is updated
    after an optimizer's step without making the host wait, so it may lag behind by one step.  Loading a state dict or
    changing the parameters in place refreshes the list at once; changes through ``.data`` are not noticed.  A captured
    CUDA graph keeps the list that was valid when it was captured.

    Under ``torch.utils.checkpoint`` the running statistics move once; those of ``nn.BatchNorm2d`` move twice.

    Falls back: an input that is neither contiguous nor channels_last is copied once.  ``momentum=None`` breaks the
    graph under ``torch.compile``, as in ``nn.BatchNorm2d``.

    The module is an instance of ``torch.nn.modules.batchnorm._BatchNorm``, so that ``torch.optim.swa_utils.update_bn``
    and FSDP find it.

    Raises:
        RuntimeError: ``nn.SyncBatchNorm.convert_sync_batchnorm`` was called on it, which would replace it by a norm
            without an activation; call ``fusedseg.convert_sync`` instead.
        ValueError: the activation cannot be inverted (the error names the module that is exact for it); the input has
            another number of channels or dimensions, or is unfit in another way (see ``functional.inplace_abn``).
        TypeError: the input or the dtype is integer or complex.

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
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
