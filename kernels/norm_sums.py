"""The mean and rstd of y, from the sums of d = y - shift and of d * d that a convolution has left, in one launch.

    offset = sum(d) / m      mean = shift + offset      var = sum(d * d) / m - offset * offset

for m values of a statistic (STAT of ``kernels/tile.py``).  Where offset * offset > FAR * var the shift lies so far from
the mean that the difference has lost digits.  Then the program of these channels sums once more, over all of y, with
the mean in place of the shift.  That is slow, and rare: a running mean follows the mean.  No host waits for the answer.

y lies in rows (channels_last).  The shift is the running mean, or 0.  The running statistics move.
"""

import torch
import triton
import triton.language as tl

from .launch import acc_dtype, row_lanes
from .launcher import Launcher, plan
from .norm_act import update_running
from .tile import Shape, Sizes, channel_sum, channels_of, tile_count, tile_offsets

# The elements of a tile, and its channels.
TILE, LANES = 4096, 32


@triton.jit
def norm_of_sums_kernel(y_ptr, sums_ptr, mean_ptr, rstd_ptr, running_mean_ptr, running_var_ptr, momentum: tl.float64,
                        I, N, C, EPS: tl.constexpr, FAR: tl.constexpr, ACC: tl.constexpr, STAT: tl.constexpr,
                        BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    sizes = Sizes(N, C, 1)
    SHAPE: tl.constexpr = Shape(STAT, True, BLOCK_N, BLOCK_L)
    at = channels_of(tl.program_id(0), sizes, SHAPE)
    c, valid = at.c, at.valid
    u = at.i * C + c
    m = tl.cast(N, ACC)
    shift = tl.zeros((1, BLOCK_L), ACC)
    if running_mean_ptr is not None:
        running_mean = tl.load(running_mean_ptr + c, mask=valid, other=0.0)
        running_var = tl.load(running_var_ptr + c, mask=valid, other=0.0)
        shift = running_mean.to(ACC)
    offset = tl.load(sums_ptr + u, mask=valid, other=0.0) / m
    var = tl.load(sums_ptr + I * C + u, mask=valid, other=0.0) / m - offset * offset
    mean = shift + offset
    # A NaN is far too.
    far = valid & ((offset * offset <= FAR * var) == 0)
    if tl.max(far.to(tl.int32)) > 0:
        s1 = tl.zeros((1, BLOCK_L), ACC)
        s2 = tl.zeros((1, BLOCK_L), ACC)
        for j in range(tile_count(sizes, SHAPE)):
            tile = tile_offsets(j, at, sizes, SHAPE)
            d = tl.where(tile.mask, tl.load(y_ptr + tile.offs, mask=tile.mask, other=0.0).to(ACC) - mean, 0.0)
            s1 += channel_sum(d, "batch", True)
            s2 += channel_sum(d * d, "batch", True)
        again = s1 / m
        var = tl.where(far, s2 / m - again * again, var)
        mean = tl.where(far, mean + again, mean)
    tl.store(mean_ptr + u, mean, mask=valid)
    tl.store(rstd_ptr + u, 1.0 / tl.sqrt(var + EPS), mask=valid)
    if running_mean_ptr is not None:
        # Another warp may not have loaded them yet.
        tl.debug_barrier()
        update_running(running_mean_ptr, running_mean, mean, momentum, c, valid)
        update_running(running_var_ptr, running_var, var * (m / tl.maximum(m - 1.0, 1.0)), momentum, c, valid)


@plan
def norm_of_sums_plan(layout, dtype, eps, far):
    lanes = row_lanes(layout.C, LANES)
    constants = {"EPS": eps, "FAR": far, "ACC": acc_dtype(dtype), "STAT": layout.stat, "BLOCK_L": lanes}
    constants |= {"BLOCK_N": min(triton.next_power_of_2(layout.N), TILE // lanes), "num_warps": 8}
    grid = (layout.I * triton.cdiv(layout.C, lanes),)
    return Launcher(norm_of_sums_kernel, grid, (layout.I, layout.N, layout.C), constants)


def norm_of_sums(y, sums, layout, running_mean, running_var, momentum, eps, far):
    """The mean and rstd, (I C,) each; ``sums`` is (2, I C).  Only a norm of the batch has running statistics."""
    mean = torch.empty(layout.I * layout.C, dtype=sums.dtype, device=y.device)
    rstd = torch.empty_like(mean)
    tensors = y, sums, mean, rstd, running_mean, running_var
    norm_of_sums_plan(layout, y.dtype, eps, far)(tensors, momentum)
    return mean, rstd
