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

from collections import namedtuple

import triton
import triton.language as tl

# What belongs together is one argument of the functions of kernels.  Where a tuple is assigned to a name, Triton makes
# values of its constants, unless it has only constants and the name is annotated as a constexpr.  So constants have
# tuples of their own, whose names are in capitals.  Triton's cache on disk knows the text of functions, but not these
# lines: whoever puts fields into another order must rename one, so that the texts of the functions change.
#
# The sizes of a tensor, and the constants of its layout and tiles.  ``lanes_before`` explains PEEL.
Sizes = namedtuple("Sizes", "N C S")
Shape = namedtuple("Shape", "STAT ROWS BLOCK_N BLOCK_L PEEL", defaults=[tl.constexpr(1)])
# The channels ``c`` of sample ``i`` over which a program walks, of which block ``group``, and which of them exist.
Channels = namedtuple("Channels", "i group c valid")
# Tile j of sample i: the offsets of its elements, which of them exist, and the near ones, which are loaded.
Tile = namedtuple("Tile", "j i offs mask near")
# The K kept channels: the side buffer of their xhat, or None, and the place of each channel in it, or -1.
Kept = namedtuple("Kept", "ptr slot K")


@triton.jit
def tiles_of(size, BLOCK: tl.constexpr):
    """The number of tiles, like cdiv, but no intermediate result exceeds the size, which may be just below 2**31."""
    return (size - 1) // BLOCK + 1


@triton.jit
def aligned_sizes(N, C, S, ROWS: tl.constexpr, ALIGN: tl.constexpr):
    """The sizes.  The compiler sees that runs in memory, S of planes and C of rows, are multiples of ALIGN.

    By itself it sees multiples of 16 alone, so that 14 x 14 positions were read one at a time.
    """
    if ALIGN > 1:
        if ROWS:
            C = C // ALIGN * ALIGN
        else:
            S = S // ALIGN * ALIGN
    return Sizes(N, C, S)


@triton.jit
def lanes_before(plane, S, PEEL: tl.constexpr):
    """How many lanes of a plane's first vector belong to the plane before.

    PEEL is 1, or the elements of a vector if planes begin anywhere.  Then the tiles of a plane begin with the vector
    that holds its first element, so that loads take whole vectors.
    """
    return tl.cast(tl.cast(plane, tl.int64) * S % PEEL, tl.int32)


@triton.jit
def tile_count(sizes, SHAPE):
    count = tiles_of(sizes.N, SHAPE.BLOCK_N)
    if not SHAPE.ROWS:
        count *= tiles_of(sizes.S + (SHAPE.PEEL - 1), SHAPE.BLOCK_L)
    return count


@triton.jit
def cut_period(sizes, SHAPE):
    """The period of tiles that may be cut short.

    Only the last tile of a period may be cut short; it is the last tile of a plane, or of the tensor.  The period is 1
    if planes that do not fill BLOCK_L share tiles, because then every tile may be cut short.
    """
    lanes = sizes.S + (SHAPE.PEEL - 1)
    if SHAPE.ROWS:
        period = tiles_of(sizes.N, SHAPE.BLOCK_N)
    elif SHAPE.BLOCK_N == 1:
        period = tiles_of(lanes, SHAPE.BLOCK_L)
    else:
        period = tl.where(lanes == SHAPE.BLOCK_L, tiles_of(sizes.N, SHAPE.BLOCK_N), 1)
    return period


@triton.jit
def channels_of(program, sizes, SHAPE):
    """The channels of a program that walks over tiles."""
    i = tl.cast(0, tl.int32)
    group = program
    if SHAPE.STAT != "batch":
        groups = sizes.C
        if SHAPE.ROWS:
            groups = tiles_of(sizes.C, SHAPE.BLOCK_L)
        i = program // groups
        group = program % groups
    if SHAPE.ROWS:
        c = group * SHAPE.BLOCK_L + tl.arange(0, SHAPE.BLOCK_L)[None, :]
    else:
        c = group
    return Channels(i, group, c, c < sizes.C)


