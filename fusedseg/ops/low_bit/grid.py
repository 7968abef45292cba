"""The values that the codes of a group stand for, on aten ops.  ``kernels/low_bit.py`` computes the same bits.

Of T = 2**bits codes the first ``below`` lie below the border of signs, the others above it:

    lowest < 0 < highest      T / 2 codes on each side of 0; a value of 0 counts as positive
    lowest = 0                code 0 is exactly 0, the others are positive
    highest = 0               the last code is 0, up to 2**-60 of the range, and the others are negative
    0 < lowest                all codes are positive; the border is the lowest value
    highest < 0               all codes are negative; the border is the highest value

On either side the k-th code from the border, k = 0, 1, ..., stands for border +- (k + NEAR) step, and the last one for
the lowest or highest value.  Between two of them, a value is rounded up with the probability that makes the result
right on average.  A group with a value that is not finite has the range NaN, and comes back as NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .spec import FLAT, FRACTION_BITS, LEAST, MARGIN, NEAR, SHORTER

# The smallest value of fp16 that is not 0.  Those of the other dtypes are far below what the grid can reach.
SMALLEST_HALF = 2.0**-24
# The distance of the two codes beside the border, beyond the distance of their values.  The unit is 2**-FRACTION_BITS.
JUMP = (1.0 - 2 * NEAR) * 2**FRACTION_BITS


class Grid(NamedTuple):
    """Numbers of each group; ``below`` counts codes, and the steps are those above and below the border."""

    below: Tensor
    border: Tensor
    step_above: Tensor
    step_below: Tensor
    bits: int


def grid_of(lowest: Tensor, highest: Tensor, bits: int) -> Grid:
    """``lowest`` and ``highest`` in the dtype of the arithmetic."""
    codes = 2.0**bits
    below = torch.where(lowest < 0, codes / 2, torch.where(lowest > 0, 0.0, 1.0)).to(lowest.dtype)
    below = torch.where(highest > 0, below, torch.where(highest < 0, codes, below + (lowest < 0) * (codes / 2 - 1)))
    border = lowest.clamp(min=0) + highest.clamp(max=0)
    shortest = (torch.maximum(highest, -lowest) * FLAT).clamp(min=LEAST)
    above_range, below_range = highest - border, border - lowest
    steps = (codes - 1 + NEAR - below).clamp(min=NEAR), (below - 1 + NEAR).clamp(min=NEAR)
    step_above = torch.maximum(above_range, shortest) * SHORTER / steps[0]
    step_below = torch.maximum(below_range, shortest) * SHORTER / steps[1]
    # With no value below the border, code 0 is the border itself.
    return Grid(below, border, step_above, torch.where(below_range > 0, step_below, 0.0), bits)


def encoding_of(grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``threshold``, ``ratio``, ``scale`` and ``offset``.

    A value v lies at floor(scale p + offset + (JUMP if v - border >= threshold)), in units of 2**-FRACTION_BITS of a
    code, where p = v - border, times ``ratio`` if that is negative.  Then a random number is added, whose mean the
    offset holds, and these bits are dropped.
    """
    below, unit = grid.below, 2.0**FRACTION_BITS
    # A positive number that is not 0, and a number that no value reaches.
    threshold = torch.where(below == 1, 1e-45, torch.where(below == 2.0**grid.bits, torch.inf, 0.0)).to(below.dtype)
    ratio = torch.where(grid.step_below > 0, grid.step_above / grid.step_below, 0.0)
    # Random numbers reach from -unit / 2 to unit / 2 - 1.  With a half more, floor rounds to the nearest.
    return threshold, ratio, unit / grid.step_above, (below - (0.5 - NEAR)) * unit + 0.5


def decoding_of(grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """``offset``, ``ratio`` and ``scale``.

    Code c stands for border + scale d, d = s(c - offset), d times ``ratio`` if that is negative, where s brings a
    number by 1/2 - NEAR nearer to 0.
    """
    return grid.below - 0.5, grid.step_below / grid.step_above, grid.step_above


def rounded_up(y: Tensor, dtype: torch.dtype) -> Tensor:
    """The next number of a dtype that is at least y, in the dtype of y; rarely the one after it."""
    if dtype == y.dtype:
        return y
    nearest = y.to(dtype).to(y.dtype)
    above = (y + (y.abs() * (torch.finfo(dtype).eps / 2) + SMALLEST_HALF * 0.75)).to(dtype).to(y.dtype)
    return torch.where(nearest >= y, nearest, above)


def outward(lowest: Tensor, highest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A range in a dtype that holds a given range, and does not reach beyond 0 if that does not."""
    low = torch.where(lowest > 0, (-rounded_up(-lowest, dtype)).clamp(min=0), -rounded_up(-lowest, dtype))
    high = torch.where(highest < 0, rounded_up(highest, dtype).clamp(max=0), rounded_up(highest, dtype))
    most = torch.finfo(dtype).max
    # The difference of a value and the kink may be too large for fp16.
    low = torch.where(lowest.isfinite(), low.clamp(min=-most, max=most), lowest)
    return low, torch.where(highest.isfinite(), high.clamp(min=-most, max=most), highest)


def limits_of(kink: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """For each group, the least result above the border and the greatest one below it.

    A rebuilt value is added to the kink and rounded to the tensor's dtype, which must not change its side.
    """
    margin = kink.abs() * MARGIN + LEAST
    # A zero that is exact has no side.
    least = torch.where(grid.below == 2.0**grid.bits - 1, -torch.inf, rounded_up(kink + margin, dtype))
    return least, torch.where(grid.below == 1, torch.inf, -rounded_up(margin - kink, dtype))
