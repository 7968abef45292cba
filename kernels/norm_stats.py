"""Statistics of an activation tensor, in two steps: parts are computed, and then merged.

Other work may run between the steps.  A part is (count, mean, M2) of some of a channel's values.  The parts are one
buffer (3, parts, I C), and are merged by Chan's formula in a fixed order.  The parts of the sums of a backward pass,
(2, parts, I C), are added in a fixed order.  If there are few parts, every program of the kernel that uses them merges
them for itself.  If there are more, or a group of channels shares statistics, a small launch merges them first.  Parts
from other ranks are merged in the same way.
"""

from collections import namedtuple

import torch
import triton
import triton.language as tl

from .launch import MAX_PARTIALS, MAX_SPLITS, acc_dtype, most_registers, split_blocks, vector_of
from .launcher import Launcher, plan
from .tile import (
    Shape,
    aligned_sizes,
    as_rows,
    chan_merge,
    channel_sum,
    channels_of,
    cut_period,
    in_lanes,
    lane_counts,
    lane_sum,
    tile_count,
    tile_offsets,
)

# Arguments that differ from shape to shape.  For multiples of 16, Triton would compile a kernel anew, and gain nothing.
COUNTS = ["tiles_per_split", "splits", "partials"]

# The buffer (k, count, U) of parts, of which a program merges up to BLOCK_P.
Parts = namedtuple("Parts", "ptr count U BLOCK_P")


@triton.jit
def merge_two(count, mean, m2, n, other_mean, other_m2):
    """Merges two (count, mean, M2) by Chan's formula; each of them may have a count of 0."""
    total = count + n
    share = n / tl.maximum(total, 1.0)
    apart = other_mean - mean
    return total, mean + apart * share, m2 + other_m2 + apart * apart * (count * share)


@triton.jit
def is_cut(j, period, PEEL: tl.constexpr):
    """Whether tile j may be cut short: the last tile of a period, and in planes that begin anywhere the first one."""
    cut = (j + 1) % period == 0
    if PEEL > 1:
        cut = cut | (j % period == 0)
    return cut


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def norm_stats_kernel(x_ptr, partial_ptr, N, C, S, U, tiles_per_split, splits, ACC: tl.constexpr, STAT: tl.constexpr,
                      ALIGN: tl.constexpr,
                      ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, FOLD: tl.constexpr,
                      VECTOR: tl.constexpr, PEEL: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
                      EVICT: tl.constexpr):  # fmt: skip
    """Leaves (count, mean, M2) of one split of a channel group.

    For each lane of a tile, a thread computes mean and M2 of the FOLD values that it holds, and merges them into the
    lane's mean and M2.  Lanes are merged at the end.  If no tile is cut short, all lanes have the same count.  In
    planes that are cut short, VECTOR adjacent values are one lane, so that a thread has a single count.
    """
    sizes = aligned_sizes(N, C, S, ROWS, ALIGN)
    SHAPE: tl.constexpr = Shape(STAT, ROWS, BLOCK_N, BLOCK_L, PEEL)
    split = tl.program_id(1)
    at = channels_of(tl.program_id(0), sizes, SHAPE)
    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tile_count(sizes, SHAPE))
    period = cut_period(sizes, SHAPE)

    LANES: tl.constexpr = BLOCK_N * BLOCK_L // FOLD // VECTOR
    count = tl.full((), 0, ACC)
    mean = tl.zeros((1, LANES), ACC)
    m2 = tl.zeros((1, LANES), ACC)
    if WHOLE or ROWS or PEEL > 1:
        for j in tl.range(first, last, num_stages=STAGES):
            if WHOLE or not is_cut(j, period, PEEL):
                tile = tile_offsets(j, at, sizes, SHAPE, WHOLE or PEEL > 1)
                x = tl.load(x_ptr + tile.offs, mask=tile.mask, other=0.0, eviction_policy=EVICT)
                x = in_lanes(x.to(ACC), FOLD, VECTOR)
                tile_mean = lane_sum(x) * (1.0 / (FOLD * VECTOR))
                d = x - tile_mean[:, :, None]
                count, mean, m2 = merge_two(count, mean, m2, FOLD * VECTOR, tile_mean, lane_sum(d * d))

    count += tl.zeros((1, LANES), ACC)
    if not WHOLE:
        step = 1
        if ROWS:
            first = first + period - 1 - first % period
            step = period
        for j in tl.range(first, last, step, num_stages=STAGES):
            if PEEL == 1 or is_cut(j, period, PEEL):
                tile = tile_offsets(j, at, sizes, SHAPE, WHOLE)
                x = tl.load(x_ptr + tile.offs, mask=tile.near, other=0.0, eviction_policy=EVICT)
                x = in_lanes(x.to(ACC), FOLD, VECTOR)
                valid = in_lanes(tile.mask, FOLD, VECTOR)
                if PEEL > 1:
                    x = tl.where(valid, x, 0.0)
                if ROWS:
                    n = lane_sum(valid.to(ACC))
                else:
                    n = lane_counts(j, at, sizes, SHAPE, FOLD, VECTOR).to(ACC)
                tile_mean = lane_sum(x) / tl.maximum(n, 1.0)
                d = tl.where(valid, x - tile_mean[:, :, None], 0.0)
                count, mean, m2 = merge_two(count, mean, m2, n, tile_mean, lane_sum(d * d))
    if ROWS:
        count, mean, m2 = as_rows(count, BLOCK_L), as_rows(mean, BLOCK_L), as_rows(m2, BLOCK_L)
    n, mean, m2 = chan_merge(count, mean, m2, ROWS)
    u = at.i * sizes.C + at.c
    # In place of ``at.valid``, which a thread would hold across the loops.
    valid = at.c < sizes.C
    tl.store(partial_ptr + split * U + u, n, mask=valid)
    tl.store(partial_ptr + (splits + split) * U + u, mean, mask=valid)
    tl.store(partial_ptr + (2 * splits + split) * U + u, m2, mask=valid)