@triton.jit
def tile_start(j, sizes, SHAPE):
    """The first sample and first lane of tile j, in int64, because offsets exceed 2**31 at 64 x 64 x 1024 x 1024."""
    if SHAPE.ROWS:
        n0 = tl.cast(j, tl.int64) * SHAPE.BLOCK_N
        s0 = tl.cast(0, tl.int64)
    else:
        tiles_s = tiles_of(sizes.S + (SHAPE.PEEL - 1), SHAPE.BLOCK_L)
        n0 = tl.cast(j // tiles_s, tl.int64) * SHAPE.BLOCK_N
        s0 = tl.cast(j % tiles_s, tl.int64) * SHAPE.BLOCK_L
    return n0, s0


@triton.jit
def tile_offsets(j, at, sizes, SHAPE, WHOLE: tl.constexpr = False):
    """Tile j of the channels ``at``, with offsets and masks of the shape (BLOCK_N, BLOCK_L).

    With PEEL, all lanes are near that are in a vector with elements of the plane.  WHOLE says that no tile of the
    tensor is cut short, so that the compiler sees that nothing is masked.
    """
    n0, s0 = tile_start(j, sizes, SHAPE)
    # Offsets within the tile are int64 too: if planes are small, 128 samples of 2**25 elements are one tile.
    n = tl.arange(0, SHAPE.BLOCK_N)[:, None].to(tl.int64)
    lane = tl.arange(0, SHAPE.BLOCK_L)[None, :]
    group = tl.cast(at.group, tl.int64)
    first = tl.cast(at.i, tl.int64) * sizes.N + n0
    if SHAPE.ROWS:
        offs = first * sizes.C + group * SHAPE.BLOCK_L + (n * sizes.C + lane)
        mask = (n0 + n < sizes.N) & (group * SHAPE.BLOCK_L + lane < sizes.C)
    elif SHAPE.BLOCK_N == 1:
        # 32 bits suffice after the subtraction, and take half of the instructions.
        before = lanes_before(first * sizes.C + group, sizes.S, SHAPE.PEEL) - tl.cast(s0, tl.int32)
        offs = (first * sizes.C + group) * sizes.S // SHAPE.PEEL * SHAPE.PEEL + s0 + lane
        mask = lane < before + sizes.S
    else:
        offs = (first * sizes.C + group) * sizes.S + (n * sizes.C * sizes.S + lane)
        mask = (n0 + n < sizes.N) & (lane < sizes.S)
    if WHOLE:
        mask = tl.zeros((SHAPE.BLOCK_N, SHAPE.BLOCK_L), tl.int32) == 0
    near = mask
    if SHAPE.PEEL > 1 and not WHOLE:
        near = lane < (tl.maximum(before + sizes.S, 0) + SHAPE.PEEL - 1) // SHAPE.PEEL * SHAPE.PEEL
        mask = mask & (lane >= before)
    return Tile(j, at.i, offs, mask, near)


@triton.jit
def slab_offsets(program, I, D: tl.constexpr, sizes, SHAPE):
    """The tile of a program that holds whole statistics groups.

    For "batch" it is tile 0 of ``tile_offsets``.  Otherwise its rows are planes of one sample: the planes of a group,
    or as many planes as fit.
    """
    n = tl.arange(0, SHAPE.BLOCK_N)[:, None]
    lane = tl.arange(0, SHAPE.BLOCK_L)[None, :]
    if SHAPE.STAT == "group" and SHAPE.ROWS:
        groups = sizes.C // D
        at = Channels(program // groups, program % groups, (program % groups) * D + lane, lane < D)
        offs = (tl.cast(at.i, tl.int64) * sizes.N + n) * sizes.C + at.c
        mask = (n < sizes.N) & at.valid
        tile = Tile(0, at.i, offs, mask, mask)
    elif SHAPE.STAT == "batch" or SHAPE.ROWS:
        at = channels_of(program, sizes, SHAPE)
        tile = tile_offsets(0, at, sizes, SHAPE)
    else:
        if SHAPE.STAT == "group":
            plane = program * D + n
            valid = n < D
        else:
            plane = program * SHAPE.BLOCK_N + n
            valid = plane < I * sizes.C
        at = Channels(plane // sizes.C, program, plane % sizes.C, valid)
        offs = plane.to(tl.int64) * sizes.S + lane
        mask = valid & (lane < sizes.S)
        tile = Tile(0, at.i, offs, mask, mask)
    return at, tile


@triton.jit
def kept_offsets(tile, kept, sizes, SHAPE):
    """The offsets of a tile in the side buffer of the kept channels, which has the tensor's layout."""
    n0, s0 = tile_start(tile.j, sizes, SHAPE)
    n = tl.cast(tile.i, tl.int64) * sizes.N + n0
    # The rows of a tile are samples, except for planes of one sample.
    if SHAPE.ROWS or SHAPE.STAT == "batch":
        n += tl.arange(0, SHAPE.BLOCK_N)[:, None]
    if SHAPE.ROWS:
        offs = n * kept.K + kept.slot
    else:
        offs = (n * kept.K + kept.slot) * sizes.S + s0 + tl.arange(0, SHAPE.BLOCK_L)[None, :]
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
def lane_counts(j, at, sizes, SHAPE, FOLD: tl.constexpr, VECTOR: tl.constexpr):
    """How many values of each lane of ``in_lanes`` exist in tile j of planes, (1, lanes).

    It is not a sum over the mask of the tile, which the compiler would hold in other threads.
    """
    LANES: tl.constexpr = SHAPE.BLOCK_N * SHAPE.BLOCK_L // FOLD // VECTOR
    n0, s0 = tile_start(j, sizes, SHAPE)
    first = (tl.arange(0, FOLD)[:, None] * LANES + tl.arange(0, LANES)[None, :]) * VECTOR
    plane = (tl.cast(at.i, tl.int64) * sizes.N + n0) * sizes.C + at.group
    before = lanes_before(plane, sizes.S, SHAPE.PEEL) - tl.cast(s0, tl.int32)
    left = before + sizes.S - first % SHAPE.BLOCK_L
    n = tl.minimum(tl.maximum(left, 0), VECTOR)
    if SHAPE.PEEL > 1:
        n -= tl.minimum(tl.maximum(before - first % SHAPE.BLOCK_L, 0), VECTOR)
    n = tl.where(first // SHAPE.BLOCK_L < tl.cast(sizes.N - n0, tl.int32), n, 0)
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
