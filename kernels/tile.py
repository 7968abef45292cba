"""Functions with which normalisation kernels walk an activation tensor and merge statistics.

A tensor of I N samples, C channels and S positions has one of two layouts; the constexpr ROWS tells them apart:

    planes   element (i, n, c, s) at ((i N + n) C + c) S + s     contiguous: positions of a channel are adjacent
    rows     element (i, n, c)    at  (i N + n) C + c            channels_last (n counts samples times positions)

STAT says which values share a mean and a variance, and determines I, N and D:

    "batch"      a channel: I = 1, D = 1                                                      BatchNorm
    "instance"   a channel of a sample: I samples; N = 1 (planes) or counts positions (rows); D = 1   InstanceNorm
    "group"      D adjacent channels of a sample: I and N as for "instance"                   GroupNorm

A result per channel has I C values, channel c of sample i at i C + c.  A result per statistics group has I C / D
values, at (i C + c) // D.

A tile is a block (BLOCK_N, BLOCK_L).  Its lanes, the last axis, are adjacent in memory: positions of one channel
(planes) or channels (rows).  Values per channel are a scalar, or (1, BLOCK_L), or (BLOCK_N, 1) if a tile holds planes
of several channels.  So the same code serves all layouts.  Planes with S > BLOCK_L have BLOCK_N = 1, so that a tile is
cut short along one axis only.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of(size, BLOCK: tl.constexpr):
    """The number of tiles, like cdiv, but no intermediate result exceeds the size, which may be just below 2**31."""
    return (size - 1) // BLOCK + 1


@triton.jit
def aligned_sizes(C, S, ROWS: tl.constexpr, ALIGN: tl.constexpr):
    """C and S.  The compiler sees that runs in memory, S of planes and C of rows, are multiples of ALIGN.

    By itself it sees multiples of 16 alone, so that 14 x 14 positions were read one at a time.
    """
    if ALIGN > 1:
        if ROWS:
            C = C // ALIGN * ALIGN
        else:
            S = S // ALIGN * ALIGN
    return C, S


@triton.jit
def lanes_before(plane, S, PEEL: tl.constexpr):
    """How many lanes of a plane's first vector belong to the plane before.

    PEEL is 1, or the elements of a vector if planes begin anywhere.  Then the tiles of a plane begin with the vector
    that holds its first element, so that loads take whole vectors.
    """
    return tl.cast(tl.cast(plane, tl.int64) * S % PEEL, tl.int32)


@triton.jit
def tile_count(N, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    tiles = tiles_of(N, BLOCK_N)
    if not ROWS:
        tiles *= tiles_of(S, BLOCK_L)
    return tiles


@triton.jit
def cut_period(N, S, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """The period of tiles that may be cut short.

    Only the last tile of a period may be cut short; it is the last tile of a plane, or of the tensor.  The period is 1
    if planes that do not fill BLOCK_L share tiles, because then every tile may be cut short.
    """
    if ROWS:
        period = tiles_of(N, BLOCK_N)
    elif BLOCK_N == 1:
        period = tiles_of(S, BLOCK_L)
    else:
        period = tl.where(S == BLOCK_L, tiles_of(N, BLOCK_N), 1)
    return period


@triton.jit
def channels_of(program, C, STAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_L: tl.constexpr):
    """The sample i of a program that walks over tiles, and its channel (planes) or its BLOCK_L channels (rows)."""
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
    """The first sample and first lane of tile j, in int64, because offsets exceed 2**31 at 64 x 64 x 1024 x 1024."""
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
                 WHOLE: tl.constexpr = False, PEEL: tl.constexpr = 1):  # fmt: skip
    """The offsets and the mask of tile j of a channel group of sample i, both of shape (BLOCK_N, BLOCK_L).

    A second mask has the lanes to load: with PEEL, those of all vectors that hold elements of the plane.  WHOLE says
    that no tile of the tensor is cut short, so that the compiler sees that nothing is masked.
    """
    n0, s0 = tile_start(j, S + (PEEL - 1), ROWS, BLOCK_N, BLOCK_L)
    # Offsets within the tile are int64 too: if planes are small, 128 samples of 2**25 elements are one tile.
    n = tl.arange(0, BLOCK_N)[:, None].to(tl.int64)
    lane = tl.arange(0, BLOCK_L)[None, :]
    group = tl.cast(group, tl.int64)
    first = tl.cast(i, tl.int64) * N + n0
    if ROWS:
        offs = first * C + group * BLOCK_L + (n * C + lane)
        mask = (n0 + n < N) & (group * BLOCK_L + lane < C)
    elif BLOCK_N == 1:
        # 32 bits suffice after the subtraction, and take half of the instructions.
        before = lanes_before(first * C + group, S, PEEL) - tl.cast(s0, tl.int32)
        offs = (first * C + group) * S // PEEL * PEEL + s0 + lane
        mask = lane < before + S
    else:
        offs = (first * C + group) * S + (n * C * S + lane)
        mask = (n0 + n < N) & (lane < S)
    if WHOLE:
        mask = tl.zeros((BLOCK_N, BLOCK_L), tl.int32) == 0
    near = mask
    if PEEL > 1 and not WHOLE:
        near = lane < (tl.maximum(before + S, 0) + PEEL - 1) // PEEL * PEEL
        mask = mask & (lane >= before)
    return offs, mask, near


@triton.jit
def slab_offsets(program, I, N, C, S, D: tl.constexpr, STAT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_L: tl.constexpr):  # fmt: skip
    """The tile of a program that holds whole statistics groups.

    Returns the sample, the channels, a mask of existing channels, and the offsets and mask of the tile.  For "batch"
    the tile is tile 0 of ``tile_offsets``.  Otherwise the rows of the tile are planes of one sample: the planes of a
    group, or as many planes as fit.
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
        offs, mask, _ = tile_offsets(0, i, group, N, C, S, ROWS, BLOCK_N, BLOCK_L)
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
    """The offsets of tile j in the side buffer of the K kept channels, which has the tensor's layout.

    A channel with slot < 0 is not kept.
    """
    n0, s0 = tile_start(j, S, ROWS, BLOCK_N, BLOCK_L)
    n = tl.cast(i, tl.int64) * N + n0
    # The rows of a tile are samples, except for planes of one sample.
    if ROWS or STAT == "batch":
        n += tl.arange(0, BLOCK_N)[:, None]
    if ROWS:
        offs = n * K + slot
    else:
        offs = (n * K + slot) * S + s0 + tl.arange(0, BLOCK_L)[None, :]
    return offs


