"""The kink of a norm: the input of each channel that the norm sends to 0, where an activation such as ReLU bends.

    weight * (x - mean) * rstd + bias = 0    at    x = mean - bias / (weight * rstd)

A tensor that is packed with its kink (``ops/low_bit``) is rebuilt on the right side of it, so that the sign of the
activation's input is exact.
"""

import torch
from torch import Tensor

# A kink is at most this many standard deviations away from the mean.  Values do not lie further away in practice, and
# the difference of a value and a far kink would have few digits.
FARTHEST = 64.0


def kink_of(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, shape: torch.Size) -> Tensor:
    """The kinks of a norm of ``x`` of shape (N, C, *spatial).

    Args:
        mean, rstd: (C,) or (N C,): one value for each channel, or for each channel of each sample.
        weight, bias: (C,), or None.
        shape: the shape of x.

    Returns:
        (C,) or (N C,), in fp32 or fp64.  A channel whose weight is 0 has any kink, because its sign is that of its
        bias.
    """
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    mean, rstd = (v.detach().to(wide).flatten() for v in (mean, rstd))
    if bias is None:
        return mean
    shift = bias.detach().to(wide)
    if weight is not None:
        shift = shift / weight.detach().to(wide)
    # 0 / 0 of a channel without weight and bias is NaN.
    shift = shift.nan_to_num(nan=0.0, posinf=FARTHEST, neginf=-FARTHEST).clamp(-FARTHEST, FARTHEST)
    return mean - shift.repeat(mean.numel() // shape[1]) / rstd


def of_channels(statistics: Tensor, shape: torch.Size) -> Tensor:
    """The statistics of groups, (N groups,) or (N, groups), for each channel of each sample, (N C,)."""
    return statistics.flatten().repeat_interleave(shape[0] * shape[1] // statistics.numel())
