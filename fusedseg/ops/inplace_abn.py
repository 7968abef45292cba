"""In-place activated BatchNorm: z = phi(weight * (x - mean) * rstd + bias), written over x.

Source: Rota Bulo, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm and kept channels (``ops/kept.py``).

Eager calls go through ``InPlaceABNFunction``, which overwrites x.  Autograd cannot be registered on an op that
mutates its input, so under ``torch.compile`` the functional op ``fusedseg::inplace_abn`` runs; x is freed there
because nobody saves it.
"""

import torch
from torch import Tensor

from .. import _backend
from ..activation import Activation
from . import double_backward, inplace_abn_aten, reuse
from .check import check_batch_norm, check_input, check_writable
from .double_backward import differentiated_once
from .kept import Kept
from .layout import dense, layout_of, like

OP = "fusedseg.inplace_abn"


def stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept):
    """Mean and rstd, (C,) each; and xhat of the kept channels, flat, or None."""
    if x.numel() == 0:
        return *torch.zeros(2, x.shape[1], dtype=stats_dtype(x), device=x.device), None
    args = (x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act)
    if not _backend.use_triton(x):
        return inplace_abn_aten.forward(*args, kept)
    from ..kernels.norm_act import norm_act_fwd

    with torch.cuda.device_of(x):
        return norm_act_fwd(*args, None if kept is None else (kept.slots, kept.count))


def backward(dz, z, layout, weight, bias, rstd, xhat_kept, kept, training, act, dparam_dtype, into=None):
    """dx, dweight, dbias; the last two are None where ``dparam_dtype`` is.  ``into``: memory for dx, that of z."""
    if z.numel() == 0:
        zeros = None if dparam_dtype is None else rstd.new_zeros(z.shape[1], dtype=dparam_dtype)
        return torch.empty_like(z), zeros, zeros
    args = (like(dz, z), z, layout, weight, bias, rstd, xhat_kept)
    if not _backend.use_triton(z):
        return inplace_abn_aten.backward(*args, kept, training, act, dparam_dtype, into)
    from ..kernels.norm_act_bwd import norm_act_bwd

    slots = None if kept is None else (kept.slots, kept.count)
    with torch.cuda.device_of(z):
        return norm_act_bwd(*args, slots, training, act, dparam_dtype, into)


def dparam_dtype_of(weight: Tensor | None, bias: Tensor | None, needed: bool) -> torch.dtype | None:
    if not needed:
        return None
    return (weight if weight is not None else bias).dtype  # type: ignore[union-attr]


class InPlaceABNFunction(torch.autograd.Function):
    """Keeps z (the output), rstd, weight, bias and xhat of the kept channels.

    ``settings``: what else ``inplace_abn`` is given, in one tuple since autograd looks at every argument.
    ``done``: rstd and that xhat, where x is the output already, as a convolution has left it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, settings, done=None):
        running_mean, running_var, training, momentum, eps, act, kept = settings
        out, layout = dense(x)
        if done is not None:
            rstd, xhat_kept = done
        else:
            _, rstd, xhat_kept = forward(
                out, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept
            )
        if out is x:
            ctx.mark_dirty(x)
        ctx.layout, ctx.training, ctx.act, ctx.kept = layout, training, act, kept
        ctx.reuse = reuse.wanted()
        ctx.save_for_backward(out, weight, bias, rstd, xhat_kept)
        return out

    @staticmethod
    def backward(ctx, dz):
        z, weight, bias, rstd, xhat_kept = ctx.saved_tensors
        wanted = dparam_dtype_of(weight, bias, ctx.needs_input_grad[1] or ctx.needs_input_grad[2])
        into = reuse.take(z) if ctx.reuse and not torch.is_grad_enabled() else None
        args = (dz, z, ctx.layout, weight, bias, rstd, xhat_kept, ctx.kept, ctx.training, ctx.act, wanted, into)
        dx, dweight, dbias = differentiated_once(OP, backward, *args)
        dweight = dweight if ctx.needs_input_grad[1] else None
        dbias = dbias if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None


@torch.library.custom_op("fusedseg::inplace_abn", mutates_args=())
def inplace_abn_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
    activation: str,
    activation_param: float,
    slots: Tensor | None,
    kept_count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The functional op: z, statistics (2, C) -- mean, rstd -- and xhat of the kept channels (flat, empty if none).

    ``mean`` and ``var`` None: those of the batch.
    """
    source, layout = dense(x)
    z = torch.empty_like(source)
    kept = None if slots is None else Kept(slots, kept_count)
    act = Activation(activation, activation_param)
    used, rstd, xhat_kept = forward(source, z, layout, weight, bias, mean, var, mean is None, 0.0, eps, act, kept)
    if mean is not None:
        used = mean.to(rstd.dtype)
    return z, torch.stack([used, rstd]), x.new_empty(0) if xhat_kept is None else xhat_kept


