"""Statistics of the values of all processes of a group: one all-gather forward, one backward.

Forward: each process finds (count, mean, M2) of its values, those of all are gathered, and each merges them by Chan's
formula in the order of the ranks.  Backward: the sums of g and g * xhat likewise.  So they are the same bits on every
process, whatever the sizes of their batches.

A group goes by its name, which ops of compiled code can have as an argument.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from .. import _backend
from . import inplace_abn_aten
from .device import device_of
from .layout import Layout, channel_view


class Joint(NamedTuple):
    """Of the values of all processes, (C,) each: how many, their mean and biased variance, and the share of them that
    this process has."""

    total: Tensor
    mean: Tensor
    var: Tensor
    share: Tensor


def local_moments(x: Tensor, layout: Layout) -> Tensor:
    """(count, mean, M2) of parts of the values of this process: (parts, 3, C)."""
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.numel() == 0:
        return torch.zeros(1, 3, x.shape[1], dtype=acc, device=x.device)
    if _backend.use_triton(x):
        from ..kernels.norm_stats import few, norm_stats

        with device_of(x):
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


def gather(t: Tensor, group: str) -> Tensor:
    """Those of all processes, along a new first dimension, in the order of their ranks."""
    # here: there are builds of torch without it
    from torch.distributed.distributed_c10d import _resolve_process_group

    members = _resolve_process_group(group)  # type: ignore[arg-type]
    gathered = t.new_empty(distributed.get_world_size(members) * t.numel())
    # PyTorch 2.13 renames it, and warns of the old name
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    all_gather(gathered, t.flatten(), group=members)
    return gathered.view(-1, *t.shape)


def joint_moments(x: Tensor, layout: Layout, group: str) -> Joint:
    """The collective of a forward pass."""
    local = merge(local_moments(x, layout))
    total, mean, m2 = merge(gather(local, group))
    values = total.clamp(min=1)
    return Joint(total, mean, m2 / values, local[0] / values)


def exchange(share: Tensor, group: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The collective of a backward pass: makes of the sums of g and g * xhat of this process those of all, scaled,
    since they are divided by the number of values of this process."""

    def exchanged(s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        s1, s2 = gather(torch.stack([s1, s2]), group).sum(0) * share
        return s1, s2

    return exchanged


def move_running(joint: Joint, running_mean: Tensor | None, running_var: Tensor | None, momentum: float) -> None:
    """Moves the running statistics towards those of all; no values at all move nothing."""
    if running_mean is None or running_var is None:
        return
    with torch.no_grad():
        moved = (joint.total > 0).to(running_mean.dtype) * momentum
        unbiased = joint.var * (joint.total / (joint.total - 1).clamp(min=1))
        running_mean.lerp_(joint.mean.to(running_mean.dtype), moved)
        running_var.lerp_(unbiased.to(running_var.dtype), moved)
