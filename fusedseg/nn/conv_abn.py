"""The module of convolution, BatchNorm and activation as one op."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..activation import Activation
from ..ops import conv_abn as op
from ..ops.conv_choice import check_conv_backend
from ..ops.join_conv import autocast
from ..ops.sources import Source, concatenated, padded, parse_sources, shape_of
from .inplace_abn import InPlaceABN
from .join_conv import JoinConv2d, JoinConv3d, arguments_of
from .leaf import as_leaf, proxy_in
from .unscriptable import Unscriptable


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def activation_module(act: Activation) -> nn.Module:
    if act.name == "leaky_relu":
        return nn.LeakyReLU(act.param, inplace=True)
    return nn.ELU(act.param, inplace=True) if act.name == "elu" else nn.Identity()


def convolved_and_normalised(
    name: str, conv: nn.Conv2d | nn.Conv3d, norm: InPlaceABN, sources: tuple[Source, ...], conv_backend: str = "auto"
) -> Tensor:
    """``norm(conv(...))`` of the sources as one op, which calls neither module."""
    sources, geometry = padded(name, sources, *arguments_of(conv))
    sources, weight, bias = autocast(sources, conv.weight, conv.bias)
    batch_stats, running_mean, running_var, momentum = norm._statistics()
    norms = (running_mean, running_var, norm.weight, norm.bias)
    op.check(sources, weight, bias, *norms, geometry, batch_stats, conv_backend)
    kept = norm._kept_now(weight.dtype)
    settings = op.Settings(geometry, batch_stats, momentum, norm.eps, norm._act, kept, conv_backend)
    z = op.conv_abn(sources, weight, bias, *norms, settings)
    norm._count_batch()
    return z


class _ConvABN(Unscriptable, nn.Module):
    # nn.Conv2d or nn.Conv3d, whose signatures differ in the lengths of tuples
    conv_class: Any
    # convolves as conv_class does
    join_class: Any
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
        conv_backend: str = "auto",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        check_conv_backend(self._name(), conv_backend)
        conv = self.conv_class(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode,
            device=device, dtype=dtype,
        )  # fmt: skip
        norm = InPlaceABN(
            out_channels, eps, momentum, affine, track_running_stats, activation, activation_param,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._adopt(conv, norm, conv_backend)

    @classmethod
    def _name(cls) -> str:
        return f"fusedseg.{cls.__name__}"

    def _adopt(self, conv: nn.Conv2d | nn.Conv3d, norm: InPlaceABN, conv_backend: str) -> None:
        self.conv, self.norm, self.conv_backend = conv, norm, conv_backend

    def forward(self, x: Source | Sequence[Source]) -> Tensor:
        if proxy_in(x) is not None:
            return as_leaf(self, x)
        name, conv, norm = self._name(), self.conv, self.norm
        sources = parse_sources(name, x)
        shape = shape_of(sources)
        if len(shape) != self.dims + 2:
            raise ValueError(
                f"{name}: input must have shape (N, C) with {self.dims} spatial dimensions after it, got {tuple(shape)}"
            )
        if not self._is_fused():
            y = conv(concatenated(sources))
            # hooks of backward hand on a view that must not be written over
            return norm(y.clone() if conv._backward_hooks or conv._backward_pre_hooks else y)
        return convolved_and_normalised(name, conv, norm, sources, self.conv_backend)

    def _is_fused(self) -> bool:
        """Not where a child was replaced, or has hooks that want to see it called."""
        conv, norm = self.conv, self.norm
        if type(conv) not in (self.conv_class, self.join_class) or type(norm) is not InPlaceABN:
            return False
        return not (has_hooks(conv) or has_hooks(norm))

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
        conv_backend: str = "auto",
    ):
        """One module with the very parameters and buffers of ``conv`` and ``bn``, a stock convolution and BatchNorm.

        ``Sequential(conv, bn, activation)`` and the result are the same function.  Optimizers of both keep working.

        Raises:
            TypeError: ``conv`` or ``bn`` is another kind of module, or has hooks, which the fused op would not call.
            ValueError: they do not fit together, or an activation that cannot be inverted.
        """
        name = f"{cls._name()}.from_modules"
        check_conv_backend(name, conv_backend)
        if type(conv) is not cls.conv_class:
            raise TypeError(f"{name}: conv must be an nn.{cls.conv_class.__name__}, got {type(conv).__name__}")
        for what, child in (("conv", conv), ("bn", bn)):
            if has_hooks(child):
                raise TypeError(f"{name}: {what} must have no hooks, since the fused op would not call them")
        norm = InPlaceABN.from_batchnorm(bn, activation, activation_param)
        if norm.num_features != conv.out_channels:
            raise ValueError(f"{name}: bn must have {conv.out_channels} features, as conv has, got {norm.num_features}")
        return cls._of(conv, norm, conv_backend)

    @classmethod
    def _of(cls, conv: nn.Conv2d | nn.Conv3d, norm: InPlaceABN, conv_backend: str = "auto"):
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._adopt(conv, norm, conv_backend)
        return made.train(norm.training)

    def to_modules(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        """The convolution, ``nn.BatchNorm`` and activation, with this module's very parameters and buffers."""
        if type(self.norm) is not InPlaceABN:
            raise TypeError(f"{self._name()}.to_modules: norm must be an InPlaceABN, got {type(self.norm).__name__}")
        return self.conv, self.norm.to_batchnorm(self.dims), activation_module(self.norm._act)


