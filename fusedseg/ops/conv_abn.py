"""Convolution, BatchNorm and activation as one op: z = phi(weight * xhat + bias), xhat = (y - mean) * rstd,
y = conv(x, conv_weight).

Kept for backward: x, conv_weight, z, rstd, weight, bias and xhat of the kept channels; y is gone.  Backward is that of
``ops/inplace_abn.py``, which rebuilds dy from z, and ``aten.convolution_backward``.

In training the mean takes a convolution's bias along: it is left out of y, moves running_mean by momentum * conv_bias,
and its gradient is exactly zero.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import Activation
from . import conv_choice, inplace_abn
from .check import check_batch_norm
from .convolution import Geometry, check_convolution, convolve, convolve_backward, output_format
from .inplace_abn import InPlaceABNFunction, inplace_abn_backward_op, move_running, stats_dtype
from .kept import Kept
from .layout import dense, layout_of

OP = "fusedseg.conv_abn"


class Settings(NamedTuple):
    """What is no tensor."""

    geometry: Geometry
    training: bool
    momentum: float
    eps: float
    act: Activation
    kept: Kept | None
    conv_backend: str


def _forward_with(name, settings, x, w, conv_bias, weight, bias, running_mean, running_var):
    """z, mean, rstd, and xhat of the kept channels, the convolution being done by ``name``."""
    geometry, training, momentum, eps, act, kept, _ = settings
    if training:
        conv_bias = None
    if name == "aten":
        z, layout = dense(convolve(x, w, conv_bias, geometry))
        return z, *inplace_abn.forward(
            z, z, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept
        )
    from ..kernels.conv_abn import conv_abn_fwd

    x, x_layout = dense(x)
    shape = geometry.output_shape(x.shape, w.shape)
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, w))
    slots = None if kept is None else (kept.slots, kept.count)
    tf32 = x.dtype == torch.float32 and conv_choice.tf32_allowed()
    with torch.cuda.device_of(x):
        return z, *conv_abn_fwd(
            x, w, z, x_layout, layout_of(z), geometry, conv_bias, weight, bias, running_mean, running_var, training,
            momentum, eps, act, slots, tf32,
        )  # fmt: skip


def _forward(settings, x, w, conv_bias, weight, bias, running_mean, running_var):
    geometry, conv_backend = settings.geometry, settings.conv_backend
    shape = geometry.output_shape(x.shape, w.shape)
    name = "aten"
    if shape.numel():
        # what is measured moves no running statistics
        unmoved = (None, None) if settings.training else (running_mean, running_var)
        name = conv_choice.choose(
            OP, conv_backend, x, w, geometry, settings.training, shape.numel() // shape[1],
            lambda name: _forward_with(name, settings, x, w, conv_bias, weight, bias, *unmoved)[0],
        )  # fmt: skip
    return _forward_with(name, settings, x, w, conv_bias, weight, bias, running_mean, running_var)


class _Convolution(torch.autograd.Function):
    """All of the forward, but only the convolution's part of the graph: ``InPlaceABNFunction``, called next on what
    this returns, has the rest.  One node for both would hold dz, dy and dx at once in backward, two hold two each.
    """

    @staticmethod
    def forward(ctx, x, w, conv_bias, settings, norm, done):
        z, _, *done[:] = _forward(settings, x, w, conv_bias, *norm)
        running_mean = norm[2]
        if settings.training and conv_bias is not None and running_mean is not None:
            running_mean.add_(conv_bias, alpha=settings.momentum)
        ctx.geometry, ctx.training = settings.geometry, settings.training
        ctx.save_for_backward(x, w)
        return z

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        dx, dw, dbias = convolve_backward(dy, x, w, ctx.geometry, (need_x, need_w, need_bias and not ctx.training))
        if need_bias and ctx.training:
            dbias = dy.new_zeros(w.shape[0])
        return dx, dw, dbias, None, None, None


@torch.library.custom_op("fusedseg::conv_abn", mutates_args=())
def conv_abn_op(
    x: Tensor,
    w: Tensor,
    conv_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    eps: float,
    activation: str,
    activation_param: float,
    slots: Tensor | None,
    kept_count: int,
    conv_backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The functional op: z, statistics (2, K) -- mean, rstd -- and xhat of the kept channels (flat, empty if none).

    ``mean`` and ``var`` None: those of the batch, of the convolution without its bias.
    """
    kept = None if slots is None else Kept(slots, kept_count)
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    settings = Settings(geometry, mean is None, 0.0, eps, Activation(activation, activation_param), kept, conv_backend)
    z, used, rstd, xhat_kept = _forward(settings, x, w, conv_bias, weight, bias, mean, var)
    if mean is not None:
        used = mean.to(rstd.dtype)
    return z, torch.stack([used, rstd]), x.new_empty(0) if xhat_kept is None else xhat_kept


