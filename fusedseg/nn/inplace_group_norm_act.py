"""``InPlaceGroupNormAct``: GroupNorm and activation in one module that keeps one tensor."""

from torch import Tensor, nn

from .invertible import Invertible
from .norm_statistics import GroupStatistics


class InPlaceGroupNormAct(Invertible, GroupStatistics, nn.GroupNorm):
    """Group normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals::

        nn.Sequential(nn.GroupNorm(num_groups, C, eps, affine), nn.LeakyReLU(0.01))

    whose two tensors kept for backward become one: the output.  ``state_dict`` is that of ``nn.GroupNorm``.

    Use it on a tensor that nobody else reads, such as a convolution's output, and use what it returns.

    ``forward(x, residual)`` adds the residual, of the shape of x, before the activation, as residual blocks do.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``nn.GroupNorm``.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; unused where there is none.

    Kept for backward: the output, 1 / sqrt(var + eps) of each group of each sample, the parameters and the residual;
    and kept channels as ``InPlaceABN`` has them.

    Falls back: an input that is neither contiguous nor channels_last is copied once, and so is a residual of other
    strides than the input.

    Raises:
        ValueError: an activation that cannot be inverted, naming the module that is exact for it; groups that do not
            divide the channels; another number of channels; groups of one value; an input or residual that is otherwise
            unfit (see ``functional.inplace_group_norm_act``).
        TypeError: an integer or complex input or dtype.

    Source: Wu and He, "Group Normalization", ECCV 2018; kept as in Rota Bulo et al., "In-Place Activated BatchNorm for
    Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceGroupNormAct"
    EXACT = "GroupNormAct"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device=None,
        dtype=None,
        *,
        bias: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
    ) -> None:
        act = self._parse(activation, activation_param, dtype)
        # stock modules of older versions know no bias
        options = {} if bias else {"bias": False}
        super().__init__(num_groups, num_channels, eps, affine, device, dtype, **options)
        self._invert(act)

    def _check_shape(self, x: Tensor) -> None:
        channels = self.num_channels
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] != channels:
            raise self._wrong_shape(x, f"(N, {channels}) or (N, {channels}, *spatial)")
