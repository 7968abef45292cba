"""In-place activated BatchNorm with the statistics of all processes of a group: ``sync.py``, and all else, what is kept
too, is ``inplace_abn.py``.

Eager calls go through ``InPlaceABNSyncFunction``; under ``torch.compile`` the functional op
``fusedseg::inplace_abn_sync`` runs, which has its collective within.
"""

import torch
from torch import Tensor

from ..activation import Activation
from . import double_backward, inplace_abn_aten, reuse
from .check import check_input, check_parameters, check_residual, check_writable
from .double_backward import differentiated_once
from .inplace_abn import backward, dparam_dtype_of, forward, stats_dtype
from .kept import Kept
from .layout import dense, layout_of, like
from .recompute import recipes
from .sync import Joint, exchange, joint_moments, move_running

OP = "fusedseg.inplace_abn_sync"


def _forward(x, out, layout, weight, bias, eps, act, kept, residual, group) -> tuple[Joint, Tensor | None]:
    """The statistics of all, and xhat of the kept channels."""
    # before anything is written: a collective that fails leaves all as it was
    joint = joint_moments(x, layout, group)
    args = x, out, layout, weight, bias, joint.mean, joint.var, False, 0.0, eps, act, kept, residual
    return joint, forward(*args)[2]


def _backward(dz, z, layout, weight, bias, rstd, xhat_kept, kept, share, group, act, dparam_dtype, into, residual,
              residual_wanted):  # fmt: skip
    exchanged = exchange(share, group)
    if z.numel() == 0:
        # the others wait for this one
        exchanged(torch.zeros_like(rstd), torch.zeros_like(rstd))
    args = dz, z, layout, weight, bias, rstd, xhat_kept, kept, True, act, dparam_dtype, into, residual
    return backward(*args, residual_wanted, exchanged)


class InPlaceABNSyncFunction(torch.autograd.Function):
    """Keeps what ``InPlaceABNFunction`` keeps, and the share of its values in those of all processes, (C,)."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings, residual=None):
        running_mean, running_var, momentum, eps, act, kept, group = settings
        out, layout = dense(x)
        if residual is not None:
            residual = like(residual, out)
        joint, xhat_kept = _forward(out, out, layout, weight, bias, eps, act, kept, residual, group)
        move_running(joint, running_mean, running_var, momentum)
        if out is x:
            ctx.mark_dirty(x)
        ctx.layout, ctx.act, ctx.kept, ctx.group, ctx.reuse = layout, act, kept, group, reuse.wanted()
        ctx.save_for_backward(out, weight, bias, torch.rsqrt(joint.var + eps), xhat_kept, residual, joint.share)
        return out

    @staticmethod
    def backward(ctx, dz):
        z, weight, bias, rstd, xhat_kept, residual, share = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = dparam_dtype_of(weight, bias, needs[1] or needs[2])
        into = reuse.take(z, dz) if ctx.reuse and not torch.is_grad_enabled() else None
        args = (dz, z, ctx.layout, weight, bias, rstd, xhat_kept, ctx.kept, share, ctx.group, ctx.act, wanted, into)
        dx, dweight, dbias, dresidual = differentiated_once(
            OP, _backward, *args, residual, residual is not None and needs[4]
        )
        return dx, dweight if needs[1] else None, dbias if needs[2] else None, None, dresidual


@torch.library.custom_op("fusedseg::inplace_abn_sync", mutates_args=())
def inplace_abn_sync_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    activation_param: float,
    slots: Tensor | None,
    kept_count: int,
    group: str,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The functional op: z, what ``Joint`` has in one tensor (4, C), and xhat of the kept channels (flat, empty if
    none)."""
    source, layout = dense(x)
    z = torch.empty_like(source)
    kept = None if slots is None else Kept(slots, kept_count)
    act = Activation(activation, activation_param)
    residual = None if residual is None else like(residual, z)
    joint, xhat_kept = _forward(source, z, layout, weight, bias, eps, act, kept, residual, group)
    return z, torch.stack(joint), x.new_empty(0) if xhat_kept is None else xhat_kept