@triton.jit
def load_part(parts, k: tl.constexpr, u, valid):
    """Entry k of all parts, with shape (BLOCK_P, channels)."""
    p = tl.arange(0, parts.BLOCK_P)[:, None]
    # This is not written with `and`, because Triton's interpreter makes an integer of the single truth value of planes.
    mask = p < tl.where(valid, parts.count, 0)
    return tl.load(parts.ptr + (k * parts.count + p) * parts.U + u, mask=mask, other=0.0)


@triton.jit
def load_moments(parts, u, valid, ROWS: tl.constexpr):
    """The (count, mean, M2) of the channels or groups u."""
    count, mean, m2 = load_part(parts, 0, u, valid), load_part(parts, 1, u, valid), load_part(parts, 2, u, valid)
    return chan_merge(count, mean, m2, ROWS)


@triton.jit
def load_sums(parts, u, valid, ROWS: tl.constexpr):
    """The sums (s1, s2) of the channels or groups u."""
    s1 = channel_sum(load_part(parts, 0, u, valid), "batch", ROWS)
    s2 = channel_sum(load_part(parts, 1, u, valid), "batch", ROWS)
    return s1, s2


@triton.jit(do_not_specialize_on_alignment=COUNTS)
def norm_merge_kernel(partial_ptr, merged_ptr, weight_ptr, U, C, splits, MOMENTS: tl.constexpr, D: tl.constexpr,
                      BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """Merges (k, splits, U) to (k, chunks, U / D): moments if k = 3, and sums, times weight if given, if k = 2.

    BLOCK_P splits become one chunk, and D adjacent channels become one group.
    """
    group = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    chunk = tl.program_id(1)
    chunks = tl.num_programs(1)
    groups = U // D
    # The rows are the splits, and within each split the channels of a group.
    row = tl.arange(0, BLOCK_P * BLOCK_D)[:, None]
    p = chunk * BLOCK_P + row // BLOCK_D
    d = row % BLOCK_D
    u = group * D + d
    mask = (p < splits) & (d < D) & (group < groups)
    v0 = tl.load(partial_ptr + p * U + u, mask=mask, other=0.0)
    v1 = tl.load(partial_ptr + (splits + p) * U + u, mask=mask, other=0.0)
    if MOMENTS:
        v2 = tl.load(partial_ptr + (2 * splits + p) * U + u, mask=mask, other=0.0)
        v0, v1, v2 = chan_merge(v0, v1, v2, True)
        tl.store(merged_ptr + (2 * chunks + chunk) * groups + group, v2, mask=group < groups)
    else:
        if weight_ptr is not None:
            w = tl.load(weight_ptr + u % C, mask=mask, other=0.0).to(v0.dtype)
            v0 *= w
            v1 *= w
        v0 = tl.sum(v0, axis=0, keep_dims=True)
        v1 = tl.sum(v1, axis=0, keep_dims=True)
    tl.store(merged_ptr + chunk * groups + group, v0, mask=group < groups)
    tl.store(merged_ptr + (chunks + chunk) * groups + group, v1, mask=group < groups)


@plan
def merge_plan(k, splits, U, C, D):
    """The launcher, and the number of chunks that it leaves."""
    block_d = triton.next_power_of_2(D)
    # One of two tiles for all numbers of splits, so that few kernels are compiled.
    block_p = min(MAX_SPLITS if splits > MAX_PARTIALS else parts_tile(splits), max(1, 8192 // block_d))
    chunks = triton.cdiv(splits, block_p)
    block_l = max(1, min(8, 2048 // (block_p * block_d)))
    constants = {"MOMENTS": k == 3, "D": D, "BLOCK_P": block_p, "BLOCK_D": block_d, "BLOCK_L": block_l}
    constants["num_warps"] = 4 if block_p * block_d <= 2048 else 16
    return Launcher(norm_merge_kernel, (triton.cdiv(U // D, block_l), chunks), (U, C, splits), constants), chunks


def merge(partial, C, D=1, weight=None):
    """Merges the splits of each channel, or of each group of D channels, in one launch.

    As many splits as a tile takes become one chunk.
    """
    k, splits, U = partial.shape
    launch, chunks = merge_plan(k, splits, U, C, D)
    merged = torch.empty(k, chunks, U // D, dtype=partial.dtype, device=partial.device)
    launch((partial, merged, weight))
    return merged


def parts_tile(partials):
    """The tile of so many parts, at most MAX_PARTIALS: one of two sizes, so that few kernels are compiled."""
    return 1 if partials == 1 else triton.next_power_of_2(MAX_PARTIALS)


def few(partial, C):
    """The parts (k, splits, I C), merged until every program can merge the remaining splits for itself."""
    while partial.shape[1] > MAX_PARTIALS:
        partial = merge(partial, C)
    return partial


def merged(partial, layout, weight=None):
    """The parts (k, splits, I C) as the applying kernels need them: few splits for each statistics group.

    For a group of channels, these are the sums of weight * g and weight * g * xhat; for a channel, there is no weight.
    """
    partial = few(partial, layout.C)
    return merge(partial, layout.C, layout.D, weight) if layout.D > 1 else partial


@plan
def stats_plan(layout, dtype, device):
    """The launcher, and the number of parts that it leaves."""
    blocks = split_blocks(layout, dtype, device, reduces=True, stats=True)
    if layout.rows and not blocks.meta["WHOLE"]:
        # The counts of every lane take registers as well.
        blocks = split_blocks(layout, dtype, device, reduces=True)
        meta = blocks.meta | most_registers(layout, dtype, K=0, backward=False) | {"PEEL": 1}
        blocks = blocks._replace(meta=meta)
    sizes = (layout.N, layout.C, layout.S, layout.I * layout.C, blocks.tiles_per_split, blocks.splits)
    constants = {"ACC": acc_dtype(dtype), "VECTOR": 1, **blocks.meta}
    if blocks.meta["PEEL"] > 1:
        constants |= most_registers(layout, dtype, K=0, backward=False)
    if not layout.rows and not blocks.meta["WHOLE"]:
        constants["VECTOR"] = max(blocks.meta["PEEL"], min(vector_of(layout, dtype), blocks.meta["BLOCK_L"]))
    return Launcher(norm_stats_kernel, (blocks.groups, blocks.splits), sizes, constants), blocks.splits


def norm_stats(x, layout):
    """(count, mean, M2) of parts of ``x``, as (3, parts, I C) in fp32, or in fp64 for fp64 input."""
    launch, splits = stats_plan(layout, x.dtype, x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    partial = torch.empty(3, splits, layout.I * layout.C, dtype=wide, device=x.device)
    launch((x, partial))
    return partial
