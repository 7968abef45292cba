"""A tensor in 8, 4 or 2 bits a value: the kernels that pack and unpack.

``fusedseg/ops/low_bit/grid.py`` describes the values that codes stand for; the functions here compute the same bits in
the same order.  A tile is (groups, positions) of planes, or (positions, channels) of rows (channels_last).  AXIS is the
axis of the positions; numbers of groups have the extent 1 along it.  ``8 // BITS`` codes of adjacent values share a
byte, the first one in its lowest bits.

    pack      reads the tensor once, and writes codes and two numbers for each group
    unpack    reads these, and writes the tensor once
"""

import torch
import triton
import triton.language as tl

from .launch import acc_dtype, warps_of
from .launcher import Launcher, plan

GROUP: tl.constexpr = tl.constexpr(256)
# The values of a tile of planes and of a thread.  In rows, the bytes of adjacent channels of a tile, and the values of
# a thread: it holds the numbers of the grid of 16 bytes of channels, and several positions of each.
TILE, PER_THREAD, ROW_BYTES, ROWS_PER_THREAD = 2048, 8, 32, 16

# The numbers of the grid are explained in ``fusedseg/ops/low_bit/spec.py``.
NEAR: tl.constexpr = tl.constexpr(2.0**-10)
FLAT: tl.constexpr = tl.constexpr(2.0**-60)
LEAST: tl.constexpr = tl.constexpr(2.0**-100)
SHORTER: tl.constexpr = tl.constexpr(1.0 - 2.0**-21)
MARGIN: tl.constexpr = tl.constexpr(2.0**-20)
SMALLEST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
FRACTION_BITS: tl.constexpr = tl.constexpr(7)
UNIT: tl.constexpr = tl.constexpr(128.0)
GOLDEN: tl.constexpr = tl.constexpr(0x9E3779B1)
MULTIPLIER: tl.constexpr = tl.constexpr(0x846CA68B)


@triton.jit
def divide(a, b):
    """a / b, rounded once."""
    if a.dtype == tl.float64:
        q = a / b
    else:
        q = tl.math.div_rn(a, b)
    return q


@triton.jit
def hashes(index, key):
    """The hash of each index: 32 random bits."""
    h = index.to(tl.uint32) * GOLDEN + key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * MULTIPLIER
    return h ^ (h >> 15)


@triton.jit
def noise_of(group, place, key):
    """The random numbers of the values at these places of groups with these numbers."""
    h = hashes(group, key)
    # The highest FRACTION_BITS of the lowest 16 bits, with their sign.
    v = (hashes(-1 - place, key) * (h | 1) + (h >> 16)) << 16
    return v.to(tl.int32, bitcast=True) >> (32 - FRACTION_BITS)


@triton.jit
def rounded_up(y, DTYPE: tl.constexpr):
    """The next number of a dtype that is at least y, in the dtype of y; rarely the one after it."""
    if tl.float16 == DTYPE:
        nearest = y.to(DTYPE).to(y.dtype)
        above = (y + (tl.abs(y) * 0.00048828125 + SMALLEST_HALF * 0.75)).to(DTYPE).to(y.dtype)
        y = tl.where(nearest >= y, nearest, above)
    elif tl.bfloat16 == DTYPE:
        nearest = y.to(DTYPE).to(y.dtype)
        above = (y + (tl.abs(y) * 0.00390625 + SMALLEST_HALF * 0.75)).to(DTYPE).to(y.dtype)
        y = tl.where(nearest >= y, nearest, above)
    return y


@triton.jit
def range_of(v, mask, AXIS: tl.constexpr):
    """The lowest and the highest value of each group; NaN if one of its values is not finite."""
    lowest = tl.min(tl.where(mask, v, float("inf")), AXIS, keep_dims=True)
    highest = tl.max(tl.where(mask, v, float("-inf")), AXIS, keep_dims=True)
    # The minimum leaves out NaN.  A group that does not exist has no values.
    poison = tl.sum(tl.where(mask, v * 0.0, 0.0), AXIS, keep_dims=True)
    return lowest + poison, highest + poison


