"""y = cat(x_1, ..., x_k) along the channels of images in channels_last, and a copy of a slice of channels.

    y[r, begin_i + c] = x_i[r, c] [+ bias_i[c]]        begin_i = C_1 + ... + C_(i - 1)

A row r is one position of one sample.  In memory the channels of a row are adjacent, and rows are a pitch apart: the
pitch is the number of channels, or more for a slice of the channels of a wider tensor.  So both the concatenation and
its transpose are copies between rows of different pitches, and with one source the same kernel is the copy of a slice.

The programs of one block of rows follow each other through the sources, so that the parts of a cache line of y that
come from different sources are written at nearly the same time.  With a launch for each source, every cache line of
narrow sources would be written to memory twice.

A source may have a bias, that of the convolution which made it.  As a pass of its own the sum would read and write the
source once more.
"""

import math

import triton
import triton.language as tl

from .launch import acc_dtype, least_idle, warps_of
from .launcher import Launcher, plan

# The sources of a launch.  More sources take several launches.
MOST_SOURCES = 4
# The bytes that a program copies, the most channels among them, and the bytes that a thread holds.
TILE_BYTES, MOST_LANES, THREAD_BYTES = 8192, 128, 64


@triton.jit
def copy_tile(x_ptr, bias_ptr, y_ptr, row, tile, R, C, pitch_x, pitch_y, begin, ACC: tl.constexpr, ALIGN: tl.constexpr,
              BLOCK_C: tl.constexpr):  # fmt: skip
    """Copies a block of rows of the channels of one tile, and adds the bias."""
    c = tile * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    mask = (row < R) & (c < C // ALIGN * ALIGN)
    x = tl.load(x_ptr + row * (pitch_x // ALIGN * ALIGN) + c, mask=mask)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + c, mask=c < C, other=0.0)
        x = (x.to(ACC) + bias.to(ACC)).to(x.dtype)
    tl.store(y_ptr + row * (pitch_y // ALIGN * ALIGN) + begin // ALIGN * ALIGN + c, x, mask=mask)


@triton.jit
def concat_kernel(x0_ptr, x1_ptr, x2_ptr, x3_ptr, bias0_ptr, bias1_ptr, bias2_ptr, bias3_ptr, y_ptr, R, C0, C1, C2, C3,
                  pitch0, pitch1, pitch2, pitch3, pitch_y, ACC: tl.constexpr, ALIGN: tl.constexpr,
                  BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):  # fmt: skip
    """Copies up to four sources; those that are missing have no channels.  ALIGN divides all channels and pitches."""
    end0 = tl.cdiv(C0, BLOCK_C)
    end1 = end0 + tl.cdiv(C1, BLOCK_C)
    end2 = end1 + tl.cdiv(C2, BLOCK_C)
    tiles = end2 + tl.cdiv(C3, BLOCK_C)
    pid = tl.program_id(0)
    tile = pid % tiles
    # int64: offsets pass 2**31 at 64 x 64 x 1024 x 1024
    row = (pid // tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    if tile < end0:
        copy_tile(x0_ptr, bias0_ptr, y_ptr, row, tile, R, C0, pitch0, pitch_y, 0, ACC, ALIGN, BLOCK_C)
    # Two conditions: Triton compiles both sides of "and", and the code of a missing source has no address.
    if x1_ptr is not None:  # noqa: SIM102
        if (tile >= end0) & (tile < end1):
            copy_tile(x1_ptr, bias1_ptr, y_ptr, row, tile - end0, R, C1, pitch1, pitch_y, C0, ACC, ALIGN, BLOCK_C)
    if x2_ptr is not None:  # noqa: SIM102
        if (tile >= end1) & (tile < end2):
            copy_tile(x2_ptr, bias2_ptr, y_ptr, row, tile - end1, R, C2, pitch2, pitch_y, C0 + C1, ACC, ALIGN, BLOCK_C)
    if x3_ptr is not None:  # noqa: SIM102
        if tile >= end2:
            copy_tile(x3_ptr, bias3_ptr, y_ptr, row, tile - end2, R, C3, pitch3, pitch_y, C0 + C1 + C2, ACC, ALIGN,
                      BLOCK_C)  # fmt: skip


def lanes_of(channels):
    """The number of channels of a program, a power of two."""
    widest = triton.next_power_of_2(max(channels))
    candidates = [lanes for lanes in (MOST_LANES >> k for k in range(5)) if lanes <= widest] or [widest]
    return least_idle(candidates, *channels)


@plan
def concat_plan(R, channels, pitches, pitch_y, dtype):
    block_c = lanes_of(channels)
    block_r = max(1, TILE_BYTES // dtype.itemsize // block_c)
    align = math.gcd(16 // dtype.itemsize, pitch_y, *channels, *pitches)
    missing = (0,) * (MOST_SOURCES - len(channels))
    programs = triton.cdiv(R, block_r) * sum(triton.cdiv(C, block_c) for C in channels)
    constants = {"ACC": acc_dtype(dtype), "ALIGN": align, "BLOCK_R": block_r, "BLOCK_C": block_c,
                 "num_warps": warps_of(block_r * block_c, THREAD_BYTES // dtype.itemsize)}  # fmt: skip
    return Launcher(concat_kernel, (programs,), (R, *channels, *missing, *pitches, *missing, pitch_y), constants)


def concat(sources, pitches, y, pitch_y, biases=()):
    """Writes the sources to the first channels of ``y``, one after the other; all are rows with these pitches.

    ``biases`` has a vector, or None, for each source; without it no source has a bias.
    """
    biases = biases or (None,) * len(sources)
    R = y.numel() // y.shape[1]
    for first in range(0, len(sources), MOST_SOURCES):
        some = sources[first : first + MOST_SOURCES]
        channels = tuple(x.shape[1] for x in some)
        absent = (None,) * (MOST_SOURCES - len(some))
        given = (*some, *absent, *biases[first : first + MOST_SOURCES], *absent)
        concat_plan(R, channels, tuple(pitches[first : first + MOST_SOURCES]), pitch_y, y.dtype)((*given, y))
        y = y[:, sum(channels) :]
