"""How normalisation kernels walk an activation tensor, and how they merge statistics.

A tensor of N samples, C channels and S positions comes in one of two layouts, told apart by the constexpr ROWS:

    planes   element (n, c, s) at (n C + c) S + s     contiguous: a program owns one channel
    rows     element (n, c)    at  n C + c            channels_last (n counts samples times positions): BLOCK_L of them

A tile is a block (BLOCK_N, BLOCK_L) whose lanes, the last axis, are adjacent in memory: positions of one channel
(planes) or channels (rows).  Values per channel have the shape (1, 1) or (1, BLOCK_L), so both layouts share one code.
Planes with S > BLOCK_L have BLOCK_N = 1; a tile therefore is cut short along one axis only.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(size, BLOCK: tl.constexpr):
    """cdiv without passing the size, which may be just below 2**31."""
    return (size - 1) // BLOCK + 1


@triton.jit
def tile_count(N, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    tiles = tiles_of(N, BLOCK_N)
    if not ROWS:
        tiles *= tiles_of(S, BLOCK_L)
    return tiles


@triton.jit
def tail_period(N, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Every how many tiles one may be cut short: the last of a plane, or of all where a tile spans samples."""
    if ROWS or BLOCK_N > 1:
        period = tiles_of(N, BLOCK_N)
    else:
        period = tiles_of(S, BLOCK_L)
    return period


@triton.jit
def channel_index(group, ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    if ROWS:
        c = group * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    else:
        c = group + tl.zeros((1, 1), tl.int32)
    return c


@triton.jit
def tile_start(j, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """First sample and first lane of tile j, in int64: offsets pass 2**31 at 64 x 64 x 1024 x 1024."""
    if ROWS:
        n0 = tl.cast(j, tl.int64) * BLOCK_N
        s0 = tl.cast(0, tl.int64)
    else:
        tiles_s = tiles_of(S, BLOCK_L)
        n0 = tl.cast(j // tiles_s, tl.int64) * BLOCK_N
        s0 = tl.cast(j % tiles_s, tl.int64) * BLOCK_L
    return n0, s0


@triton.jit
def tile_offsets(j, group, N, C, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Offsets and mask of tile j of a channel group, both of shape (BLOCK_N, BLOCK_L)."""
    n0, s0 = tile_start(j, S, ROWS, BLOCK_N, BLOCK_L)
    # int64 within the tile too: 128 samples of 2**25 elements are one tile where planes are small
    n = tl.arange(0, BLOCK_N)[:, None].to(tl.int64)
    lane = tl.arange(0, BLOCK_L)[None, :]
    group = tl.cast(group, tl.int64)
    if ROWS:
        offs = n0 * C + group * BLOCK_L + (n * C + lane)
        mask = (n0 + n < N) & (group * BLOCK_L + lane < C)
    elif BLOCK_N == 1:
        offs = (n0 * C + group) * S + s0 + lane
        mask = s0 + lane < S
    else:
        offs = (n0 * C + group) * S + (n * C * S + lane)
        mask = (n0 + n < N) & (lane < S)
    return offs, mask


@triton.jit
def kept_offsets(j, slot, N, C, S, K, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Offsets of tile j in the side buffer of kept channels: the tensor's layout, K channels; slot < 0: not kept."""
    n0, s0 = tile_start(j, S, ROWS, BLOCK_N, BLOCK_L)
    n = n0 + tl.arange(0, BLOCK_N)[:, None]
    if ROWS:
        offs = n * K + slot
    else:
        offs = (n * K + slot) * S + s0 + tl.arange(0, BLOCK_L)[None, :]
    return offs


@triton.jit
def channel_sum(v, ROWS: tl.constexpr):
    """Sum of a tile per channel."""
    v = tl.sum(v, axis=0, keep_dims=True)
    if not ROWS:
        v = tl.sum(v, axis=1, keep_dims=True)
    return v


@triton.jit
def chan_merge(count, mean, m2, ROWS: tl.constexpr):
    """Chan's formula over all entries of a channel at once, in a fixed order: (count, mean, M2)."""
    n = channel_sum(count, ROWS)
    safe = tl.maximum(n, 1.0)
    total = channel_sum(count * mean, ROWS) / safe
    d = tl.where(count > 0, mean - total, 0.0)
    return n, total, channel_sum(m2 + count * d * d, ROWS)


@triton.jit
def load_partials(ptr, k: tl.constexpr, c, C, first, splits, BLOCK_P: tl.constexpr):
    """Entry k of BLOCK_P splits from the first one on, shape (BLOCK_P, channels); the buffer is (k, splits, C)."""
    p = first + tl.arange(0, BLOCK_P)[:, None]
    return tl.load(ptr + (k * splits + p) * C + c, mask=(p < splits) & (c < C), other=0.0)
