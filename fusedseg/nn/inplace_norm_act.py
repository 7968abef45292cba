"""``InPlaceABN``, ``InPlaceInstanceNormAct`` and ``InPlaceGroupNormAct``: norm and activation that keep one tensor.

Their base class ``Invertible`` finds the kept channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from .._torch import assume_constant_result
from ..activation import parse_invertible
from ..ops import unfused
from ..ops.norm.kept import Kept, KeptChannels, serve_compiled_code, watch
from ..ops.norm.stock import BATCH_NORM, GROUP_NORM, INSTANCE_NORM
from .stock_norm import OfBatch, StockNorm


class Invertible(StockNorm):
    """A base class that stands before a stock norm, which brings ``weight`` and ``bias``."""

    KEEP = "output"
    # The module that errors recommend if an activation cannot be inverted.
    EXACT: str

    def __init__(self, *stock: object, activation: str, activation_param: float, **options: Any) -> None:
        act = parse_invertible(self.OP, activation, activation_param, self.EXACT)
        super().__init__(*stock, **options)
        self.activation = act.name
        self.activation_param = act.param
        self._act = act
        self._kept = KeptChannels()
        # Compiled code reads these two attributes, and refresh_kept() sets them.
        self._kept_count = 0
        self._kept_slots: Tensor | None = None
        # The dtype of the output, and whether a residual is added to it.
        self._kept_as = torch.float32, False
        watch(self)

    @classmethod
    def from_norm(cls, norm: nn.Module, activation: str = "leaky_relu", activation_param: float = 0.01) -> Any:
        """Makes a module that shares the parameters and buffers of the stock ``norm``.

        ``Sequential(norm, activation)`` and the result are the same function.  Optimizers of ``norm`` keep working.

        Raises:
            TypeError: ``norm`` is not one of the stock norms that the module stands for.
            ValueError: the activation cannot be inverted.
        """
        return cls._from_stock(norm, activation=activation, activation_param=activation_param)

    def _kept_now(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, residual: bool) -> Kept | None:
        """The kept channels of an output of this dtype; None if there are none, or if no backward will follow."""
        if not torch.is_grad_enabled() or unfused.wanted():
            return None
        if not torch.compiler.is_compiling():
            return self._kept.refresh(weight, bias, self._act, dtype, residual)
        self._trace_kept(dtype, residual)
        return None if self._kept_slots is None else Kept(self._kept_slots, self._kept_count)

    @assume_constant_result
    def _trace_kept(self, dtype: torch.dtype, residual: bool) -> bool:
        """Finds the kept channels for compiled code; it runs once, while the forward is traced."""
        self._kept_as = dtype, residual
        serve_compiled_code()
        self.refresh_kept()
        return True

    def refresh_kept(self) -> None:
        """Finds the kept channels for compiled code.

        After an optimizer's step, and after a state dict was loaded, this is called automatically.  Call it yourself
        after you change the parameters of a compiled model in another way.
        """
        kept = self._kept.refresh(self.weight, self.bias, self._act, *self._kept_as)
        self._kept_slots, self._kept_count = (None, 0) if kept is None else (kept.slots, kept.count)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._parameters_replaced()
        return self

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._parameters_replaced()

    def _parameters_replaced(self) -> None:
        self._kept.forget()
        self.refresh_kept()

    def _replicate_for_data_parallel(self):
        # The replica has parameters on another GPU, and needs a list there.
        replica = super()._replicate_for_data_parallel()
        replica._kept = KeptChannels()
        return replica

    def __setstate__(self, state) -> None:
        super().__setstate__(state)
        watch(self)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self._act}"


class InPlaceABN(Invertible, OfBatch, _BatchNorm):
    """Batch normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions, or none::

        nn.Sequential(
            nn.BatchNorm2d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01)
        )

    The stock modules keep two tensors for backward; this module keeps one, the output.  The ``state_dict`` has the
    names and shapes of ``nn.BatchNorm2d``.  So its checkpoints load with ``strict=True``, and give the same function
    for any weight, also if the weight is negative, tiny or zero.

    Use it on a tensor that no other code reads, such as a convolution's output, and use the returned tensor.

    ``forward(x, residual)`` adds the residual before the activation, as residual blocks do.

    Shapes: x and the residual have one shape, in fp16, bf16, fp32 or fp64.  The result has the shape and dtype of x.

    Args:
        num_features: the number of channels.
        eps, momentum, affine, track_running_stats: as in ``nn.BatchNorm2d``.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; for ``nn.ELU()`` pass 1.0.
            Activations without a parameter ignore it.
        bias, device, dtype: as in ``nn.BatchNorm2d``.

    Kept for backward: the output, 1 / sqrt(var + eps), the parameters, the residual, and the normalised input of some
    channels.  These are the channels whose weight is too small, compared with the bias or the residual, to rebuild the
    normalised input from the output (see ``functional.inplace_abn``).  On a GPU the list of these channels is updated
    after an optimizer's step without making the host wait, so it may lag behind by one step.  Loading a state dict or
    changing the parameters in place refreshes the list at once; changes through ``.data`` are not noticed.  A captured
    CUDA graph keeps the list that was valid when it was captured.

    Under ``torch.utils.checkpoint`` the running statistics move once; those of ``nn.BatchNorm2d`` move twice.

    Falls back: an input that is neither contiguous nor channels_last is copied once, and so is a residual whose strides
    differ from those of the input.  ``momentum=None`` breaks the graph under ``torch.compile``, as in
    ``nn.BatchNorm2d``.

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
    KIND = BATCH_NORM
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