DOC = """Convolution, batch normalisation and an invertible activation as one op.

    Equals::

        nn.Sequential(nn.Conv{dims}d(C, K, kernel_size, ...), nn.BatchNorm{dims}d(K), nn.LeakyReLU(0.01))

    whose three tensors kept for backward (the input, the convolution's output, the result) become two: the input and
    the result, which is the next module's input.  The children are ``conv``, an ``nn.Conv{dims}d``, and ``norm``, an
    ``InPlaceABN``: a state dict of the ``Sequential`` fits with ``0.`` renamed to ``conv.`` and ``1.`` to ``norm.``.

    On a GPU a Triton kernel may convolve: its epilogue leaves the statistics of what it stores, so that training reads
    the convolution's output once less; in eval mode it normalises and activates before it stores anything.  In
    eval mode, in fp32 and fp64, the vendor's convolution gets a weight scaled by the norm, where the weight is smaller
    than the output: equal up to rounding.

    Shapes: (N, C, {sizes}) to (N, K, {out_sizes}), in fp16, bf16, fp32 or fp64; channels_last where the input or the
    weight is.  The input may be a sequence of tensors, which stands for their concatenation along the channels, and any
    of them an ``functional.Interpolated``: neither the concatenation nor the enlarged tensor is kept, and a large one
    is not formed: each source is convolved with its part of the weight.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode: as in
            ``nn.Conv{dims}d``.  In training the mean takes a bias along: its gradient is exactly zero.
        eps, momentum, affine, track_running_stats, activation, activation_param: as in ``InPlaceABN``.
        conv_backend: "aten", the vendor's convolution; "triton"; or "auto", which takes Triton where that can win
            (tensor cores, no groups, at least 16 input channels, channels_last or 1x1; one tap, or up to 128 input
            channels) and was found to, by a measurement of both at the first call of such a shape, on that GPU.  The
            measurement takes a second output's memory for a moment; ``functional.save_conv_choices`` keeps what it
            found.  Where deterministic algorithms are asked for, "auto" is "aten".  fp32 takes TF32 where a stock
            convolution would.
        device, dtype: of parameters and buffers.

    Kept for backward: the input and the weight, the output, 1 / sqrt(var + eps), the norm's parameters, and what
    ``InPlaceABN`` keeps of channels with a tiny weight.  Under autocast the weight itself, which backward casts again.

    Falls back to ``norm(conv(x))``, which keeps the same bytes: a child that was replaced by a module of another class,
    or has hooks.  A padding mode other than zeros pads in a step of its own, as the stock module does, and "same" with
    an even kernel likewise: there a concatenation is formed, and the padded tensor is kept.

    Raises:
        ValueError: an input of another number of channels or dimensions, or too small for the kernel; groups that do
            not divide the channels; one value per channel in training; an activation that cannot be inverted.
        TypeError: an integer or complex input, or one of another dtype than the weight.
        RuntimeError: ``conv_backend="triton"`` where the kernel cannot serve (another device, fp64).

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
