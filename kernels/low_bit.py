"""A tensor in 8, 4 or 2 bits a value: the kernels that pack and unpack.

``fusedseg/ops/low_bit/grid.py`` describes the values that codes stand for; the functions here compute the same bits in
the same order.  ``8 // BITS`` codes of adjacent values share a byte, the first one in its lowest bits.

    pack      reads the tensor, and writes codes and two numbers for each group; a second read finds the tile in L1
    unpack    reads these, and writes the tensor once
    kink      computes the kinks of a norm: mean - shift / rstd, where shift is bias / weight, but at most FARTHEST

A program has BLOCK_G whole groups, and walks over their positions, BLOCK_P at a step.  The tile of a step is (groups,
positions) of planes, or (positions, channels) of rows (channels_last).  AXIS is the axis of the positions; numbers of
groups have the extent 1 along it.

The arithmetic limits these kernels: a copy of fp16 to 4 bits leaves a thread about 25 instructions a value.  The
numbers of a grid take 100 instructions or more, and in rows a thread needs those of a channel for each lane of its
vector.  So a thread has many values of each of its groups, and steps keep few of them in registers.
"""

import torch
import triton
import triton.language as tl

from .launch import acc_dtype, warps_of
from .launcher import Launcher, plan

GROUP: tl.constexpr = tl.constexpr(256)
# In planes a program has up to PLANE_GROUPS groups.  A step reads RUN_BYTES of each of them, and a thread has
# PLANE_VECTORS vectors of a step: the hash of a place serves several groups.
RUN_BYTES, PLANE_GROUPS, PLANE_VECTORS = 128, 32, 2
# In rows a step reads RUN_BYTES of channels of a few positions, one vector for each thread.  By itemsize, these are the
# threads for each group.  With one, the compiler computes the numbers of a group in one thread only, and the others
# read them from shared memory.  Wider dtypes leave more time for arithmetic, and more threads keep the tiles of the
# programs that run at a time small enough for L1 and L2.
ROW_THREADS = {2: 1, 4: 4, 8: 8}
# Tensors of fewer values have positions and numbers of groups in 32 bits.  Divisions of 64 bits take 70 instructions.
FEW_VALUES = 2**30

# The numbers of the grid are explained in ``fusedseg/ops/low_bit/spec.py``.
NEAR: tl.constexpr = tl.constexpr(2.0**-10)
FLAT: tl.constexpr = tl.constexpr(2.0**-60)
LEAST: tl.constexpr = tl.constexpr(2.0**-100)
SHORTER: tl.constexpr = tl.constexpr(1.0 - 2.0**-21)
MARGIN: tl.constexpr = tl.constexpr(2.0**-20)
SMALLEST_HALF: tl.constexpr = tl.constexpr(2.0**-24)
FRACTION_BITS: tl.constexpr = tl.constexpr(7)
FARTHEST: tl.constexpr = tl.constexpr(64.0)
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
def noise_of(h, place, key):
    """The random numbers of the values at these places of groups; ``h`` has the hashes of the groups' numbers."""
    # Their formula is about 16 bits, which are the highest ones here, so that they bring their sign.
    v = (hashes(-1 - place, key) << 16) * (h | 1) + (h >> 16 << 16)
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
def widened(low, high, v, mask):
    """The lowest and highest values of each place of a tile, with one more tile of values.

    A NaN stays in the lowest value alone, because AMD's GPUs need a comparison for each value that may keep one.
    """
    low = tl.minimum(low, tl.where(mask, v, float("inf")), propagate_nan=tl.PropagateNan.ALL)
    high = tl.maximum(high, tl.where(mask, v, float("-inf")))
    return low, high


@triton.jit
def range_of(low, high, AXIS: tl.constexpr):
    """The lowest and the highest value of each group; NaN if one of its values is not finite."""
    # A minimum over an axis leaves out NaN.  A place without values has low > high.
    poison = tl.sum(tl.where(low > high, 0.0, low * 0.0 + high * 0.0), AXIS, keep_dims=True)
    lowest = tl.min(low, AXIS, keep_dims=True)
    highest = tl.max(high, AXIS, keep_dims=True)
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
def encoding_of(lowest, highest, BITS: tl.constexpr):
    """What ``encode`` needs of a group: border, threshold, ratio, scale and offset; the range is the stored one."""
    below, border, step_above, step_below = grid_of(lowest, highest, BITS)
    # A positive number that is not 0, and a number that no value reaches.
    threshold = tl.where(below == 1, 1e-45, tl.where(below == 2**BITS, float("inf"), 0.0)).to(lowest.dtype)
    ratio = tl.where(step_below > 0, divide(step_above, tl.where(step_below > 0, step_below, 1.0)), 0.0)
    scale = divide(tl.full(step_above.shape, UNIT, lowest.dtype), step_above)
    return border, threshold, ratio, scale, (below - (0.5 - NEAR)) * UNIT + 0.5