@triton.jit
def outward(lowest, highest, DTYPE: tl.constexpr):
    """The range in a half-precision dtype, which holds the given range unless fp16 cannot."""
    low = -rounded_up(-lowest, DTYPE)
    high = rounded_up(highest, DTYPE)
    low = tl.where(lowest > 0, tl.maximum(low, 0.0), low)
    high = tl.where(highest < 0, tl.minimum(high, 0.0), high)
    if tl.float16 == DTYPE:
        finite = lowest - lowest == 0
        low = tl.where(finite, tl.minimum(tl.maximum(low, -65504.0), 65504.0), lowest)
        high = tl.where(finite, tl.minimum(tl.maximum(high, -65504.0), 65504.0), highest)
    return low, high


@triton.jit
def grid_of(lowest, highest, BITS: tl.constexpr):
    """The number of codes below the border, the border, and the steps above and below it."""
    CODES: tl.constexpr = 2**BITS
    below = tl.where(lowest < 0, CODES / 2, tl.where(lowest > 0, 0.0, 1.0)).to(lowest.dtype)
    none_above = tl.where(highest < 0, float(CODES), below + tl.where(lowest < 0, CODES / 2 - 1, 0.0))
    below = tl.where(highest > 0, below, none_above).to(lowest.dtype)
    # NaN reaches every value of the group.
    border = tl.maximum(lowest, 0.0) + tl.minimum(highest, 0.0) + (lowest - lowest)
    shortest = tl.maximum(tl.maximum(highest, -lowest) * FLAT, LEAST)
    # In the interpreter of Triton 3.8, a constant minus a tensor is no tensor.
    steps_above = tl.maximum(-below + (CODES - 1 + NEAR), NEAR)
    steps_below = tl.maximum(below - 1 + NEAR, NEAR)
    step_above = divide(tl.maximum(highest - border, shortest) * SHORTER, steps_above)
    step_below = divide(tl.maximum(border - lowest, shortest) * SHORTER, steps_below)
    return below, border, step_above, tl.where(border - lowest > 0, step_below, 0.0)


@triton.jit
def quantise(v, lowest, highest, noise, BITS: tl.constexpr):
    """The codes of a tile as int32, from random numbers; the range must be the one that is stored."""
    below, border, step_above, step_below = grid_of(lowest, highest, BITS)
    # A positive number that is not 0, and a number that no value reaches.
    threshold = tl.where(below == 1, 1e-45, tl.where(below == 2**BITS, float("inf"), 0.0)).to(v.dtype)
    ratio = tl.where(step_below > 0, divide(step_above, tl.where(step_below > 0, step_below, 1.0)), 0.0)
    scale = divide(tl.full(step_above.shape, UNIT, v.dtype), step_above)
    v = v - border
    p = tl.where(v > 0, v, v * ratio) * scale
    p = p + ((below - (0.5 - NEAR)) * UNIT + 0.5)
    p = p + tl.where(v >= threshold, (1.0 - 2 * NEAR) * UNIT, 0.0)
    return (p.to(tl.int32) + noise) >> FRACTION_BITS


