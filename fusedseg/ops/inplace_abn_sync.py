"""In-place activated BatchNorm with the statistics of all processes of a group.

Forward: each finds (count, mean, M2) of its values, one all-gather brings together those of all, and each merges them
by Chan's formula in the order of the ranks.  Backward: the sums of g and g * xhat likewise.  All else is
``ops/inplace_abn.py``, and so is what is kept, beside the number of values of all processes.
"""

import torch
from torch import Tensor, distributed

from .. import _backend
from ..activation import Activation
from . import inplace_abn_aten, reuse
from .check import check_input, check_parameters, check_residual, check_writable
from .double_backward import differentiated_once
from .inplace_abn import backward, dparam_dtype_of, forward, stats_dtype
from .kept import Kept
from .layout import Layout, channel_view, dense, like

OP = "fusedseg.inplace_abn_sync"


def local_moments(x: Tensor, layout: Layout) -> Tensor:
    """(count, mean, M2) of parts of the values of this process: (parts, 3, C)."""
    acc = stats_dtype(x)
    if x.numel() == 0:
        return torch.zeros(1, 3, x.shape[1], dtype=acc, device=x.device)
    if _backend.use_triton(x):
        from ..kernels.norm_stats import few, norm_stats

        with torch.cuda.device_of(x):
            return few(norm_stats(x, layout), layout.C).transpose(0, 1)
    mean, var = inplace_abn_aten.moments(channel_view(x, layout), layout, acc)
    count = layout.N * layout.S
    return torch.stack([torch.full_like(mean, count), mean, var * count]).unsqueeze(0)


def merge(parts: Tensor) -> Tensor:
    """(count, mean, M2) of all of (parts, 3, C) together: (3, C)."""
    count, mean, m2 = parts.unbind(1)
    total = count.sum(0)
    joint = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, joint, (m2 + count * (mean - joint).square()).sum(0)])


def gather(t: Tensor, group) -> Tensor:
    """Those of all processes, along a new first dimension, in the order of their ranks."""
    gathered = t.new_empty(distributed.get_world_size(group) * t.numel())
    # PyTorch 2.13 renames it, and warns of the old name
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    all_gather(gathered, t.flatten(), group=group)
    return gathered.view(-1, *t.shape)


class InPlaceABNSyncFunction(torch.autograd.Function):
    """Keeps what ``InPlaceABNFunction`` keeps, and the share of its values in those of all processes, (C,)."""

    @staticmethod
    def forward(ctx, x, weight, bias, settings, residual=None):
        running_mean, running_var, momentum, eps, act, kept, group = settings
        out, layout = dense(x)
        if residual is not None:
            residual = like(residual, out)
        local = merge(local_moments(out, layout))
        # before anything is written: a collective that fails leaves all as it was
        total, mean, m2 = merge(gather(local, group))
        var = m2 / total.clamp(min=1)
        _, _, xhat_kept = forward(out, out, layout, weight, bias, mean, var, False, 0.0, eps, act, kept, residual)
        if running_mean is not None:
            # no values at all move nothing
            moved = (total > 0).to(running_mean.dtype) * momentum
            running_mean.lerp_(mean.to(running_mean.dtype), moved)
            running_var.lerp_((m2 / (total - 1).clamp(min=1)).to(running_var.dtype), moved)
        if out is x:
            ctx.mark_dirty(x)
        ctx.layout, ctx.act, ctx.kept, ctx.group, ctx.reuse = layout, act, kept, group, reuse.wanted()
        share = local[0] / total.clamp(min=1)
        ctx.save_for_backward(out, weight, bias, torch.rsqrt(var + eps), xhat_kept, residual, share)
        return out

    @staticmethod
    def backward(ctx, dz):
        z, weight, bias, rstd, xhat_kept, residual, share = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wanted = dparam_dtype_of(weight, bias, needs[1] or needs[2])
        into = reuse.take(z) if ctx.reuse and not torch.is_grad_enabled() else None

        def exchange(s1, s2):
            # scaled, since they are divided by the number of this process's values
            s1, s2 = gather(torch.stack([s1, s2]), ctx.group).sum(0) * share
            return s1, s2

        if z.numel() == 0:
            # the others wait for this one
            exchange(torch.zeros_like(rstd), torch.zeros_like(rstd))
        args = (dz, z, ctx.layout, weight, bias, rstd, xhat_kept, ctx.kept, True, ctx.act, wanted, into)
        dx, dweight, dbias, dresidual = differentiated_once(
            OP, backward, *args, residual, residual is not None and needs[4], exchange
        )
        return dx, dweight if needs[1] else None, dbias if needs[2] else None, None, dresidual


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
    check_writable(OP, x)
    if residual is not None:
        check_residual(OP, residual, x)


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
    group,
    residual: Tensor | None = None,
) -> Tensor:
    """The op on checked arguments, with the statistics of the batches of all processes of ``group``."""
    if residual is not None:
        residual = inplace_abn_aten.cast(residual, x.dtype)
    settings = running_mean, running_var, momentum, eps, act, kept, group
    return InPlaceABNSyncFunction.apply(x, weight, bias, settings, residual)
