"""``ConvABN2d`` and ``ConvABN3d``: convolution, BatchNorm and activation as one op."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _backend
from .._module_hooks import has_hooks, is_called_unseen
from ..activation import TABLE, Activation
from ..ops.check import check_choice
from ..ops.conv import conv_abn as op
from ..ops.conv.join_conv import prepared
from ..ops.conv.sources import Source, concatenated
from .inplace_norm_act import InPlaceABN
from .join_conv import JoinConv2d, JoinConv3d, geometry_of, sources_of_input
from .unscriptable import Unscriptable


def activation_module(act: Activation) -> nn.Module:
    """The stock module of an invertible activation.  All these modules have the option ``inplace``."""
    row = TABLE[act.name]
    if row.module is None:
        return nn.Identity()
    param = {} if row.parameter is None else {row.parameter.attribute: act.param}
    return row.module(**param, inplace=True)


class _ConvABN(Unscriptable, nn.Module):
    # nn.Conv2d or nn.Conv3d; typed Any, because their signatures differ in the lengths of tuples.
    conv_class: Any
    # JoinConv2d or JoinConv3d, which may take the place of conv_class.
    join_class: type[nn.Module]
    dims: int
    conv: nn.Conv2d | nn.Conv3d
    norm: InPlaceABN

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        conv_backend: _backend.Backend = "auto",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice(self._name(), "conv_backend", conv_backend, _backend.NAMES)
        conv = self.conv_class(
            in_channels, out_channels, kernel_size, stride=stride, padding=padding, dilation=dilation, groups=groups,
            bias=bias, padding_mode=padding_mode, device=device, dtype=dtype,
        )  # fmt: skip
        norm = InPlaceABN(
            out_channels, eps, momentum, affine=affine, track_running_stats=track_running_stats, activation=activation,
            activation_param=activation_param, device=device, dtype=dtype,
        )  # fmt: skip
        self._adopt(conv, norm, conv_backend)

    def _adopt(self, conv: nn.Conv2d | nn.Conv3d, norm: InPlaceABN, conv_backend: _backend.Backend) -> None:
        self.conv, self.norm, self.conv_backend = conv, norm, conv_backend

    def forward(self, x: Source | Sequence[Source]) -> Tensor:
        name, conv, norm = self._name(), self.conv, self.norm
        sources = sources_of_input(name, x, self.dims)
        if not is_called_unseen(conv, norm):
            # A hook may keep the output of the convolution, and backward hooks make it a view.
            return norm(conv(concatenated(sources)).clone())
        if type(conv) not in (self.conv_class, self.join_class) or type(norm) is not InPlaceABN:
            return norm(conv(concatenated(sources)))
        # The op does the work of both children, and calls neither.
        call = prepared(name, sources, conv.weight, conv.bias, geometry_of(conv))
        call = call._replace(conv_backend=self.conv_backend)
        given, of_norm = norm._call(call.w, None)
        op.check(call, given, of_norm)
        kept = norm._kept_now(norm.weight, norm.bias, call.w.dtype, False)
        return op.conv_abn(call, given, of_norm, kept)

    def extra_repr(self) -> str:
        return "" if self.conv_backend == "auto" else f"conv_backend={self.conv_backend}"

    @classmethod
    def from_modules(
        cls,
        conv: nn.Conv2d | nn.Conv3d,
        bn: nn.Module,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        *,
        conv_backend: _backend.Backend = "auto",
    ):
        """Makes one module that shares the parameters and buffers of ``conv`` and ``bn``.

        The result is the same function as ``Sequential(conv, bn, activation)``.  Optimizers of both keep working.

        Args:
            conv: a stock convolution.
            bn: a stock BatchNorm.
            activation, activation_param, conv_backend: as in the constructor.

        Raises:
            TypeError: ``conv`` or ``bn`` has another class, or has hooks, which the fused op would not call.
            ValueError: the numbers of channels differ, or the activation cannot be inverted.
        """
        name = f"{cls._name()}.from_modules"
        check_choice(name, "conv_backend", conv_backend, _backend.NAMES)
        if type(conv) is not cls.conv_class:
            raise TypeError(f"{name}: conv must be an nn.{cls.conv_class.__name__}, got {type(conv).__name__}")
        for what, child in (("conv", conv), ("bn", bn)):
            if has_hooks(child):
                raise TypeError(f"{name}: {what} must have no hooks, since the fused op would not call them")
        norm = InPlaceABN.from_norm(bn, activation, activation_param)
        if norm.num_features != conv.out_channels:
            raise ValueError(
                f"{name}: bn must have {conv.out_channels} features, one per output channel, got {norm.num_features}"
            )
        return cls._of(conv, norm, conv_backend)

    @classmethod
    def _of(cls, conv: nn.Conv2d | nn.Conv3d, norm: InPlaceABN, conv_backend: _backend.Backend = "auto"):
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._adopt(conv, norm, conv_backend)
        return made.train(norm.training)

    def to_modules(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The convolution, an ``nn.BatchNorm`` and the activation, which share this module's parameters and buffers.

        Raises:
            TypeError: the child ``norm`` was replaced by a module of another class.
        """
        if type(self.norm) is not InPlaceABN:
            raise TypeError(f"{self._name()}.to_modules: norm must be an InPlaceABN, got {type(self.norm).__name__}")
        return self.conv, self.norm.to_norm(self.dims), activation_module(self.norm._act)


