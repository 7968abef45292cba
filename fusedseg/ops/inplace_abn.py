"""In-place activated normalisation: z = phi(weight * (x - mean) * rstd + bias [+ residual]), written over x.

``groups`` says whose mean and variance: None, of a channel over the batch (BatchNorm); else of so many groups of
channels of each sample (GroupNorm; as many as channels: InstanceNorm).

Source: Rota Bulo, Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm and kept channels (``ops/kept.py``), for
other statistics and residuals too.

Eager calls go through ``InPlaceABNFunction``, which overwrites x.  Autograd cannot be registered on an op that
mutates its input, so under ``torch.compile`` the functional op ``fusedseg::inplace_abn`` runs; x is freed there
because nobody saves it.
"""

import torch
from torch import Tensor

from .. import _backend
from ..activation import Activation
from . import by_sample_aten, double_backward, inplace_abn_aten, reuse, unfused
from .check import check_batch_norm, check_input, check_residual, check_writable
from .device import device_of
from .double_backward import differentiated_once
from .kept import Kept
from .layout import dense, layout_of, like
from .recompute import recipes

OP = "fusedseg.inplace_abn"


def stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept, residual=None):
    """Mean and rstd, (C,) or one for each group of each sample; and xhat of the kept channels, flat, or None."""
    if x.numel() == 0:
        return *torch.zeros(2, layout.I * layout.C // layout.D, dtype=stats_dtype(x), device=x.device), None
    if layout.I * layout.D > 1 and running_mean is not None:
        # moved by the average of the samples
        unmoved = (None, None, True, 0.0, eps, act, kept, residual)
        mean, rstd, xhat_kept = forward(x, out, layout, weight, bias, *unmoved)
        move_running(torch.stack([mean, rstd]), layout.N * layout.S, running_mean, running_var, momentum, eps)
        return mean, rstd, xhat_kept
    args = (x, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act)
    if not _backend.use_triton(x):
        if layout.I > 1:
            return by_sample_aten.forward(x, out, layout, weight, bias, eps, act, kept, residual)
        return inplace_abn_aten.forward(*args, kept, residual)
    from ..kernels.norm_act import norm_act_fwd

    with device_of(x):
        return norm_act_fwd(*args, None if kept is None else (kept.slots, kept.count), residual=residual)


def backward(
    dz, z, layout, weight, bias, rstd, xhat_kept, kept, training, act, dparam_dtype, into=None, residual=None,
    residual_wanted=False, exchange=None,
):  # fmt: skip
    """dx, dweight, dbias, dresidual: None where ``dparam_dtype`` is, or where it is not wanted.  ``into``: memory for
    dx, that of z.  ``residual`` lies in memory as z does.  ``exchange``: called with s1 and s2, gives those to use."""
    if z.numel() == 0:
        # two allocations: an op's outputs must not share memory
        zeros = (None if dparam_dtype is None else rstd.new_zeros(z.shape[1], dtype=dparam_dtype) for _ in range(2))
        return torch.empty_like(z), *zeros, torch.empty_like(z) if residual_wanted else None
    # g itself is dz where nothing is between them
    passed_on = residual_wanted and act.name == "identity"
    dresidual = torch.empty_like(z) if residual_wanted and not passed_on else None
    args = (like(dz, z), z, layout, weight, bias, rstd, xhat_kept)
    if not _backend.use_triton(z):
        if layout.I > 1:
            grads = by_sample_aten.backward(*args, kept, act, dparam_dtype, into, residual, dresidual)
        else:
            rest = into, residual, dresidual, exchange
            grads = inplace_abn_aten.backward(*args, kept, training, act, dparam_dtype, *rest)
    else:
        from ..kernels.norm_act_bwd import norm_act_bwd, norm_act_bwd_exchanged

        slots = None if kept is None else (kept.slots, kept.count)
        also = {"residual": residual, "dresidual": dresidual}
        with device_of(z):
            if exchange is None:
                grads = norm_act_bwd(*args, slots, training, act, dparam_dtype, into, **also)
            else:
                grads = norm_act_bwd_exchanged(*args, slots, act, dparam_dtype, exchange, into, **also)
    return *grads, dz if passed_on else dresidual


def dparam_dtype_of(weight: Tensor | None, bias: Tensor | None, needed: bool) -> torch.dtype | None:
    if not needed:
        return None
    return (weight if weight is not None else bias).dtype  # type: ignore[union-attr]


class InPlaceABNFunction(torch.autograd.Function):
    """Keeps z (the output), rstd, weight, bias, xhat of the kept channels and the residual.

    ``settings``: what else ``inplace_abn`` is given, in one tuple since autograd looks at every argument.
    ``done``: rstd and that xhat, where x is the output already, as a convolution has left it.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, settings, done=None, residual=None, groups=None):
        running_mean, running_var, training, momentum, eps, act, kept = settings
        out, layout = dense(x)
        if groups is not None:
            layout = layout.by_sample(x.shape[0], groups)
        if residual is not None:
            residual = like(residual, out)
        if done is not None:
            rstd, xhat_kept = done
        else:
            _, rstd, xhat_kept = forward(
                out, out, layout, weight, bias, running_mean, running_var, training, momentum, eps, act, kept, residual
            )
        if out is x:
            ctx.mark_dirty(x)
        ctx.layout, ctx.training, ctx.act, ctx.kept = layout, training, act, kept
        ctx.reuse = reuse.wanted()
        ctx.save_for_backward(out, weight, bias, rstd, xhat_kept, residual)
        return out

    @staticmethod
    def backward(ctx, dz):
        z, weight, bias, rstd, xhat_kept, residual = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = dparam_dtype_of(weight, bias, needs[1] or needs[2])
        into = reuse.take(z, dz) if ctx.reuse and not torch.is_grad_enabled() else None
        args = (dz, z, ctx.layout, weight, bias, rstd, xhat_kept, ctx.kept, ctx.training, ctx.act, wanted, into)
        dx, dweight, dbias, dresidual = differentiated_once(
            OP, backward, *args, residual, residual is not None and needs[5]
        )
        return dx, dweight if needs[1] else None, dbias if needs[2] else None, None, None, dresidual, None


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
    residual: Tensor | None = None,
    groups: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The functional op: z, statistics (2, C), or (2, N groups) -- mean, rstd -- and xhat of the kept channels (flat,
    empty if none).

    ``mean`` and ``var`` None: those of ``x``.
    """
    source, layout = dense(x)
    layout = layout.by_sample(x.shape[0], groups)
    z = torch.empty_like(source)
    kept = None if slots is None else Kept(slots, kept_count)
    act = Activation(activation, activation_param)
    residual = None if residual is None else like(residual, z)
    used, rstd, xhat_kept = forward(
        source, z, layout, weight, bias, mean, var, mean is None, 0.0, eps, act, kept, residual
    )
    if mean is not None:
        used = mean.to(rstd.dtype)
    return z, torch.stack([used, rstd]), x.new_empty(0) if xhat_kept is None else xhat_kept


@inplace_abn_op.register_fake
def _(x, weight, bias, mean, var, eps, activation, activation_param, slots, kept_count, residual=None, groups=None):
    C = x.shape[1]
    return (
        torch.empty_like(dense(x)[0]),
        x.new_empty((2, C if groups is None else x.shape[0] * groups), dtype=stats_dtype(x)),
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
    residual: Tensor | None = None,
    groups: int | None = None,
    residual_wanted: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias, dresidual; all but the first are empty where they are not wanted, the last also where it is
    dz itself, behind "identity"."""
    kept = None if slots is None else Kept(slots, kept_count)
    act = Activation(activation, activation_param)
    wanted = dparam_dtype_of(weight, bias, affine_wanted)
    saved = (weight, bias, stats[1], None if kept is None else xhat_kept, kept)
    residual = None if residual is None else like(residual, z)
    layout = layout_of(z)
    assert layout is not None
    dx, dweight, dbias, dresidual = backward(
        dz, z, layout.by_sample(z.shape[0], groups), *saved, training, act, wanted, None, residual,
        residual_wanted and activation != "identity",
    )  # fmt: skip
    dresidual = z.new_empty(0) if dresidual is None else dresidual
    if dweight is None or dbias is None:
        return dx, z.new_empty(0), z.new_empty(0), dresidual
    return dx, dweight, dbias, dresidual


@inplace_abn_backward_op.register_fake
def _(dz, z, weight, bias, stats, xhat_kept, slots, kept_count, training, activation, activation_param, affine_wanted,
      residual=None, groups=None, residual_wanted=False):  # fmt: skip
    C = z.shape[1] if affine_wanted else 0
    dtype = dparam_dtype_of(weight, bias, affine_wanted) or z.dtype
    dresidual = torch.empty_like(z) if residual_wanted and activation != "identity" else z.new_empty(0)
    return torch.empty_like(z), z.new_empty(C, dtype=dtype), z.new_empty(C, dtype=dtype), dresidual


def _op_setup_context(ctx, inputs, output):
    _, weight, bias, mean, _, _, activation, activation_param, slots, kept_count, residual, groups = inputs
    z, stats, xhat_kept = output
    ctx.mark_non_differentiable(stats, xhat_kept)
    ctx.training, ctx.activation, ctx.kept_count = mean is None, (activation, activation_param), kept_count
    ctx.groups = groups
    ctx.save_for_backward(z, weight, bias, stats, xhat_kept, slots, residual)


def _op_backward(ctx, dz, *unused):
    z, weight, bias, stats, xhat_kept, slots, residual = ctx.saved_tensors
    needs = ctx.needs_input_grad
    residual_wanted = residual is not None and needs[10]
    dx, dweight, dbias, dresidual = inplace_abn_backward_op(
        dz, z, weight, bias, stats, xhat_kept, slots, ctx.kept_count, ctx.training, *ctx.activation,
        needs[1] or needs[2], residual, ctx.groups, residual_wanted,
    )  # fmt: skip
    if residual_wanted:
        dresidual = dz if ctx.activation[0] == "identity" else dresidual
    else:
        dresidual = None
    return dx, dweight if needs[1] else None, dbias if needs[2] else None, *(None,) * 7, dresidual, None


inplace_abn_op.register_autograd(_op_backward, setup_context=_op_setup_context)
inplace_abn_backward_op.register_autograd(double_backward.refusing(OP))


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    residual: Tensor | None = None,
    groups: int | None = None,
    op: str = OP,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    check_input(op, x)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_batch_norm(op, vectors, training, x.shape, x.dtype, x.device, groups=groups)
    if residual is not None:
        check_residual(op, residual, x)
    if not torch.compiler.is_compiling():
        check_writable(op, x)


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
    residual: Tensor | None = None,
    groups: int | None = None,
) -> Tensor:
    """The op on checked arguments: overwrites ``x`` in eager mode, leaves it alone under ``torch.compile``."""
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
    if unfused.wanted():
        kind = "batch" if groups is None else "instance" if groups == x.shape[1] and x.dim() > 2 else "group"
        rest = weight, bias, running_mean, running_var, training, momentum, eps, act, residual
        return unfused.norm_act(x, kind, groups or 0, *rest)
    if not torch.compiler.is_compiling():
        recipes.changing(x)
        settings = running_mean, running_var, training, momentum, eps, act, kept
        if residual is None and groups is None:
            return InPlaceABNFunction.apply(x, weight, bias, settings)
        return InPlaceABNFunction.apply(x, weight, bias, settings, None, residual, groups)
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    mean, var = (None, None) if training else (running_mean, running_var)
    z, stats, _ = inplace_abn_op(x, weight, bias, mean, var, eps, act.name, act.param, slots, count, residual, groups)
    if training and running_mean is not None and running_var is not None:
        values = x.numel() // x.shape[1] if groups is None else x[0, 0].numel()
        move_running(stats, values if x.numel() else 0, running_mean, running_var, momentum, eps)
    return z


def move_running(stats: Tensor, m: int, running_mean: Tensor, running_var: Tensor, momentum: float, eps: float) -> None:
    """Moves the running statistics towards mean and rstd (2, C) of ``m`` values a channel, or towards the averages over
    samples of those of each sample (2, N C); no values move nothing."""
    if m == 0:
        return
    with torch.no_grad():
        mean, rstd = stats.view(2, -1, running_mean.shape[0])
        var = (rstd**-2 - eps).clamp_min(0.0) * (m / (m - 1))
        running_mean.lerp_(mean.mean(0).to(running_mean.dtype), momentum)
        running_var.lerp_(var.mean(0).to(running_var.dtype), momentum)