class InPlaceInstanceNormAct(Invertible, _InstanceNorm):
    """Instance normalisation and an invertible activation over (N, C, *spatial), written over the input.

    Equals, for one to three spatial dimensions::

        nn.Sequential(
            nn.InstanceNorm3d(C, eps, momentum, affine, track_running_stats), nn.LeakyReLU(0.01)
        )

    The ``state_dict``, and the errors while one is loaded, are those of ``nn.InstanceNorm3d``.  Input in
    channels_last(_3d) is not copied, while the stock module copies it twice.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype, bias: as in ``nn.InstanceNorm3d``.
        activation, activation_param: see ``InPlaceABN``.

    By default there are neither parameters nor running statistics.

    If ``num_features`` is not the input's number of channels, and there are neither parameters nor running statistics,
    the module only warns, as the stock modules do.  Input without a batch, (C, *spatial), is not supported, because its
    number of dimensions does not distinguish it from a batch.

    ``InPlaceABN`` describes its use, the residual, the shapes, the tensors kept for backward, of which 1 / sqrt(var +
    eps) is one for each channel of each sample, the fallbacks and the errors.

    Raises:
        ValueError: the statistics would be those of one spatial element.

    Source: Ulyanov et al., "Instance Normalization: The Missing Ingredient for Fast Stylization", 2016.  Keeping the
    output: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceInstanceNormAct"
    KIND = INSTANCE_NORM
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


class InPlaceGroupNormAct(Invertible, nn.GroupNorm):
    """Group normalisation and an invertible activation over (N, C) or (N, C, *spatial), written over the input.

    Equals::

        nn.Sequential(nn.GroupNorm(num_groups, C, eps, affine), nn.LeakyReLU(0.01))

    The ``state_dict`` has the names and shapes of ``nn.GroupNorm``.

    Args:
        num_groups, num_channels, eps, affine, device, dtype, bias: as in ``nn.GroupNorm``.
        activation, activation_param: see ``InPlaceABN``.

    ``InPlaceABN`` describes its use, the residual, the shapes, the tensors kept for backward, of which 1 / sqrt(var +
    eps) is one for each group of each sample, the fallbacks and the errors.

    Raises:
        ValueError: the groups do not divide the channels, or the input is one sample whose groups have one value.

    Source: Wu and He, "Group Normalization", ECCV 2018.  Keeping the output: Rota Bulo et al., "In-Place Activated
    BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """

    OP = "fusedseg.InPlaceGroupNormAct"
    KIND = GROUP_NORM
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
