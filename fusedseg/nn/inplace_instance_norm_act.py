"""``InPlaceInstanceNormAct``: InstanceNorm and activation in one module that keeps one tensor."""

import warnings

from torch import Tensor
from torch.nn.modules.instancenorm import _InstanceNorm

from .invertible import Invertible
from .norm_statistics import InstanceStatistics


class InPlaceInstanceNormAct(Invertible, InstanceStatistics, _InstanceNorm):
    """Instance normalisation and an invertible activation over (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions::

        nn.Sequential(nn.InstanceNorm3d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    whose two tensors kept for backward become one: the output.  ``state_dict``, and what is refused when one is loaded,
    are those of ``nn.InstanceNorm3d``.  channels_last(_3d) input needs no copy, of which the stock module makes two.

    Use it on a tensor that nobody else reads, such as a convolution's output, and use what it returns.

    ``forward(x, residual)`` adds the residual, of the shape of x, before the activation, as residual blocks do.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``nn.InstanceNorm3d``: neither parameters
            nor running statistics unless asked for.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; unused where there is none.

    Kept for backward: the output, 1 / sqrt(var + eps) of each channel of each sample, the parameters and the residual;
    and kept channels as ``InPlaceABN`` has them.

    Falls back: an input that is neither contiguous nor channels_last is copied once, and so is a residual of other
    strides than the input.  Where ``num_features`` is not the input's number of channels, and nothing depends on it,
    there is a warning, as in the stock modules.  Unbatched input, (C, *spatial), is not taken for what it is: its
    number of dimensions does not tell it from a batch.

    Raises:
        ValueError: an activation that cannot be inverted, naming the module that is exact for it; another number of
            channels or dimensions; statistics of one spatial element; an input or residual that is otherwise unfit
            (see ``functional.inplace_instance_norm_act``).
        TypeError: an integer or complex input or dtype.

    Source: Ulyanov et al., "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016; kept as in
    Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
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
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self._invert(act)

    def _check_shape(self, x: Tensor) -> None:
        channels = self.num_features
        if not isinstance(x, Tensor) or not 3 <= x.dim() <= 5:
            raise self._wrong_shape(x, f"(N, {channels}) with one to three spatial dimensions after it")
        if x.shape[1] == channels:
            return
        text = f"{self.OP}: input must have {channels} channels (num_features), got {tuple(x.shape)}"
        if self.affine or self.running_mean is not None:
            raise ValueError(text)
        # the caller of the module is that many calls away
        warnings.warn(f"{text}; it makes no difference, since affine is False", stacklevel=6)
