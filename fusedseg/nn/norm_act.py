"""``BatchNormAct``, ``InstanceNormAct``, ``GroupNormAct``: a norm, a residual and any activation, exactly."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from ..activation import TABLE, parse_activation
from ..ops.check import check_dtype
from .norm_statistics import BatchStatistics, GroupStatistics, InstanceStatistics
from .stock_norm import StockNorm


class _NormAct(StockNorm):
    """What the three have in common: the activation and its slope."""

    KEEP = "input"
    VECTORS = "weight", "bias", "slope"

    slope: nn.Parameter | None

    def _set_activation(
        self, activation: str, param: float | str | None, num_slopes: int, device: Any, dtype: Any
    ) -> None:
        """Called at the end of ``__init__``."""
        name, channels = self.OP, getattr(self, self.CHANNELS)
        if dtype is not None:
            check_dtype(name, "dtype", dtype)
        self._act = parse_activation(name, activation, param)
        self.activation = activation
        learned = TABLE[self._act.name].learned
        if num_slopes not in (1, channels):
            raise ValueError(f"{name}: num_slopes must be 1 or the number of channels, {channels}, got {num_slopes!r}")
        if not learned and num_slopes != 1:
            raise ValueError(f"{name}: num_slopes is of activation 'prelu' alone, got {num_slopes} for {activation!r}")
        self.register_parameter("slope", None)
        if learned:
            self.slope = nn.Parameter(torch.full((num_slopes,), self._act.param, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        slope = getattr(self, "slope", None)
        if slope is not None:
            nn.init.constant_(slope, self._act.param)

    def extra_repr(self) -> str:
        slopes = f", num_slopes={len(self.slope)}" if self.slope is not None and len(self.slope) > 1 else ""
        return f"{super().extra_repr()}, activation={self._act}{slopes}"

    @classmethod
    def from_norm(
        cls,
        norm: nn.Module,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        *,
        slope: nn.Parameter | None = None,
    ) -> Any:
        """A module with the very parameters and buffers of the stock ``norm``, and of activation "prelu" with the
        ``slope`` of an ``nn.PReLU`` (its ``weight``).  Optimizers keep working."""
        if (slope is not None) != (activation == "prelu"):
            raise ValueError(
                f"{cls.OP}.from_norm: slope must be given for activation 'prelu' and for no other, got {activation!r}"
            )
        num_slopes = 1 if slope is None else slope.numel()
        options = {"activation": activation, "activation_param": activation_param, "num_slopes": num_slopes}
        made = cls._from_stock(norm, **options)
        if slope is not None:
            made.slope = slope
        return made


class BatchNormAct(_NormAct, BatchStatistics, _BatchNorm):
    """Batch normalisation, an optional residual and any activation over (N, C) or (N, C, *spatial).

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    and with a residual ``F.leaky_relu(bn(x) + residual, 0.01)``; on aten, that is without a GPU, to the last bit.
    ``state_dict`` is that of ``nn.BatchNorm2d``, so its checkpoints load, strictly; a learned ``slope`` is added for
    prelu.

    Args:
        num_features: C.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``; ``momentum=None`` averages cumulatively.
        activation: the name of an activation, one of ``fusedseg.activation.NAMES``.
        activation_param: the negative slope of leaky_relu (None: 0.01), the alpha of elu (1), the initial slope of
            prelu (0.25), the approximation of gelu, "none" or "tanh" ("none"); None for the others.
        num_slopes: of prelu, 1 or C, as in ``nn.PReLU``.
        device, dtype: of parameters and buffers.

    Shapes: x and ``residual`` alike, in fp16, bf16, fp32 or fp64; the result too, in the memory format of x.  x and
    ``residual`` are left alone.

    Kept for backward: x, mean and 1 / sqrt(var + eps), the parameters; the residual, where there is an activation.  The
    output is rebuilt from them.  A convolution that follows keeps the output all the same, as its input: under
    ``fusedseg.recompute()`` it keeps a recipe instead.

    Falls back: an input that is neither contiguous nor channels_last is copied once, a residual of other strides than x
    likewise; ``momentum=None`` breaks the graph under ``torch.compile``, as in ``nn.BatchNorm2d``.

    It is a ``torch.nn.modules.batchnorm._BatchNorm``, as which ``torch.optim.swa_utils.update_bn`` and FSDP find it.

    Raises:
        ValueError: an unknown activation, or a parameter for one that has none; an input of another number of channels
            or dimensions, or one value per channel in training; a residual unlike x.
        TypeError: an integer or complex input or dtype, an ``activation_param`` that is no number.
        RuntimeError: in backward, when it is differentiated itself; from ``nn.SyncBatchNorm.convert_sync_batchnorm``,
            which would replace it by a norm without an activation: call ``fusedseg.convert_sync`` instead.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015; the name of ``inplace_abn``'s exact twin is ``ABN``.
    """

    OP = "fusedseg.BatchNormAct"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        *,
        num_slopes: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        _NormBase.__init__(self, num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._set_activation(activation, activation_param, num_slopes, device, dtype)


class InstanceNormAct(_NormAct, InstanceStatistics, _InstanceNorm):
    """Instance normalisation, an optional residual and any activation over (N, C, *spatial).

    Equals, for one to three spatial dimensions::

        nn.Sequential(nn.InstanceNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01))

    and with a residual ``F.leaky_relu(norm(x) + residual, 0.01)``; its ``state_dict`` too.  An image without a batch is
    not taken, since its shape does not tell: pass ``x[None]``.  channels_last is kept, where the stock module copies.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in ``nn.InstanceNorm2d``, so neither parameters nor
            running statistics by default; running ones, where there are any, are used in eval.
        activation, activation_param, num_slopes, device, dtype: see ``BatchNormAct``.

    Shapes, what is kept for backward, what falls back and what is raised: see ``BatchNormAct``; ValueError for a single
    position where statistics are those of x.

    Source: Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016.
    """

    OP = "fusedseg.InstanceNormAct"

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        *,
        num_slopes: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        _NormBase.__init__(self, num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._set_activation(activation, activation_param, num_slopes, device, dtype)


class GroupNormAct(_NormAct, GroupStatistics, nn.GroupNorm):
    """Group normalisation, an optional residual and any activation over (N, C) or (N, C, *spatial).

    Equals, ``state_dict`` included::

        nn.Sequential(nn.GroupNorm(num_groups, num_channels, eps, affine), nn.LeakyReLU(0.01))

    and with a residual ``F.leaky_relu(norm(x) + residual, 0.01)``.  Unlike the stock module's under autocast, the
    result has the dtype of x.

    Args:
        num_groups, num_channels, eps, affine: as in ``nn.GroupNorm``.
        activation, activation_param, num_slopes, device, dtype: see ``BatchNormAct``.

    Shapes, what is kept for backward, what falls back and what is raised: see ``BatchNormAct``; ValueError for
    ``num_groups`` that do not divide the channels, or one value per group.

    Source: Wu and He, "Group Normalization", ECCV 2018.
    """

    OP = "fusedseg.GroupNormAct"

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        *,
        num_slopes: int = 1,
        device=None,
        dtype=None,
    ) -> None:
        nn.GroupNorm.__init__(self, num_groups, num_channels, eps, affine, device=device, dtype=dtype)
        self._set_activation(activation, activation_param, num_slopes, device, dtype)


ABN = BatchNormAct