DOC = """Convolution, batch normalisation and an invertible activation as one op.

    Equals::

        nn.Sequential(nn.Conv{dims}d(C, K, kernel_size, ...), nn.BatchNorm{dims}d(K), nn.LeakyReLU(0.01))

    The stock modules keep three tensors for backward: the input, the convolution's output and the result.  This module
    keeps two: the input, and the result, which is the next module's input.  The children are ``conv``, an
    ``nn.Conv{dims}d``, and ``norm``, an ``InPlaceABN``.  A state dict of the ``Sequential`` fits after ``0.`` is
    renamed to ``conv.`` and ``1.`` to ``norm.``.

    On a GPU a Triton kernel may convolve.  In training its epilogue computes the statistics of the output, so that the
    output is read once less.  In eval mode it normalises and activates the values before it stores them.  The vendor's
    convolution in eval mode, in fp32 and fp64, gets a weight that is scaled by the norm if the weight is smaller than
    the output; the result is equal up to rounding.

    Shapes: (N, C, {sizes}) to (N, K, {out_sizes}), in fp16, bf16, fp32 or fp64.  The output is channels_last if the
    input or the weight is.  A sequence of tensors as the input stands for their concatenation along the channels; any
    of them may be a ``functional.Interpolated``.  Neither the concatenation nor the interpolated tensor is kept.  A
    large one is not even formed, because each source is convolved with its part of the weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            ``nn.Conv{dims}d``.
        eps, momentum, affine, track_running_stats, activation, activation_param: as in ``InPlaceABN``.
        conv_backend: "aten" for the vendor's convolution, "triton" for the Triton kernel, or "auto".  "auto" measures
            both on this GPU at the first call with such a shape, and takes the faster one.  It measures only where the
            Triton kernel can win: tensor cores, no groups, at least 16 input channels, channels_last or 1x1, and one
            tap or up to 128 input channels; elsewhere it takes the vendor's.  The measurement needs the memory of a
            second output for a moment.  If deterministic algorithms are required, of all ops or of cuDNN,
            "auto" takes the vendor's.  It also does if the measurement fails, with a warning.  fp32
            takes TF32 where a stock convolution would.  Unless it is "aten", a second kernel may take the vendor's
            place, and compute the gradient of the input, where it was measured to be faster on this GPU: on Hopper, for
            3x3x3 taps with stride, padding and dilation 1 and 16 to 64 channels in steps of 16, in half precision and
            channels_last_3d.
        device, dtype: the device and dtype of parameters and buffers.

    In training the gradient of a convolution's bias is exactly zero, because the norm subtracts the mean, which
    contains the bias; in compiled code it is zero up to rounding, unless the backend "fusedseg" leaves the bias out.

    Kept for backward: the input, the weight, the output, 1 / sqrt(var + eps), the norm's parameters, and for channels
    with a tiny weight the tensors that ``InPlaceABN`` keeps.  Under autocast the weight itself is kept, and backward
    casts it again.

    It falls back to ``norm(conv(x))`` if a child was replaced by a module of another class, or has hooks or another
    ``forward``, and if there are global module hooks.  With a padding mode other than zeros, and with "same" and an
    even kernel, the input is padded in a separate step, as in the stock module; then a concatenation is formed, and the
    padded tensor is kept.

    Raises:
        ValueError: the input has another number of channels or dimensions, or is too small for the kernel; the groups
            do not divide the channels; there is one value per channel in training; the activation cannot be inverted.
        TypeError: the input is integer or complex, or has another dtype than the weight.
        RuntimeError: ``conv_backend="triton"``, and the kernel cannot serve the input (another device, fp64).

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018;
    statistics in the epilogue: Jung et al., "Restructuring Batch Normalization to Accelerate CNN Training", MLSys 2019.
    """


class ConvABN2d(_ConvABN):
    __doc__ = DOC.format(dims=2, sizes="H, W", out_sizes="OH, OW")
    conv_class = nn.Conv2d
    join_class = JoinConv2d
    dims = 2


class ConvABN3d(_ConvABN):
    __doc__ = DOC.format(dims=3, sizes="D, H, W", out_sizes="OD, OH, OW")
    conv_class = nn.Conv3d
    join_class = JoinConv3d
    dims = 3