@triton.jit
def folded(v, FOLD: tl.constexpr):
    """The tile as FOLD rows, so that a sum over the rows stays within a thread."""
    return tl.reshape(v, (FOLD, v.shape[0] * v.shape[1] // FOLD))


@triton.jit
def in_lanes(v, FOLD: tl.constexpr, VECTOR: tl.constexpr):
    """The tile as (FOLD, lanes, VECTOR), so that a sum over the outer axes stays within a thread."""
    return tl.reshape(v, (FOLD, v.shape[0] * v.shape[1] // FOLD // VECTOR, VECTOR))


@triton.jit
def lane_sum(v):
    """The sums of ``in_lanes``, (1, lanes)."""
    return tl.sum(tl.sum(v, axis=2), axis=0, keep_dims=True)


@triton.jit
def lane_counts(j, i, group, N, C, S, LANES: tl.constexpr, FOLD: tl.constexpr, VECTOR: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, PEEL: tl.constexpr):  # fmt: skip
    """How many values of each lane of ``in_lanes`` exist in tile j of planes, (1, lanes).

    It is not a sum over the mask of the tile, which the compiler would hold in other threads.
    """
    n0, s0 = tile_start(j, S + (PEEL - 1), False, BLOCK_N, BLOCK_L)
    first = (tl.arange(0, FOLD)[:, None] * LANES + tl.arange(0, LANES)[None, :]) * VECTOR
    before = lanes_before((tl.cast(i, tl.int64) * N + n0) * C + group, S, PEEL) - tl.cast(s0, tl.int32)
    left = before + S - first % BLOCK_L
    n = tl.minimum(tl.maximum(left, 0), VECTOR)
    if PEEL > 1:
        n -= tl.minimum(tl.maximum(before - first % BLOCK_L, 0), VECTOR)
    n = tl.where(first // BLOCK_L < tl.cast(N - n0, tl.int32), n, 0)
    return tl.sum(n, axis=0, keep_dims=True)


@triton.jit
def as_rows(v, BLOCK_L: tl.constexpr):
    """The merged rows of a folded tile, (1, values), with one column for each channel again."""
    return tl.reshape(v, (v.shape[1] // BLOCK_L, BLOCK_L))


@triton.jit
def channel_sum(v, STAT: tl.constexpr, ROWS: tl.constexpr):
    """The sum of a tile for each channel."""
    if ROWS:
        v = tl.sum(v, axis=0, keep_dims=True)
    elif STAT == "batch":
        v = group_sum(v)
    else:
        v = tl.sum(v, axis=1, keep_dims=True)
    return v


@triton.jit
def group_sum(v):
    """The sum over a tile, or over the values of its channels, as a scalar.  Masked values must be 0."""
    # A scalar has no layout.  For a block of one element, Triton 3.6 would redistribute the other operand.
    return tl.sum(v)


@triton.jit
def chan_merge(count, mean, m2, ROWS: tl.constexpr):
    """Merges all entries of a channel by Chan's formula in a fixed order; returns (count, mean, M2)."""
    n = channel_sum(count, "batch", ROWS)
    safe = tl.maximum(n, 1.0)
    total = channel_sum(count * mean, "batch", ROWS) / safe
    d = tl.where(count > 0, mean - total, 0.0)
    return n, total, channel_sum(m2 + count * d * d, "batch", ROWS)