@triton.jit
def dequantise(code, lowest, highest, kink, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """The values of codes, before they are rounded to DTYPE.  ``kink`` is None or a number of each group."""
    below, border, step_above, step_below = grid_of(lowest, highest, BITS)
    d = code.to(lowest.dtype) - (below - 0.5)
    d = tl.where(d > 0, d - (0.5 - NEAR), d + (0.5 - NEAR))
    v = tl.where(d > 0, d, d * divide(step_below, step_above)) * step_above
    at = border
    if kink is not None:
        at = border + kink
    v = v + at
    if kink is not None or tl.float16 == DTYPE:
        # Rounding must not change the side.  A zero that is exact has no side.
        origin = border * 0.0
        if kink is not None:
            origin = kink
        margin = tl.abs(origin) * MARGIN + LEAST
        least = tl.where(below == 2**BITS - 1, float("-inf"), rounded_up(origin + margin, DTYPE))
        most = tl.where(below == 1, float("inf"), -rounded_up(margin - origin, DTYPE))
        bounded = tl.where(d > 0, tl.maximum(v, least), tl.minimum(v, most))
        # A maximum leaves out NaN.
        v = tl.where(v == v, bounded, v)
    return v


@triton.jit
def squeeze(code, BITS: tl.constexpr):
    """Adjacent codes of a tile, int32, as bytes."""
    if BITS == 2:
        code = tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2))
        first, second = tl.split(code)
        code = first | (second << 2)
    if BITS <= 4:
        code = tl.reshape(code, (code.shape[0], code.shape[1] // 2, 2))
        first, second = tl.split(code)
        code = first | (second << (2 * BITS if BITS == 2 else BITS))
    return code.to(tl.uint8)


@triton.jit
def stretch(byte, BITS: tl.constexpr):
    """The reverse of ``squeeze``."""
    code = byte.to(tl.int32)
    if BITS == 2:
        code = tl.reshape(tl.join(code & 15, code >> 4), (code.shape[0], code.shape[1] * 2))
    if BITS <= 4:
        code = tl.reshape(tl.join(code & (2**BITS - 1), code >> BITS), (code.shape[0], code.shape[1] * 2))
    return code


@triton.jit
def places(I, S, C, row_bytes, ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):
    """What a program works on: the offsets and mask of its values, its bytes and its groups, and their lines.

    The tile is (BLOCK_R, BLOCK_L): groups and positions of planes, or positions and channels of rows.
    """
    PER: tl.constexpr = 8 // BITS
    groups = (S - 1) // GROUP + 1
    r = tl.arange(0, BLOCK_R)[:, None]
    lane = tl.arange(0, BLOCK_L)[None, :]
    byte = tl.arange(0, BLOCK_L // PER)[None, :]
    if ROWS:
        program = tl.program_id(0).to(tl.int64)
        i = program // groups
        s = (program % groups) * GROUP + r
        c = tl.program_id(1) * BLOCK_L + lane
        b = tl.program_id(1) * (BLOCK_L // PER) + byte
        offs, mask = (i * S + s) * C + c, (s < S) & (c < C)
        byte_offs, byte_mask = (i * S + s) * row_bytes + b, (s < S) & (b < row_bytes)
        group, group_mask = program * C + c, c < C
        line = i * C + c
    else:
        group = tl.program_id(0).to(tl.int64) * BLOCK_R + r
        group_mask = group < tl.cast(I, tl.int64) * groups
        line = group // groups
        g = (group % groups).to(tl.int32)
        s = g * GROUP + lane
        b = g * (GROUP // PER) + byte
        offs, mask = line * S + s, group_mask & (s < S)
        byte_offs, byte_mask = line * row_bytes + b, group_mask & (b < row_bytes)
    return offs, mask, byte_offs, byte_mask, group, group_mask, line


@triton.jit
def load_kink(kink_ptr, line, kinks, mask):
    """The kink of each group, or None."""
    kink = None
    if kink_ptr is not None:
        kink = tl.load(kink_ptr + line % kinks, mask=mask, other=0.0)
    return kink


@triton.jit
def encode(v, mask, has_kink: tl.constexpr, noise, group, group_mask, byte_offs, byte_mask, codes_ptr, lowest_ptr,
           highest_ptr, AXIS: tl.constexpr, BITS: tl.constexpr):  # fmt: skip
    """Writes codes and range of a tile of whole groups.  The kink is subtracted from v already."""
    DTYPE: tl.constexpr = lowest_ptr.dtype.element_ty
    lowest, highest = range_of(v, mask, AXIS)
    if has_kink and v.dtype != DTYPE:
        lowest, highest = outward(lowest, highest, DTYPE)
        v = tl.minimum(tl.maximum(v, lowest), highest)
    tl.store(lowest_ptr + group, lowest.to(DTYPE), mask=group_mask)
    tl.store(highest_ptr + group, highest.to(DTYPE), mask=group_mask)
    code = quantise(v, lowest, highest, noise, BITS)
    # Codes of values that do not exist are 0, as on aten.
    code = tl.where(mask, code, 0)
    tl.store(codes_ptr + byte_offs, squeeze(code, BITS), mask=byte_mask)


@triton.jit
def decode(codes_ptr, lowest_ptr, highest_ptr, byte_offs, byte_mask, group, group_mask, kink, ACC: tl.constexpr,
           BITS: tl.constexpr):  # fmt: skip
    """The values of a tile, rounded to the dtype of the range."""
    DTYPE: tl.constexpr = lowest_ptr.dtype.element_ty
    code = stretch(tl.load(codes_ptr + byte_offs, mask=byte_mask, other=0), BITS)
    lowest = tl.load(lowest_ptr + group, mask=group_mask, other=0.0).to(ACC)
    highest = tl.load(highest_ptr + group, mask=group_mask, other=0.0).to(ACC)
    return dequantise(code, lowest, highest, kink, DTYPE, BITS).to(DTYPE)


@triton.jit(do_not_specialize=["key"])
def low_bit_pack_kernel(x_ptr, codes_ptr, lowest_ptr, highest_ptr, kink_ptr, key, I, S, C, row_bytes, kinks,
                        ROWS: tl.constexpr, BITS: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr,
                        BLOCK_L: tl.constexpr):  # fmt: skip
    offs, mask, byte_offs, byte_mask, group, group_mask, line = places(I, S, C, row_bytes, ROWS, BITS, BLOCK_R,
                                                                              BLOCK_L)  # fmt: skip
    v = tl.load(x_ptr + offs, mask=mask, other=0.0).to(ACC)
    kink = load_kink(kink_ptr, line, kinks, group_mask)
    if kink is not None:
        v = v - kink
    if ROWS:
        place = tl.arange(0, BLOCK_R)[:, None]
    else:
        place = tl.arange(0, BLOCK_L)[None, :]
    encode(v, mask, kink_ptr is not None, noise_of(group, place, key), group, group_mask, byte_offs, byte_mask,
           codes_ptr, lowest_ptr, highest_ptr, 0 if ROWS else 1, BITS)  # fmt: skip


@triton.jit
def low_bit_unpack_kernel(x_ptr, codes_ptr, lowest_ptr, highest_ptr, kink_ptr, I, S, C, row_bytes, kinks,
                          ROWS: tl.constexpr, BITS: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr,
                          BLOCK_L: tl.constexpr):  # fmt: skip
    offs, mask, byte_offs, byte_mask, group, group_mask, line = places(I, S, C, row_bytes, ROWS, BITS, BLOCK_R,
                                                                              BLOCK_L)  # fmt: skip
    kink = load_kink(kink_ptr, line, kinks, group_mask)
    v = decode(codes_ptr, lowest_ptr, highest_ptr, byte_offs, byte_mask, group, group_mask, kink, ACC, BITS)
    tl.store(x_ptr + offs, v, mask=mask)


@plan
def launcher(kernel, lines, dtype, bits, kinks):
    I, S, C = lines
    rows = C > 1
    if rows:
        # A tile holds one group of each of its channels.
        block_r = min(256, triton.next_power_of_2(S))
        block_l = max(8 // bits, min(triton.next_power_of_2(C), ROW_BYTES // dtype.itemsize))
        grid = (I * triton.cdiv(S, 256), triton.cdiv(C, block_l))
    else:
        block_l = max(8 // bits, min(256, triton.next_power_of_2(S)))
        groups = I * triton.cdiv(S, 256)
        block_r = min(triton.next_power_of_2(groups), max(1, TILE // block_l))
        grid = (triton.cdiv(groups, block_r), 1)
    constants = {"ROWS": rows, "BITS": bits, "ACC": acc_dtype(dtype), "BLOCK_R": block_r, "BLOCK_L": block_l}
    constants["num_warps"] = warps_of(block_r * block_l, ROWS_PER_THREAD if rows else PER_THREAD)
    return Launcher(kernel, grid, (I, S, C, lines.row_bytes(bits), max(kinks, 1)), constants)


def low_bit_pack(flat, lines, bits, key, kink):
    """Codes, lowest and highest values of a tensor with the memory ``flat``; ``key`` is the int32 of the hash.

    ``lines`` is a ``ChannelLines`` of ``fusedseg/ops/low_bit/spec.py``.  ``kink`` is None or in the dtype of the
    arithmetic.
    """
    codes = torch.empty(lines.code_bytes(bits), dtype=torch.uint8, device=flat.device)
    groups = lines.I * lines.groups * lines.C
    lowest, highest = (torch.empty(groups, dtype=flat.dtype, device=flat.device) for _ in range(2))
    launch = launcher(low_bit_pack_kernel, lines, flat.dtype, bits, 0 if kink is None else kink.numel())
    launch((flat, codes, lowest, highest, kink), key)
    return codes, lowest, highest


def low_bit_unpack(codes, lowest, highest, kink, lines, bits, flat):
    """Writes the values into ``flat``."""
    launch = launcher(low_bit_unpack_kernel, lines, flat.dtype, bits, 0 if kink is None else kink.numel())
    launch((flat, codes, lowest, highest, kink))
