"""How normalisation kernels walk an activation tensor, and how they merge statistics.

A tensor of I N samples, C channels and S positions comes in one of two layouts, told apart by the constexpr ROWS:

    planes   element (i, n, c, s) at ((i N + n) C + c) S + s     contiguous: positions of a channel are adjacent
    rows     element (i, n, c)    at  (i N + n) C + c            channels_last (n counts samples times positions)

STAT says what shares a mean and a variance, and with that what I, N and D are:

    "batch"      a channel: I = 1, D = 1                                                      BatchNorm
    "instance"   a channel of a sample: I samples; N = 1 (planes) or their positions (rows); D = 1   InstanceNorm
    "group"      D adjacent channels of a sample: I and N likewise                            GroupNorm

What is found per channel has I C values, c of sample i at i C + c; per statistics group I C / D, at (i C + c) // D.

A tile is a block (BLOCK_N, BLOCK_L) whose lanes, the last axis, are adjacent in memory: positions of one channel
(planes) or channels (rows).  Values per channel are a scalar, or have the shape (1, BLOCK_L) or, where a tile holds
planes of several channels, (BLOCK_N, 1), so that all share one code.  Planes with S > BLOCK_L have BLOCK_N = 1; a tile
therefore is cut short along one axis only.
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
def cut_period(N, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """Every how many tiles one may be cut short: the last of a plane, or of all; planes that share tiles: each."""
    if ROWS:
        period = tiles_of(N, BLOCK_N)
    elif BLOCK_N == 1:
        period = tiles_of(S, BLOCK_L)
    else:
        period = tl.where(S == BLOCK_L, tiles_of(N, BLOCK_N), 1)
    return period


@triton.jit
def channels_of(program, C, STAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    """Of a program that walks tiles: its sample i, and its channel (planes) or BLOCK_L channels (rows)."""
    i = tl.cast(0, tl.int32)
    group = program
    if STAT != "batch":
        groups = C
        if ROWS:
            groups = tiles_of(C, BLOCK_L)
        i = program // groups
        group = program % groups
    if ROWS:
        c = group * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    else:
        c = group
    return i, group, c


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
def tile_offsets(j, i, group, N, C, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
                 WHOLE: tl.constexpr = False):  # fmt: skip
    """Offsets and mask of tile j of a channel group of sample i, both of shape (BLOCK_N, BLOCK_L).

    WHOLE: no tile of the tensor is cut short, and compilers see that nothing is masked.
    """
    n0, s0 = tile_start(j, S, ROWS, BLOCK_N, BLOCK_L)
    # int64 within the tile too: 128 samples of 2**25 elements are one tile where planes are small
    n = tl.arange(0, BLOCK_N)[:, None].to(tl.int64)
    lane = tl.arange(0, BLOCK_L)[None, :]
    group = tl.cast(group, tl.int64)
    first = tl.cast(i, tl.int64) * N + n0
    if ROWS:
        offs = first * C + group * BLOCK_L + (n * C + lane)
        mask = (n0 + n < N) & (group * BLOCK_L + lane < C)
    elif BLOCK_N == 1:
        offs = (first * C + group) * S + s0 + lane
        mask = s0 + lane < S
    else:
        offs = (first * C + group) * S + (n * C * S + lane)
        mask = (n0 + n < N) & (lane < S)
    if WHOLE:
        mask = tl.zeros((BLOCK_N, BLOCK_L), tl.int32) == 0
    return offs, mask


@triton.jit
def slab_offsets(program, I, N, C, S, D: tl.constexpr, STAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_L: tl.constexpr):  # fmt: skip
    """Of a program that has whole statistics groups in one tile: sample, channels, which of those exist; and offsets
    and mask of the tile.

    "batch": as tile 0 above.  Planes of a sample lie one after the other, those of a group or as many as fit.
    """
    n = tl.arange(0, BLOCK_N)[:, None]
    lane = tl.arange(0, BLOCK_L)[None, :]
    if STAT == "group" and ROWS:
        i = program // (C // D)
        c = (program % (C // D)) * D + lane
        valid = lane < D
        offs = (tl.cast(i, tl.int64) * N + n) * C + c
        mask = (n < N) & valid
    elif STAT == "batch" or ROWS:
        i, group, c = channels_of(program, C, STAT, ROWS, BLOCK_L)
        valid = c < C
        offs, mask = tile_offsets(0, i, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
    else:
        if STAT == "group":
            plane = program * D + n
            valid = n < D
        else:
            plane = program * BLOCK_N + n
            valid = plane < I * C
        i = plane // C
        c = plane % C
        offs = plane.to(tl.int64) * S + lane
        mask = valid & (lane < S)
    return i, c, valid, offs, mask


@triton.jit
def kept_offsets(j, i, slot, N, S, K, STAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_L: tl.constexpr):  # fmt: skip
    """Offsets of tile j in the side buffer of kept channels: the tensor's layout, K channels; slot < 0: not kept."""
    n0, s0 = tile_start(j, S, ROWS, BLOCK_N, BLOCK_L)
    n = tl.cast(i, tl.int64) * N + n0
    # rows of a tile are samples, but for planes of one sample
    if ROWS or STAT == "batch":
        n += tl.arange(0, BLOCK_N)[:, None]
    if ROWS:
        offs = n * K + slot
    else:
        offs = (n * K + slot) * S + s0 + tl.arange(0, BLOCK_L)[None, :]
    return offs


@triton.jit
def folded(v, FOLD: tl.constexpr):
    """A tile as FOLD rows, of what adjacent threads hold each: a sum over them stays within a thread."""
    return tl.reshape(v, (FOLD, v.shape[0] * v.shape[1] // FOLD))


@triton.jit
def as_rows(v, BLOCK_L: tl.constexpr):
    """What the rows of a folded tile were merged to, (1, values), with a column for each channel again."""
    return tl.reshape(v, (v.shape[1] // BLOCK_L, BLOCK_L))


@triton.jit
def channel_sum(v, STAT: tl.constexpr, ROWS: tl.constexpr):
    """Sum of a tile per channel."""
    if ROWS:
        v = tl.sum(v, axis=0, keep_dims=True)
    elif STAT == "batch":
        v = group_sum(v)
    else:
        v = tl.sum(v, axis=1, keep_dims=True)
    return v


@triton.jit
def group_sum(v):
    """Sum over all of a tile, or of its channels' values, where what is masked is 0: a scalar."""
    # which has no layout: of a block of one, Triton 3.6 deals whatever meets it to threads anew, in registers
    return tl.sum(v)


@triton.jit
def chan_merge(count, mean, m2, ROWS: tl.constexpr):
    """Chan's formula over all entries of a channel at once, in a fixed order: (count, mean, M2)."""
    n = channel_sum(count, "batch", ROWS)
    safe = tl.maximum(n, 1.0)
    total = channel_sum(count * mean, "batch", ROWS) / safe
    d = tl.where(count > 0, mean - total, 0.0)
    return n, total, channel_sum(m2 + count * d * d, "batch", ROWS)
