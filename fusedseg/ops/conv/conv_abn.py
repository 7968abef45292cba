"""Convolution, BatchNorm and activation as one op: z = phi(weight * xhat + bias), xhat = (y - mean) * rstd,
y = conv(x, conv_weight).

Kept for backward: x, conv_weight, z, rstd, weight, bias and xhat of the kept channels; y is freed.  Backward first runs
that of ``ops/norm/op.py``, which rebuilds dy from z, and then ``aten.convolution_backward``.

In training the norm subtracts the mean, which contains the bias of the convolution.  Therefore the bias is left out of
y, it moves running_mean by momentum * conv_bias, and its gradient is exactly zero.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...activation import Activation
from .. import unfused
from ..cast import uncast
from ..device import device_of
from ..double_backward import differentiated_once
from ..layout import dense, layout_of
from ..norm import op as norm_op
from ..norm.aten_output import activate_
from ..norm.checks import check_norm
from ..norm.kept import Kept
from ..norm.spec import Normalised, Passed, Spec, move_running, stats_dtype
from . import choice, join_conv
from .convolution import Geometry, convolve_backward, output_format
from .sources import (
    Source,
    concatenated,
    convolve_sources,
    convolve_sources_backward,
    enlarges_of,
    is_tensor,
    shape_of,
    sources_of,
    tensors_of,
)

OP = "fusedseg.conv_abn"
IDENTITY = Activation("identity", 0.0)


class Settings(NamedTuple):
    """The arguments of the op that are not tensors."""

    geometry: Geometry
    training: bool
    momentum: float
    eps: float
    act: Activation
    kept: Kept | None
    conv_backend: str

    @property
    def norm(self) -> Spec:
        """The norm behind the convolution."""
        return Spec("output", self.act, eps=self.eps, momentum=self.momentum, own=self.training)


def _forward_with(name, settings, sources, w, conv_bias, weight, bias, running_mean, running_var):
    """z, mean, rstd, and xhat of the kept channels; backend ``name`` computes the convolution."""
    geometry, training, momentum, eps, act, kept, _ = settings
    if training:
        conv_bias = None
    if name == "aten":
        if not training and kept is None and _folds(sources, w, geometry):
            return _folded(settings, sources, w, conv_bias, weight, bias, running_mean, running_var)
        z, layout = dense(convolve_sources(sources, w, conv_bias, geometry))
        passed = Passed(z, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
        found = norm_op.forward(passed, settings.norm, layout, kept, z)
        return z, found.mean, found.second, found.xhat
    from ...kernels.conv_abn import conv_abn_fwd

    x, x_layout = dense(*sources)
    shape = geometry.output_shape(x.shape, w.shape)
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, w))
    slots = None if kept is None else (kept.slots, kept.count)
    tf32 = x.dtype == torch.float32 and choice.tf32_allowed()
    with device_of(x):
        return z, *conv_abn_fwd(
            x, w, z, x_layout, layout_of(z), geometry, conv_bias, weight, bias, running_mean, running_var, training,
            momentum, eps, act, slots, tf32,
        )  # fmt: skip


def _folds(sources, w, geometry):
    """Whether the norm is folded into the weight in eval mode.

    It is not in half precision, where the scaled weight would be rounded once more.  Nor is it if the weight is larger
    than the result, because scaling the result is cheaper then.
    """
    wide = w.dtype in (torch.float32, torch.float64)
    return wide and w.numel() <= geometry.output_shape(shape_of(sources), w.shape).numel()


def _folded(settings, sources, w, conv_bias, weight, bias, running_mean, running_var):
    """``_forward_with`` in eval mode: a convolution with a scaled weight, and the activation over its output."""
    rstd = torch.rsqrt(running_var + settings.eps)
    scale = rstd if weight is None else weight * rstd
    shift = -running_mean if conv_bias is None else conv_bias - running_mean
    shift = shift * scale if bias is None else torch.addcmul(bias, shift, scale)
    z = convolve_sources(sources, w * scale.view(-1, *(1,) * (w.dim() - 1)), shift, settings.geometry)
    return activate_(dense(z)[0], settings.act), running_mean, rstd, None


def _forward(settings, sources, w, conv_bias, weight, bias, running_mean, running_var):
    """``_forward_with``, with the backend that ``choice.py`` chooses."""
    name = "aten"
    if is_tensor(sources) and choice.is_open(settings.conv_backend, sources[0]):
        x, geometry = sources[0], settings.geometry
        shape = geometry.output_shape(x.shape, w.shape)
        if shape.numel():
            # The measurement must not move the running statistics.
            unmoved = (None, None) if settings.training else (running_mean, running_var)
            name = choice.choose(
                OP, settings.conv_backend, x, w, geometry, settings.training, shape.numel() // shape[1],
                lambda name: _forward_with(name, settings, sources, w, conv_bias, weight, bias, *unmoved)[0],
            )  # fmt: skip
    return _forward_with(name, settings, sources, w, conv_bias, weight, bias, running_mean, running_var)


def _step(settings, sources, w, conv_bias, norm):
    """z, rstd, and xhat of the kept channels; moves the running statistics."""
    z, _, rstd, xhat_kept = _forward(settings, sources, w, conv_bias, *norm)
    running_mean = norm[2]
    # An empty batch moves no running statistics.
    if settings.training and conv_bias is not None and running_mean is not None and z.numel():
        running_mean.add_(conv_bias, alpha=settings.momentum)
    return z, rstd, xhat_kept


class _Convolution(torch.autograd.Function):
    """The whole forward, but only the convolution's part of backward.

    ``NormFunction`` is called on the result, and has the norm's part of backward.  With one node for both parts,
    backward would hold dz, dy and dx at once; each of the two nodes holds only two of them.
    """

    @staticmethod
    def forward(ctx, arguments, w, conv_bias, *tensors):
        settings, norm, done, enlarges = arguments
        sources = sources_of(tensors, enlarges)
        z, *done[:] = _step(settings, sources, w, conv_bias, norm)
        ctx.geometry, ctx.training, ctx.enlarges, ctx.dtype = settings.geometry, settings.training, enlarges, w.dtype
        ctx.save_for_backward(uncast(w), *tensors)
        return z

    @staticmethod
    def backward(ctx, dy):
        w, *tensors = ctx.saved_tensors
        need_w, need_bias, *needs = ctx.needs_input_grad[1:]
        args = (
            dy,
            sources_of(tensors, ctx.enlarges),
            w.to(ctx.dtype),
            ctx.geometry,
            (need_w, need_bias and not ctx.training, *needs),
        )
        dw, dbias, *dtensors = differentiated_once(OP, convolve_sources_backward, *args)
        if need_bias and ctx.training:
            dbias = dy.new_zeros(w.shape[0])
        return None, dw, dbias, *dtensors


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
    """The functional op: returns z, statistics (2, K) with mean and rstd, and xhat of the kept channels.

    xhat is flat, and empty without kept channels.  If ``mean`` and ``var`` are None, the op takes the statistics of the
    batch, of the convolution without its bias.
    """
    kept = None if slots is None else Kept(slots, kept_count)
    geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    settings = Settings(geometry, mean is None, 0.0, eps, Activation(activation, activation_param), kept, conv_backend)
    z, used, rstd, xhat_kept = _forward(settings, (x,), w, conv_bias, weight, bias, mean, var)
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
    ctx.training, ctx.activation, ctx.kept_count = mean is None, Activation(activation, activation_param), kept_count
    ctx.geometry = Geometry(tuple(stride), tuple(padding), tuple(dilation), groups)
    ctx.conv_bias_dtype = None if conv_bias is None else conv_bias.dtype
    ctx.save_for_backward(x, w, z, weight, bias, stats, xhat_kept, slots)


def _op_backward(ctx, dz, *unused):
    x, w, z, weight, bias, stats, xhat_kept, slots = ctx.saved_tensors
    need_x, need_w, need_conv_bias, need_weight, need_bias = ctx.needs_input_grad[:5]
    spec = norm_op.flat(Spec("output", ctx.activation, own=ctx.training))
    dy, dweight, dbias, _, _ = norm_op.norm_backward_op(
        dz, z, weight, bias, None, None, stats, xhat_kept, slots, ctx.kept_count, need_weight or need_bias, False, *spec
    )
    dx, dw, dconv_bias = convolve_backward(
        dy, x, w, ctx.geometry, (need_x, need_w, need_conv_bias and not ctx.training)
    )
    if need_conv_bias and ctx.training:
        dconv_bias = z.new_zeros(w.shape[0], dtype=ctx.conv_bias_dtype)
    dweight, dbias = dweight if need_weight else None, dbias if need_bias else None
    return dx, dw, dconv_bias, dweight, dbias, *(None,) * 12


conv_abn_op.register_autograd(_op_backward, setup_context=_op_setup_context)


def check(
    sources: Sequence[Source],
    w: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    geometry: Geometry,
    training: bool,
    conv_backend: str,
) -> None:
    """Raises ValueError or TypeError if the arguments do not fit the op."""
    shape = join_conv.check(OP, sources, w, conv_bias, geometry)
    if conv_backend == "triton" and not is_tensor(sources):
        raise ValueError(
            f"{OP}: conv_backend 'triton' takes one tensor; use 'auto' or 'aten' for several or Interpolated"
        )
    # for the names of the vectors alone: the convolution's output is not there yet
    passed = Passed(w, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    check_norm(OP, passed, Spec("output", IDENTITY, own=training), shape, w, "the convolution's output")


def conv_abn(
    sources: tuple[Source, ...],
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
    norm = (weight, bias, running_mean, running_var)

    def passed_with(y: Tensor) -> Passed:
        return Passed(y, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)

    if unfused.wanted():
        y = unfused.convolution(concatenated(sources), w, conv_bias, geometry)
        return unfused.norm_act(passed_with(y), settings.norm)
    if not torch.compiler.is_compiling():
        if not torch.is_grad_enabled():
            return _step(settings, sources, w, conv_bias, norm)[0]
        # The first node fills this list with rstd and xhat of the kept channels, which the second node keeps beside z.
        done: list[Tensor | None] = []
        arguments = settings, norm, done, enlarges_of(sources)
        z = _Convolution.apply(arguments, w, conv_bias, *tensors_of(sources))
        return norm_op.after_convolution(passed_with(z), settings.norm, kept, done)
    moved = conv_bias if training and running_mean is not None and shape_of(sources)[0] else None
    if not is_tensor(sources):
        # The compiler traces these stock functions, and decides itself how much of the concatenation to form.
        y = convolve_sources(sources, w, None if training else conv_bias, geometry)
        z = norm_op.normalise(passed_with(y), settings.norm, kept)
    else:
        stride, padding, dilation, groups = geometry
        slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
        mean, var = (None, None) if training else (running_mean, running_var)
        z, stats, _ = conv_abn_op(
            sources[0], w, conv_bias, weight, bias, mean, var, stride, padding, dilation, groups, eps, act.name,
            act.param, slots, count, conv_backend,
        )  # fmt: skip
        if training:
            found = Normalised(z, *stats)
            move_running(passed_with(z), settings.norm, found, z.numel() // z.shape[1])
    if moved is not None and running_mean is not None:
        with torch.no_grad():
            running_mean.add_(moved, alpha=momentum)
    return z
