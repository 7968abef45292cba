"""Statistics of the values of all processes of a group: one all-gather forward, one backward.

Forward: each process finds (count, mean, M2) of its values, those of all are gathered, and each merges them by Chan's
formula in the order of the ranks.  Backward: the sums of g and g * xhat likewise.  So they are the same bits on every
process, whatever the sizes of their batches.

A group goes by its name, which ops of compiled code can have as an argument.
"""

from typing import NamedTuple

import torch
from torch import Tensor, distributed

from ..layout import Layout
from .backend import backend_of
from .spec import Exchange, stats_dtype


def local_moments(x: Tensor, layout: Layout) -> Tensor:
    """(count, mean, M2) of parts of the values of this process: (parts, 3, C)."""
    if x.numel() == 0:
        return torch.zeros(1, 3, x.shape[1], dtype=stats_dtype(x), device=x.device)
    return backend_of(x).moments(x, layout)


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


class Joint(NamedTuple):
    """Of the values of all processes, (C,) each: their mean and biased variance, how many they are, and the share of
    them that this process has."""

    mean: Tensor
    var: Tensor
    total: Tensor
    share: Tensor


def joint_moments(x: Tensor, layout: Layout, group: str) -> Joint:
    """The collective of a forward pass."""
    local = merge(local_moments(x, layout))
    total, mean, m2 = merge(gather(local, group))
    values = total.clamp(min=1)
    return Joint(mean, m2 / values, total, local[0] / values)


def exchange(share: Tensor, group: str) -> Exchange:
    """The collective of a backward pass: makes of the sums of g and g * xhat of this process those of all, scaled,
    since they are divided by the number of values of this process."""

    def exchanged(s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        s1, s2 = gather(torch.stack([s1, s2]), group).sum(0) * share
        return s1, s2

    return exchanged
