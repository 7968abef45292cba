"""``InPlaceGroupNormAct``: GroupNorm and activation in one module that keeps one tensor."""

import torch
from torch import nn

from .invertible import Invertible
from .norm_statistics import GroupStatistics


class InPlaceGroupNormAct(Invertible, GroupStatistics, nn.GroupNorm):
    """Group normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals::

        nn.Sequential(nn.GroupNorm(num_groups, C, eps, affine), nn.LeakyReLU(0.01))

    The stock modules keep two tensors for backward; this module keeps one, the output.  The ``state_dict`` has the
    names and shapes of ``nn.GroupNorm``.

    Use it on a tensor that no other code reads, such as a convolution's output, and use the returned tensor.

    ``forward(x, residual)`` adds the residual before the activation, as residual blocks do.

    Shapes: x and the residual have one shape, in fp16, bf16, fp32 or fp64.  The result has the shape and dtype of x.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``nn.GroupNorm``.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0.  Activations without a parameter
            ignore it.

    Kept for backward: the output, 1 / sqrt(var + eps) of each group of each sample, the parameters, the residual, and
    the normalised input of the kept channels (see ``InPlaceABN``).

    Falls back: an input that is neither contiguous nor channels_last is copied once.  A residual whose strides differ
    from those of the input is copied once too.

    Raises:
        ValueError: the activation cannot be inverted (the error names the module that is exact for it); the groups do
            not divide the channels; the input has another number of channels, or is one sample whose groups have one
            value; the input or the residual is unfit in another way (see ``functional.inplace_group_norm_act``).
        TypeError: the input or the dtype is integer or complex.

    Source: Wu and He, "Group Normalization", ECCV 2018.  Keeping the output: Rota Bulo et al., "In-Place Activated
    BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceGroupNormAct"
    EXACT = "GroupNormAct"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_groups, num_channels, eps, affine, activation=activation, activation_param=activation_param, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