@inplace_abn_op.register_fake
def _(x, weight, bias, mean, var, eps, activation, activation_param, slots, kept_count):
    C = x.shape[1]
    return (
        torch.empty_like(dense(x)[0]),
        x.new_empty((2, C), dtype=stats_dtype(x)),
        x.new_empty(x.numel() // C * kept_count if slots is not None else 0),
    )


@torch.library.custom_op("fusedseg::inplace_abn_backward", mutates_args=())
def inplace_abn_backward_op(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    xhat_kept: Tensor,
    slots: Tensor | None,
    kept_count: int,
    training: bool,
    activation: str,
    activation_param: float,
    affine_wanted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias; the last two are empty where they are not wanted."""
    kept = None if slots is None else Kept(slots, kept_count)
    act = Activation(activation, activation_param)
    wanted = dparam_dtype_of(weight, bias, affine_wanted)
    saved = (weight, bias, stats[1], None if kept is None else xhat_kept, kept)
    dx, dweight, dbias = backward(dz, z, layout_of(z), *saved, training, act, wanted)
    if dweight is None or dbias is None:
        return dx, z.new_empty(0), z.new_empty(0)
    return dx, dweight, dbias


@inplace_abn_backward_op.register_fake
def _(dz, z, weight, bias, stats, xhat_kept, slots, kept_count, training, activation, activation_param, affine_wanted):
    C = z.shape[1] if affine_wanted else 0
    dtype = dparam_dtype_of(weight, bias, affine_wanted) or z.dtype
    return torch.empty_like(z), z.new_empty(C, dtype=dtype), z.new_empty(C, dtype=dtype)


def _op_setup_context(ctx, inputs, output):
    _, weight, bias, mean, _, _, activation, activation_param, slots, kept_count = inputs
    z, stats, xhat_kept = output
    ctx.mark_non_differentiable(stats, xhat_kept)
    ctx.training, ctx.activation, ctx.kept_count = mean is None, (activation, activation_param), kept_count
    ctx.save_for_backward(z, weight, bias, stats, xhat_kept, slots)


def _op_backward(ctx, dz, *unused):
    z, weight, bias, stats, xhat_kept, slots = ctx.saved_tensors
    affine_wanted = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
    dx, dweight, dbias = inplace_abn_backward_op(
        dz, z, weight, bias, stats, xhat_kept, slots, ctx.kept_count, ctx.training, *ctx.activation, affine_wanted
    )
    dweight = dweight if ctx.needs_input_grad[1] else None
    dbias = dbias if ctx.needs_input_grad[2] else None
    return dx, dweight, dbias, *(None,) * 7


def _no_double_backward(ctx, *grads):
    raise RuntimeError(double_backward.message(OP))


inplace_abn_op.register_autograd(_op_backward, setup_context=_op_setup_context)
inplace_abn_backward_op.register_autograd(_no_double_backward)


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    check_input(OP, x)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_batch_norm(OP, vectors, training, x.shape, x.dtype, x.device)
    if not torch.compiler.is_compiling():
        check_writable(OP, x)


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    act: Activation,
    kept: Kept | None,
) -> Tensor:
    """The op on checked arguments: overwrites ``x`` in eager mode, leaves it alone under ``torch.compile``."""
    if not torch.compiler.is_compiling():
        settings = running_mean, running_var, training, momentum, eps, act, kept
        return InPlaceABNFunction.apply(x, weight, bias, settings)
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    mean, var = (None, None) if training else (running_mean, running_var)
    z, stats, _ = inplace_abn_op(x, weight, bias, mean, var, eps, act.name, act.param, slots, count)
    if training and running_mean is not None and running_var is not None:
        move_running(stats, x.numel() // x.shape[1], running_mean, running_var, momentum, eps)
    return z


def move_running(stats: Tensor, m: int, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> None:
    """Moves the running statistics towards mean and rstd (2, C) of ``m`` values a channel; no values move nothing."""
    if m == 0:
        return
    with torch.no_grad():
        var = (stats[1] ** -2 - eps).clamp_min(0.0) * (m / (m - 1))
        running_mean.lerp_(stats[0].to(running_mean.dtype), momentum)
        running_var.lerp_(var.to(running_var.dtype), momentum)
