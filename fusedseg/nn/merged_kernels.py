"""One kernel that stands for several convolutions of one input: the sum of their kernels, or the concatenation.

``branches`` is a ModuleList of stock convolutions whose kernels have one centre.  ``kernel`` is the largest size in
each dimension; smaller kernels get zeros around them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._torch import suggest_memory_format
from .branch_sum import running_sum

# The number of parameters that are stacked and added up at once.
STACKED = 8


def summed(op: str, branches: Any, kernel: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """The sums of kernels and of biases, added up in fp32 or wider."""
    by_size: dict[torch.Size, list[Tensor]] = {}
    for branch in branches:
        by_size.setdefault(branch.weight.shape[2:], []).append(branch.weight)
    dtype = branches[0].weight.dtype
    # Kernels of one size are added up first, so that each size is embedded only once.
    sums = [_embedded(_sum(op, weights), kernel) for weights in by_size.values()]
    bias = None
    if branches[0].bias is not None:
        bias = _sum(op, [branch.bias for branch in branches]).to(dtype)
    return running_sum(op, sums).to(dtype), bias


def _sum(op: str, tensors: list[Tensor]) -> Tensor:
    """The sum of tensors in fp32 or wider.

    It stacks a few at a time, which takes fewer launches than one by one and less memory than all at once.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if len(tensors) == 1:
        return tensors[0].to(dtype)
    parts = (tensors[i : i + STACKED] for i in range(0, len(tensors), STACKED))
    return running_sum(op, (torch.stack(part).sum(0, dtype=dtype) for part in parts))


def _embedded(weight: Tensor, kernel: Sequence[int]) -> Tensor:
    """The weight in the middle of a larger kernel, with zeros around it."""
    around = [(k - own) // 2 for k, own in zip(kernel, weight.shape[2:], strict=True)]
    return F.pad(weight, [zeros for n in reversed(around) for zeros in (n, n)]) if any(around) else weight


def stacked(branches: Any, kernel: Sequence[int], groups: int) -> tuple[Tensor, Tensor | None]:
    """The concatenated kernels and biases; with groups they are concatenated within each group."""
    weights = [_embedded(branch.weight, kernel) for branch in branches]
    biases = [branch.bias for branch in branches]
    return _joined(weights, groups), None if biases[0] is None else _joined(biases, groups)


def _joined(tensors: list[Tensor], groups: int) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    if groups == 1:
        return torch.cat(tensors)
    joined = torch.cat([t.unflatten(0, (groups, -1)) for t in tensors], 1).flatten(0, 1)
    return joined.contiguous(memory_format=suggest_memory_format(tensors[0]))


def in_order(y: Tensor, widths: Sequence[int], groups: int, channels: int) -> Tensor:
    """Sorts channels that are ordered by group and then branch into the order by branch and then group.

    ``widths`` are the channels of each branch, ``channels`` is the dimension of y that holds them.
    """
    places = torch.arange(sum(widths), device=y.device).view(groups, -1)
    order = torch.cat([part.flatten() for part in places.split([width // groups for width in widths], 1)])
    last = y.movedim(channels, -1)
    if last.is_contiguous() and not y.is_contiguous():
        # index_select on y itself would return another memory format than that of y.
        return last.index_select(-1, order).movedim(-1, channels)
    return y.index_select(channels, order)
