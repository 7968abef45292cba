"""Statistics of the values of all processes of a group, with one all-gather in forward and one in backward.

In forward, each process computes (count, mean, M2) of its values.  These are gathered from all processes, and every
process merges them by Chan's formula in the order of the ranks.  In backward, the sums of g and of g * xhat are
gathered and added in the same order.  So every process gets the same bits, whatever the sizes of the batches.

A group is passed by its name, because ops in compiled code can take a string as an argument.
"""

import torch
from torch import Tensor, distributed

from ... import _torch
from .call import Exchange


def merge(parts: Tensor) -> Tensor:
    """(count, mean, M2) of all parts together: (3, C) from (parts, 3, C)."""
    count, mean, m2 = parts.unbind(1)
    total = count.sum(0)
    joint = (count * mean).sum(0) / total.clamp(min=1)
    return torch.stack([total, joint, (m2 + count * (mean - joint).square()).sum(0)])


def gather(t: Tensor, group: str) -> Tensor:
    """The tensors ``t`` of all processes, along a new first dimension, in the order of the ranks."""
    members = _torch.resolve_process_group(group)
    gathered = t.new_empty(distributed.get_world_size(members) * t.numel())
    # PyTorch 2.13 renames this function, and warns about the old name.
    all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
    all_gather(gathered, t.flatten(), group=members)
    return gathered.view(-1, *t.shape)


def joint_moments(parts: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of all processes, (C,) each: the collective of a forward pass.

    ``parts``, (parts, 3, C), has (count, mean, M2) of each part of the values of this process.  The statistics are the
    mean and the biased variance, the number of values, and the fraction of them that this process has.
    """
    local = merge(parts)
    total, mean, m2 = merge(gather(local, group))
    values = total.clamp(min=1)
    # The mean is a result of an op, which must not begin inside of a larger tensor.
    return mean.clone(), m2 / values, total, local[0] / values


def exchange(share: Tensor, group: str) -> Exchange:
    """The collective of a backward pass: it replaces this process's sums of g and g * xhat by sums of all processes.

    The new sums are multiplied by ``share``, because the backward pass divides them by this process's number of values.
    """

    def exchanged(s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        s1, s2 = gather(torch.stack([s1, s2]), group).sum(0) * share
        return s1, s2

    return Exchange(exchanged)
