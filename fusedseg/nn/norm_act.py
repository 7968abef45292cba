"""``BatchNormAct``, ``InstanceNormAct`` and ``GroupNormAct``: a norm, a residual and any activation, exactly."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ..activation import TABLE, check_slope_given, parse_activation
from ..ops.norm.stock import BATCH_NORM, GROUP_NORM, INSTANCE_NORM
from .stock_norm import OfBatch, StockNorm


class _NormAct(StockNorm):
    """The base class of the three modules: it has the activation and its slope."""

    KEEP = "input"
    slope: nn.Parameter | None

    def __init__(
        self,
        *stock: object,
        activation: str,
        activation_param: float | str | None,
        num_slopes: int,
        device: torch.device | str | int | None,
        dtype: torch.dtype | None,
        **options: Any,
    ) -> None:
        act = parse_activation(self.OP, activation, activation_param)
        super().__init__(*stock, device=device, dtype=dtype, **options)
        self.activation, self._act = activation, act
        learned, channels = TABLE[act.name].learned, getattr(self, self.KIND.channels)
        if num_slopes not in (1, channels):
            raise ValueError(
                f"{self.OP}: num_slopes must be 1 or the number of channels, {channels}, got {num_slopes!r}"
            )
        if not learned and num_slopes != 1:
            raise ValueError(
                f"{self.OP}: num_slopes must be 1 for activation {activation!r}, which has no learned slopes, "
                f"got {num_slopes!r}"
            )
        self.register_parameter("slope", None)
        if learned:
            self.slope = nn.Parameter(torch.full((num_slopes,), act.param, device=device, dtype=dtype))

    def _slope(self) -> Tensor | None:
        return self.slope

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        # PyTorch's constructor calls this method before there is a slope.
        slope = self._parameters.get("slope")
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
        """Makes a module that shares the parameters and buffers of the stock ``norm``.

        For activation "prelu", ``slope`` is the ``weight`` of an ``nn.PReLU``, which is shared too.  Optimizers of
        these parameters keep working.

        Raises:
            ValueError: ``slope`` is given for another activation, or missing for "prelu"; the activation is unknown.
            TypeError: ``norm`` is not one of the stock norms that the module stands for.
        """
        name = f"{cls.OP}.from_norm"
        check_slope_given(name, parse_activation(name, activation, activation_param), slope)
        num_slopes = 1 if slope is None else slope.numel()
        options = {"activation": activation, "activation_param": activation_param, "num_slopes": num_slopes}
        made = cls._from_stock(norm, **options)
        if slope is not None:
            made.slope = slope
        return made


class BatchNormAct(_NormAct, OfBatch, _BatchNorm):
    """Batch normalisation, an optional residual and any activation over (N, C) or (N, C, *spatial).

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(
            nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01)
        )

    With a residual it equals ``F.leaky_relu(bn(x) + residual, 0.01)``.  Without a GPU, on aten, outputs and running
    statistics have the same bits.  The ``state_dict`` has the names and shapes of ``nn.BatchNorm2d``, so its
    checkpoints load with ``strict=True``; for prelu it also has the learned ``slope``.

    Args:
        num_features: the number of channels.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``.
        activation: the name of an activation, one of ``fusedseg.activation.NAMES``.
        activation_param: the negative slope of leaky_relu (None means 0.01), the alpha of elu (None means 1), the
            initial slope of prelu (None means 0.25), or the approximation of gelu, "none" or "tanh" (None means
            "none").  It must be None for activations without a parameter.
        num_slopes: the number of slopes of prelu, 1 or C, as in ``nn.PReLU``.
        bias, device, dtype: as in ``nn.BatchNorm2d``.

    Shapes: x and ``residual`` have one shape, in fp16, bf16, fp32 or fp64.  The result has the shape, dtype and memory
    format of x.  x and ``residual`` are not changed.

    Kept for backward: x, mean, 1 / sqrt(var + eps), the parameters, and the residual if there is an activation.  The
    output is rebuilt from them.  A convolution that follows still keeps the output, because it is the convolution's
    input; ``torch.compile`` with ``backend="fusedseg"`` rebuilds it there too.

    Falls back: an input that is neither contiguous nor channels_last is copied once.  A residual whose strides differ
    from those of x is copied once too.  ``momentum=None`` breaks the graph under ``torch.compile``, as in
    ``nn.BatchNorm2d``.

    The module is an instance of ``torch.nn.modules.batchnorm._BatchNorm``, so that ``torch.optim.swa_utils.update_bn``
    and FSDP find it.

    Raises:
        ValueError: the activation is unknown, or has no parameter and one is given; the input has another number of
            channels or dimensions, or one value per channel in training; the residual has another shape or device.
        TypeError: the input or the dtype is integer or complex; ``activation_param`` is not a number; the residual has
            another dtype than x, outside autocast.
        RuntimeError: backward itself is differentiated; or ``nn.SyncBatchNorm.convert_sync_batchnorm`` was called on
            the module, which would replace it by a norm without an activation; call ``fusedseg.convert_sync`` instead.

    Source: Ioffe and Szegedy, "Batch Normalization", ICML 2015.
    """

    OP = "fusedseg.BatchNormAct"
    KIND = BATCH_NORM

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        num_slopes: int = 1,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, num_slopes=num_slopes, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip


class InstanceNormAct(_NormAct, _InstanceNorm):
    """Instance normalisation, an optional residual and any activation over (N, C, *spatial).

    Equals, for one to three spatial dimensions::

        nn.Sequential(
            nn.InstanceNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01)
        )

    With a residual it equals ``F.leaky_relu(norm(x) + residual, 0.01)``.  The ``state_dict`` has the names and shapes
    of ``nn.InstanceNorm2d``.  An image without a batch is not supported, because its shape does not show that; pass
    ``x[None]``.  An input in channels_last gives an output in channels_last; the stock module copies it.
    Without parameters and running statistics, another number of channels than ``num_features`` only gives a warning, as
    in the stock module.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as in ``nn.InstanceNorm2d``.
        activation, activation_param, num_slopes, bias, device, dtype: see ``BatchNormAct``.

    By default there are neither parameters nor running statistics.  Running statistics, if there are any, are used in
    eval mode.

    ``BatchNormAct`` describes the shapes, the tensors kept for backward, the fallbacks and the errors.

    Raises:
        ValueError: there is a single position per channel, and the statistics are those of x.

    Source: Ulyanov, Vedaldi and Lempitsky, "Instance Normalization", 2016.
    """

    OP = "fusedseg.InstanceNormAct"
    KIND = INSTANCE_NORM

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        *,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        num_slopes: int = 1,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, activation=activation,
            activation_param=activation_param, num_slopes=num_slopes, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip


class GroupNormAct(_NormAct, nn.GroupNorm):
    """Group normalisation, an optional residual and any activation over (N, C) or (N, C, *spatial).

    Equals, ``state_dict`` included::

        nn.Sequential(nn.GroupNorm(num_groups, num_channels, eps, affine), nn.LeakyReLU(0.01))

    With a residual it equals ``F.leaky_relu(norm(x) + residual, 0.01)``.  Under autocast the result has the dtype of x,
    unlike the result of the stock module.

    Args:
        num_groups, num_channels, eps, affine: as in ``nn.GroupNorm``.
        activation, activation_param, num_slopes, bias, device, dtype: see ``BatchNormAct``.

    ``BatchNormAct`` describes the shapes, the tensors kept for backward, the fallbacks and the errors.

    Raises:
        ValueError: ``num_groups`` does not divide the channels, or the input is one sample whose groups have one value.

    Source: Wu and He, "Group Normalization", ECCV 2018.
    """

    OP = "fusedseg.GroupNormAct"
    KIND = GROUP_NORM

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        *,
        activation: str = "leaky_relu",
        activation_param: float | str | None = None,
        num_slopes: int = 1,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_groups, num_channels, eps, affine, activation=activation,
            activation_param=activation_param, num_slopes=num_slopes, bias=bias, device=device, dtype=dtype,
        )  # fmt: skip