@triton.jit
def encode(v, border, threshold, ratio, scale, offset, noise):
    """The codes of a tile as int32, from random numbers."""
    v = v - border
    above = v >= threshold
    p = tl.where(above, v, v * ratio) * scale + offset
    p = p + tl.where(above, (1.0 - 2 * NEAR) * UNIT, 0.0)
    return (p.to(tl.int32) + noise) >> FRACTION_BITS


@triton.jit
def decoding_of(lowest, highest, kink, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """What ``decode`` needs of a group: offset, ratio, scale, the value of the border, and the limits of its sides.

    ``kink`` is None or a number of each group.
    """
    below, border, step_above, step_below = grid_of(lowest, highest, BITS)
    at = border
    # A zero that is exact has no side.
    origin = border * 0.0
    if kink is not None:
        at = border + kink
        origin = kink
    margin = tl.abs(origin) * MARGIN + LEAST
    least = tl.where(below == 2**BITS - 1, float("-inf"), rounded_up(origin + margin, DTYPE))
    most = tl.where(below == 1, float("inf"), -rounded_up(margin - origin, DTYPE))
    # A maximum leaves out a NaN, unless both numbers are.
    least = tl.where(at == at, least, at)
    most = tl.where(at == at, most, at)
    return below - 0.5, divide(step_below, step_above), step_above, at, least, most


@triton.jit
def decode(code, offset, ratio, scale, at, least, most, IS_BOUNDED: tl.constexpr):
    """The values of codes, before they are rounded to the dtype of the tensor."""
    d = code.to(scale.dtype) - offset
    d = tl.where(d > 0, d - (0.5 - NEAR), d + (0.5 - NEAR))
    v = tl.where(d > 0, d, d * ratio) * scale + at
    if IS_BOUNDED:
        # Rounding must not change the side.
        v = tl.where(d > 0, tl.maximum(v, least), tl.minimum(v, most))
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
def groups_of(I, S, C, row_bytes, kinks, ROWS: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr,
              BLOCK_G: tl.constexpr):  # fmt: skip
    """The groups of a program: their numbers, which exist, the places of their kinks, and where their memory begins.

    The latter are the first position, and the offsets of its value and of its byte of codes.  INDEX is the dtype of the
    numbers of groups and positions.
    """
    groups = (S - 1) // GROUP + 1
    program = tl.program_id(0).to(INDEX)
    if ROWS:
        # Programs with neighbouring channels run at about the same time, because they share lines of memory.
        blocks = (C - 1) // BLOCK_G + 1
        block = (program % blocks).to(tl.int32)
        line = program // blocks
        i = line // groups
        first = (line % groups) * GROUP
        c = block * BLOCK_G + tl.arange(0, BLOCK_G)[None, :]
        exists = c < C
        group = line * C + c
        kink = tl.where(kinks == C, c, i * C + c)
        row = i.to(tl.int64) * S + first
        begin = row * C + block * BLOCK_G
        byte = row * row_bytes + block * (BLOCK_G * BITS // 8)
    else:
        group = program * BLOCK_G + tl.arange(0, BLOCK_G)[:, None]
        exists = group < tl.cast(I, INDEX) * groups
        line = group // groups
        first = (group % groups) * GROUP
        kink = line % kinks
        begin = line.to(tl.int64) * S + first
        byte = line.to(tl.int64) * row_bytes + first // (8 // BITS)
    return group, exists, kink, first, begin, byte


@triton.jit
def tile_of(step, exists, first, S, C, row_bytes, ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK_G: tl.constexpr,
            BLOCK_P: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """For a step: the places in the group, and offsets and masks of values and of bytes, from where the groups begin.

    WHOLE says that all groups are whole and fill all programs, so that the compiler sees that nothing is masked.
    """
    PER: tl.constexpr = 8 // BITS
    if ROWS:
        place = step * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
        lane = tl.arange(0, BLOCK_G)[None, :]
        byte = tl.arange(0, BLOCK_G // PER)[None, :]
        in_time = first + place < S
        offs = place.to(tl.int64) * C + lane
        mask = in_time & exists
        byte_offs = place.to(tl.int64) * row_bytes + byte
        # The last byte of a row may hold fewer codes.
        byte_mask = in_time & (tl.program_id(0) % ((C - 1) // BLOCK_G + 1) * (BLOCK_G // PER) + byte < row_bytes)
    else:
        place = step * BLOCK_P + tl.arange(0, BLOCK_P)[None, :]
        byte_offs = step * (BLOCK_P // PER) + tl.arange(0, BLOCK_P // PER)[None, :]
        offs = place
        mask = exists & (first + place < S)
        byte_mask = exists & (first // PER + byte_offs < row_bytes)
    if WHOLE:
        mask = tl.zeros(mask.shape, tl.int32) == 0
        byte_mask = tl.zeros(byte_mask.shape, tl.int32) == 0
    return place, offs, mask, byte_offs, byte_mask


@triton.jit
def load_kink(kink_ptr, at, mask):
    """The kink of each group, or None."""
    kink = None
    if kink_ptr is not None:
        kink = tl.load(kink_ptr + at, mask=mask, other=0.0)
    return kink


@triton.jit(do_not_specialize=["key"])
def low_bit_pack_kernel(x_ptr, codes_ptr, lowest_ptr, highest_ptr, kink_ptr, key, I, S, C, row_bytes, kinks,
                        ROWS: tl.constexpr, BITS: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
                        BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, STEPS: tl.constexpr,
                        WHOLE: tl.constexpr):  # fmt: skip
    AXIS: tl.constexpr = 0 if ROWS else 1
    DTYPE: tl.constexpr = lowest_ptr.dtype.element_ty
    group, exists, at, first, begin, byte = groups_of(I, S, C, row_bytes, kinks, ROWS, INDEX, BITS, BLOCK_G)
    low = tl.full((BLOCK_P, BLOCK_G) if ROWS else (BLOCK_G, BLOCK_P), float("inf"), ACC)
    high = tl.full((BLOCK_P, BLOCK_G) if ROWS else (BLOCK_G, BLOCK_P), float("-inf"), ACC)
    for step in tl.range(STEPS):
        _, offs, mask, _, _ = tile_of(step, exists, first, S, C, row_bytes, ROWS, BITS, BLOCK_G, BLOCK_P, WHOLE)
        v = tl.load(x_ptr + begin + offs, mask=mask, other=0.0).to(ACC)
        low, high = widened(low, high, v, mask)
    lowest, highest = range_of(low, high, AXIS)
    kink = load_kink(kink_ptr, at, exists)
    if kink is not None:
        # Rounding is monotonic, so this is the range of the differences.
        lowest, highest = lowest - kink, highest - kink
        if ACC != DTYPE:
            lowest, highest = outward(lowest, highest, DTYPE)
    tl.store(lowest_ptr + group, lowest.to(DTYPE), mask=exists)
    tl.store(highest_ptr + group, highest.to(DTYPE), mask=exists)

    border, threshold, ratio, scale, offset = encoding_of(lowest, highest, BITS)
    h = hashes(group, key)
    for step in tl.range(STEPS):
        place, offs, mask, byte_offs, byte_mask = tile_of(step, exists, first, S, C, row_bytes, ROWS, BITS, BLOCK_G,
                                                          BLOCK_P, WHOLE)  # fmt: skip
        v = tl.load(x_ptr + begin + offs, mask=mask, other=0.0).to(ACC)
        if kink is not None:
            v = v - kink
            if tl.float16 == DTYPE:
                # Other dtypes hold the range.
                v = tl.minimum(tl.maximum(v, -65504.0), 65504.0)
        code = encode(v, border, threshold, ratio, scale, offset, noise_of(h, place, key))
        # Codes of values that do not exist are 0, as on aten.
        code = tl.where(mask, code, 0)
        tl.store(codes_ptr + byte + byte_offs, squeeze(code, BITS), mask=byte_mask)


@triton.jit
def low_bit_unpack_kernel(x_ptr, codes_ptr, lowest_ptr, highest_ptr, kink_ptr, I, S, C, row_bytes, kinks,
                          ROWS: tl.constexpr, BITS: tl.constexpr, ACC: tl.constexpr, INDEX: tl.constexpr,
                          BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr, STEPS: tl.constexpr,
                          WHOLE: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = lowest_ptr.dtype.element_ty
    group, exists, at, first, begin, byte = groups_of(I, S, C, row_bytes, kinks, ROWS, INDEX, BITS, BLOCK_G)
    lowest = tl.load(lowest_ptr + group, mask=exists, other=0.0).to(ACC)
    highest = tl.load(highest_ptr + group, mask=exists, other=0.0).to(ACC)
    kink = load_kink(kink_ptr, at, exists)
    offset, ratio, scale, origin, least, most = decoding_of(lowest, highest, kink, DTYPE, BITS)
    for step in tl.range(STEPS):
        _, offs, mask, byte_offs, byte_mask = tile_of(step, exists, first, S, C, row_bytes, ROWS, BITS, BLOCK_G,
                                                      BLOCK_P, WHOLE)  # fmt: skip
        code = stretch(tl.load(codes_ptr + byte + byte_offs, mask=byte_mask, other=0), BITS)
        v = decode(code, offset, ratio, scale, origin, least, most, kink is not None or tl.float16 == DTYPE)
        tl.store(x_ptr + begin + offs, v.to(DTYPE), mask=mask)


@triton.jit
def low_bit_kink_kernel(mean_ptr, rstd_ptr, weight_ptr, bias_ptr, kink_ptr, count, C, D, BLOCK: tl.constexpr):
    u = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = u < count
    c = u % C
    ACC: tl.constexpr = kink_ptr.dtype.element_ty
    kink = tl.load(mean_ptr + u // D, mask=mask, other=0.0).to(ACC)
    if bias_ptr is not None:
        weight = tl.full(c.shape, 1.0, ACC)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + c, mask=mask, other=1.0).to(ACC)
        shift = divide(tl.load(bias_ptr + c, mask=mask, other=0.0).to(ACC), weight)
        # 0 / 0 of a channel without weight and bias is NaN.
        shift = tl.minimum(tl.maximum(tl.where(shift == shift, shift, 0.0), -FARTHEST), FARTHEST)
        kink = kink - divide(shift, tl.load(rstd_ptr + u // D, mask=mask, other=1.0).to(ACC))
    tl.store(kink_ptr + u, kink, mask=mask)


@plan
def kink_plan(count, C, D):
    return Launcher(low_bit_kink_kernel, (triton.cdiv(count, 256),), (count, C, D), {"BLOCK": 256, "num_warps": 4})


@plan
def launcher(kernel, lines, dtype, bits, kinks):
    I, S, C = lines
    rows = C > 1
    vector = 16 // dtype.itemsize
    length = min(256, triton.next_power_of_2(S))
    groups = I * lines.groups
    if rows:
        block_g = max(8 // bits, min(triton.next_power_of_2(C), RUN_BYTES // dtype.itemsize))
        threads = max(32, block_g * ROW_THREADS[dtype.itemsize])
        block_p = min(length, threads * vector // block_g)
        programs = groups * triton.cdiv(C, block_g)
        whole = C % block_g == 0
    else:
        block_g = min(triton.next_power_of_2(groups), PLANE_GROUPS)
        block_p = max(8 // bits, min(RUN_BYTES // dtype.itemsize, length))
        threads = block_g * block_p // (vector * PLANE_VECTORS)
        programs = triton.cdiv(groups, block_g)
        whole = groups % block_g == 0
    steps = triton.cdiv(length, block_p)
    constants = {
        "ROWS": rows, "BITS": bits, "ACC": acc_dtype(dtype), "INDEX": tl.int32 if I * S * C < FEW_VALUES else tl.int64,
        "BLOCK_G": block_g, "BLOCK_P": block_p, "STEPS": steps, "WHOLE": whole and S % (block_p * steps) == 0,
        "num_warps": warps_of(threads, 1),
    }  # fmt: skip
    return Launcher(kernel, (programs,), (I, S, C, lines.row_bytes(bits), max(kinks, 1)), constants)


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


def low_bit_kink(mean, rstd, weight, bias, kink):
    """Writes ``kink``, one number for each channel, or each channel of each sample.  ``mean`` and ``rstd`` have one for
    each group of these."""
    C = kink.numel() if bias is None else bias.numel()
    kink_plan(kink.numel(), C, kink.numel() // mean.numel())((mean, rstd, weight, bias, kink))