@conv_abn_op.register_fake
def _(x, w, conv_bias, weight, bias, mean, var, stride, padding, dilation, groups, eps, activation, activation_param,
      slots, kept_count, conv_backend):  # fmt: skip
    shape = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups).output_shape(x.shape, w.shape)
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, w))
    kept = x.new_empty(z.numel() // shape[1] * kept_count if slots is not None else 0)
    return z, x.new_empty((2, shape[1]), dtype=stats_dtype(x)), kept


def _op_setup_context(ctx, inputs, output):
    x, w, conv_bias, weight, bias, mean, _, *rest = inputs
    stride, padding, dilation, groups, _, activation, activation_param, slots, kept_count, _ = rest
    z, stats, xhat_kept = output
    ctx.mark_non_differentiable(stats, xhat_kept)
    ctx.training, ctx.activation, ctx.kept_count = mean is None, (activation, activation_param), kept_count
    ctx.geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    ctx.conv_bias_dtype = None if conv_bias is None else conv_bias.dtype
    ctx.save_for_backward(x, w, z, weight, bias, stats, xhat_kept, slots)


def _op_backward(ctx, dz, *unused):
    x, w, z, weight, bias, stats, xhat_kept, slots = ctx.saved_tensors
    need_x, need_w, need_conv_bias, need_weight, need_bias = ctx.needs_input_grad[:5]
    dy, dweight, dbias = inplace_abn_backward_op(
        dz, z, weight, bias, stats, xhat_kept, slots, ctx.kept_count, ctx.training, *ctx.activation,
        need_weight or need_bias,
    )  # fmt: skip
    dx, dw, dconv_bias = convolve_backward(
        dy, x, w, ctx.geometry, (need_x, need_w, need_conv_bias and not ctx.training)
    )
    if need_conv_bias and ctx.training:
        dconv_bias = z.new_zeros(w.shape[0], dtype=ctx.conv_bias_dtype)
    dweight, dbias = dweight if need_weight else None, dbias if need_bias else None
    return dx, dw, dconv_bias, dweight, dbias, *(None,) * 12


conv_abn_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def check(
    x: Tensor,
    w: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    training: bool,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    check_convolution(OP, x, w, conv_bias, geometry)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    shape = geometry.output_shape(x.shape, w.shape)
    check_batch_norm(OP, vectors, training, shape, x.dtype, x.device, "the convolution's output")


def autocast(x: Tensor, w: Tensor, conv_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """As a stock convolution would take them."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.float64 in (x.dtype, w.dtype):
        return x, w, conv_bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), w.to(dtype), None if conv_bias is None else conv_bias.to(dtype)


def conv_abn(
    x: Tensor,
    w: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
) -> Tensor:
    """The op on checked arguments."""
    geometry, training, momentum, eps, act, kept, conv_backend = settings
    if not torch.compiler.is_compiling():
        norm = (weight, bias, running_mean, running_var)
        # rstd, and xhat of the kept channels: what the second node keeps beside z
        done: list[Tensor | None] = []
        z = _Convolution.apply(x, w, conv_bias, settings, tuple(None if t is None else t.detach() for t in norm), done)
        return InPlaceABNFunction.apply(z, *norm, training, momentum, eps, act, kept, done)
    stride, padding, dilation, groups = geometry
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    mean, var = (None, None) if training else (running_mean, running_var)
    z, stats, _ = conv_abn_op(
        x, w, conv_bias, weight, bias, mean, var, stride, padding, dilation, groups, eps, act.name, act.param,
        slots, count, conv_backend,
    )  # fmt: skip
    if training and running_mean is not None and running_var is not None:
        move_running(stats, z.numel() // z.shape[1], running_mean, running_var, momentum, eps)
        if conv_bias is not None:
            with torch.no_grad():
                running_mean.add_(conv_bias, alpha=momentum)
    return z