@inplace_abn_sync_op.register_fake
def _(x, weight, bias, eps, activation, activation_param, slots, kept_count, group, residual=None):
    C = x.shape[1]
    return (
        torch.empty_like(dense(x)[0]),
        x.new_empty((4, C), dtype=stats_dtype(x)),
        x.new_empty(x.numel() // C * kept_count if slots is not None else 0),
    )


@torch.library.custom_op("fusedseg::inplace_abn_sync_backward", mutates_args=())
def inplace_abn_sync_backward_op(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    joint: Tensor,
    xhat_kept: Tensor,
    eps: float,
    activation: str,
    activation_param: float,
    slots: Tensor | None,
    kept_count: int,
    group: str,
    affine_wanted: bool,
    residual: Tensor | None = None,
    residual_wanted: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dweight, dbias, dresidual; as ``fusedseg::inplace_abn_backward``."""
    kept = None if slots is None else Kept(slots, kept_count)
    _, _, var, share = joint
    residual = None if residual is None else like(residual, z)
    dx, dweight, dbias, dresidual = _backward(
        dz, z, layout_of(z), weight, bias, torch.rsqrt(var + eps), None if kept is None else xhat_kept, kept, share,
        group, Activation(activation, activation_param), dparam_dtype_of(weight, bias, affine_wanted), None, residual,
        residual_wanted and activation != "identity",
    )  # fmt: skip
    return dx, *(z.new_empty(0) if v is None else v for v in (dweight, dbias, dresidual))


@inplace_abn_sync_backward_op.register_fake
def _(dz, z, weight, bias, joint, xhat_kept, eps, activation, activation_param, slots, kept_count, group, affine_wanted,
      residual=None, residual_wanted=False):  # fmt: skip
    C = z.shape[1] if affine_wanted else 0
    dtype = dparam_dtype_of(weight, bias, affine_wanted) or z.dtype
    dresidual = torch.empty_like(z) if residual_wanted and activation != "identity" else z.new_empty(0)
    return torch.empty_like(z), z.new_empty(C, dtype=dtype), z.new_empty(C, dtype=dtype), dresidual


def _op_setup_context(ctx, inputs, output):
    _, weight, bias, eps, activation, activation_param, slots, kept_count, group, residual = inputs
    z, joint, xhat_kept = output
    ctx.mark_non_differentiable(joint, xhat_kept)
    ctx.constants, ctx.kept_count, ctx.group = (eps, activation, activation_param), kept_count, group
    ctx.save_for_backward(z, weight, bias, joint, xhat_kept, slots, residual)


def _op_backward(ctx, dz, *unused):
    z, weight, bias, joint, xhat_kept, slots, residual = ctx.saved_tensors
    needs = ctx.needs_input_grad
    residual_wanted = residual is not None and needs[9]
    dx, dweight, dbias, dresidual = inplace_abn_sync_backward_op(
        dz, z, weight, bias, joint, xhat_kept, *ctx.constants, slots, ctx.kept_count, ctx.group, needs[1] or needs[2],
        residual, residual_wanted,
    )  # fmt: skip
    if residual_wanted:
        dresidual = dz if ctx.constants[1] == "identity" else dresidual
    else:
        dresidual = None
    return dx, dweight if needs[1] else None, dbias if needs[2] else None, *(None,) * 6, dresidual


inplace_abn_sync_op.register_autograd(_op_backward, setup_context=_op_setup_context)
inplace_abn_sync_backward_op.register_autograd(double_backward.refusing(OP))


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    check_input(OP, x)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_parameters(OP, vectors, x.shape[1], x.dtype, x.device)
    if residual is not None:
        check_residual(OP, residual, x)
    if not torch.compiler.is_compiling():
        check_writable(OP, x)


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    act: Activation,
    kept: Kept | None,
    group: str,
    residual: Tensor | None = None,
) -> Tensor:
    """The op on checked arguments, with the statistics of the batches of all processes of the group of that name."""
    if residual is not None:
        residual = inplace_abn_aten.cast(residual, x.dtype)
    if not torch.compiler.is_compiling():
        settings = running_mean, running_var, momentum, eps, act, kept, group
        recipes.changing(x)
        return InPlaceABNSyncFunction.apply(x, weight, bias, settings, residual)
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    z, joint, _ = inplace_abn_sync_op(x, weight, bias, eps, act.name, act.param, slots, count, group, residual)
    move_running(Joint(*joint), running_mean, running_var, momentum)
    return z
