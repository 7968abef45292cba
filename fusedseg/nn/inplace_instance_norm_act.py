"""``InPlaceInstanceNormAct``: InstanceNorm and activation in one module that keeps one tensor."""

import torch
from torch.nn.modules.instancenorm import _InstanceNorm

from .invertible import Invertible
from .norm_statistics import InstanceStatistics


class InPlaceInstanceNormAct(Invertible, InstanceStatistics, _InstanceNorm):
    """Instance normalisation and an invertible activation over (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions::

        nn.Sequential(nn.InstanceNorm3d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    The stock modules keep two tensors for backward; this module keeps one, the output.  The ``state_dict``, and the
    errors while one is loaded, are those of ``nn.InstanceNorm3d``.  Input in channels_last(_3d) is not copied, while
    the stock module copies it twice.

    Use it on a tensor that no other code reads, such as a convolution's output, and use the returned tensor.

    ``forward(x, residual)`` adds the residual before the activation, as residual blocks do.

    Shapes: x and the residual have one shape, in fp16, bf16, fp32 or fp64.  The result has the shape and dtype of x.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``nn.InstanceNorm3d``.  By default there
            are neither parameters nor running statistics.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0.  Activations without a parameter
            ignore it.

    Kept for backward: the output, 1 / sqrt(var + eps) of each channel of each sample, the parameters, the residual, and
    the normalised input of the kept channels (see ``InPlaceABN``).

    Falls back: an input that is neither contiguous nor channels_last is copied once.  A residual whose strides differ
    from those of the input is copied once too.  If ``num_features`` is not the input's number of channels, and there
    are neither parameters nor running statistics, the module only warns, as the stock modules do.  Input without a
    batch, (C, *spatial), is not supported, because its number of dimensions does not distinguish it from a batch.

    Raises:
        ValueError: the activation cannot be inverted (the error names the module that is exact for it); the input has
            another number of channels or dimensions; the statistics would be those of one spatial element; the input or
            the residual is unfit in another way (see ``functional.inplace_instance_norm_act``).
        TypeError: the input or the dtype is integer or complex.

    Source: Ulyanov et al., "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016.  Keeping the
    output: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceInstanceNormAct"
    EXACT = "InstanceNormAct"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
