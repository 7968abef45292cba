"""Statistics of groups of D adjacent channels, and vectors of channels repeated for samples, on aten ops."""

from typing import Any

import torch
from torch import Tensor

from ..._backend import on_gpu
from ..layout import Layout
from . import aten_chunks

# A call of ``torch.ops`` is shortest if an overload is called.
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default


def serves(x: Tensor, layout: Layout) -> bool:
    """Whether aten's group norm is used.  It is not used on a GPU, nor if its temporaries are large."""
    if layout.D == 1 or x.device.type != "cpu" or on_gpu(x):
        return False
    return not layout.rows or aten_chunks.small(x)


def of_channels(mean: Tensor, var: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each group, from the means and variances of its D channels.

    All channels of a group have the same number of values.
    """
    means, variances = mean.view(-1, D), var.view(-1, D)
    mean = means.mean(1)
    return mean, variances.mean(1) + (means - mean[:, None]).square_().mean(1)


def over_channels(v: Tensor, D: int) -> Tensor:
    """Repeats the value of each group for each of its D channels."""
    # repeat_interleave computes its indices first.
    return v if D == 1 else v[:, None].expand(-1, D).reshape(-1)


def over_samples(v: Tensor | None, samples: int) -> Any:
    """Repeats a vector of one value per channel for each sample."""
    # For one channel, reshape() would return a view in which all samples share one value, so all samples would move the
    # same running statistics.
    return None if v is None else v.expand(samples, -1).contiguous().view(-1)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, D: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The group norm of one sample (1, C, *positions), in new memory, with the mean and rstd of each group."""
    C, G = x.shape[1], x.shape[1] // D
    y, mean, rstd = torch.native_group_norm(x, weight, bias, 1, C, x[0, 0].numel(), G, eps)
    return y, mean.view(G), rstd.view(G)


def backward(g: Tensor, centred: Tensor, weight: Tensor, rstd: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight and dbias of ``forward``.

    ``centred`` is x - mean.  ``rstd`` has one value per channel, which is the rstd of the channel's group.
    """
    C, G = g.shape[1], g.shape[1] // D
    rstd = rstd[::D].contiguous().view(1, G)
    shape = (1, C, g[0, 0].numel(), G)
    return _group_norm_backward(g, centred, torch.zeros_like(rstd), rstd, weight, *shape, [True] * 3)
