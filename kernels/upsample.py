"""Linear interpolation along one, two or three axes, forward and backward.  Nothing is kept but the sizes.

Along an axis of I inputs and O outputs, output o lies at s(o), and reads input i by the weight w(o, i):

    s(o) = min(max(r o + t, 0), I - 1)       w(o, i) = max(0, 1 - |s(o) - i|)
    y[o] = sum_i w(o, i) x[i]                dx[i] = sum_o w(o, i) dy[o]

    r = (I - 1) / (O - 1), t = 0             if corners are aligned
    r = I / O or 1 / factor, t = (r - 1) / 2 otherwise

All numbers of an axis are fractions with the same denominator: s(o) = (o step + shift) / den.  So a position is exact
in integers, and no rounding decides which values are read.  Both directions gather: there are no atomics, sums are fp32
(fp64 for fp64), and their order is fixed.

The axes are called a, b and w; images have one a, signals also one b.  A line is all positions along w at one a and b.
A program has a tile of lanes of a line, and walks along b.  An output lies between two lines of inputs, which the
program holds, already interpolated along a and w; so it reads each line once in forward.  In backward it holds the
gradients of two lines of inputs, to which it adds each line of dy once.  A tile is (outer, inner); inner is adjacent in
memory:

    rows   (channels_last)    outer are positions along w, inner are channels; lines may be slices of wider ones
    planes (contiguous)       outer are planes (n, c), inner are positions along w
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

from .launch import acc_dtype, multiprocessors, row_lanes, warps_of
from .launcher import Launcher, plan

# The bytes of a tile: 16 for each of 128 threads.  In backward of planes a thread stores 8 bytes, because it needs
# offsets and weights of several values for each of its positions.
TILE_BYTES, PLANES_BWD_TILE_BYTES, THREADS = 2048, 1024, 128
# The number of lines that a program walks over, on the side of the large tensor.  Each walk reads one or two lines that
# another one reads too, and short walks give enough programs.
MOST_LINES, FEWEST_LINES = 32, 8
PROGRAMS_PER_SM = 16
# The number of values along a row whose loads are unrolled, and of values of several rows.  Where corners are aligned,
# 25 values of a volume would take 168 registers.
UNROLLED, UNROLLED_ROWS = tl.constexpr(5), tl.constexpr(16)

# The sizes of an axis, and the numbers of the formula above.
Axis = namedtuple("Axis", "small large step shift den")
# The tensor that a program reads, with B lines of W positions for each a, and its axes a and w.
Lines = namedtuple("Lines", "ptr pitch B W a w")
# The lanes of a program: their a and w in the result, the first values that they read along these axes, and the part of
# their offset that does not depend on a line.
Lanes = namedtuple("Lanes", "a first_a w first_w rest mask")
# How a program reads: the numbers of values along a and w that a position of the result reads, and the direction.
How = namedtuple("How", "KA KW ACC FORWARD")


@triton.jit
def position(o, axis):
    """The position of output o on an axis, in units of 1 / den."""
    return tl.minimum(tl.maximum(o * axis.step + axis.shift, 0), (axis.small - 1) * axis.den)


@triton.jit
def weight_of(s, i, axis, ACC: tl.constexpr):
    """The weight of input i for an output at position s."""
    # The compiler takes the reciprocal out of loops.
    return tl.maximum(axis.den - tl.abs(s - i * axis.den), 0).to(ACC) * (tl.full((), 1.0, ACC) / axis.den)


@triton.jit
def add(acc, weight, x):
    """acc + weight x in one instruction, which rounds once."""
    weight, _ = tl.broadcast(weight, acc)
    return tl.fma(weight, x.to(acc.dtype), acc)


@triton.jit
def first_reader(i, axis):
    """The first output behind input i - 1, which is the first one that reads input i."""
    before = (i - 1) * axis.den - axis.shift
    return tl.where(before < 0, 0, before // axis.step + 1)


@triton.jit
def first_read(p, axis, FORWARD: tl.constexpr):
    """The first value along an axis that position p of the result reads.

    It is computed before all loops, because a compiler does not move a division out of a loop.
    """
    return position(p, axis) // axis.den if FORWARD else first_reader(p, axis)


@triton.jit
def tap(p, first, k, axis, ACC: tl.constexpr, FORWARD: tl.constexpr):
    """The position of the k-th value along an axis that position p of the result reads, and its weight."""
    at = first + k
    if FORWARD:
        return tl.minimum(at, axis.small - 1), weight_of(position(p, axis), at, axis, ACC)
    else:
        weight = weight_of(position(at, axis), p, axis, ACC)
        return tl.minimum(at, axis.large - 1), tl.where(at < axis.large, weight, 0.0)


@triton.jit
def add_value(row, row_ptr, k, lines, lanes, HOW):
    at, weight = tap(lanes.w, lanes.first_w, k, lines.w, HOW.ACC, HOW.FORWARD)
    return add(row, weight, tl.load(row_ptr + (at * lines.pitch + lanes.rest), mask=lanes.mask, other=0.0))


@triton.jit
def read_row(lines, a, b, lanes, HOW):
    """Line b of a, interpolated along w."""
    row_ptr = lines.ptr + ((a * lines.B + b) * lines.W).to(tl.int64) * lines.pitch
    row = tl.zeros(lanes.mask.shape, HOW.ACC)
    if HOW.KW <= UNROLLED:
        for k in tl.static_range(HOW.KW):
            row = add_value(row, row_ptr, k, lines, lanes, HOW)
    else:
        for k in range(HOW.KW):
            row = add_value(row, row_ptr, k, lines, lanes, HOW)
    return row


@triton.jit
def add_row(acc, k, lines, b, lanes, HOW):
    at, weight = tap(lanes.a, lanes.first_a, k, lines.a, HOW.ACC, HOW.FORWARD)
    return add(acc, weight, read_row(lines, at, b, lanes, HOW))


@triton.jit
def read_line(lines, b, lanes, HOW):
    """Line b of the tensor that is read, interpolated along a and w."""
    if HOW.KA == 1:
        acc = read_row(lines, lanes.a, b, lanes, HOW)
    elif HOW.KA * HOW.KW <= UNROLLED_ROWS:
        acc = tl.zeros(lanes.mask.shape, HOW.ACC)
        for k in tl.static_range(HOW.KA):
            acc = add_row(acc, k, lines, b, lanes, HOW)
    else:
        acc = tl.zeros(lanes.mask.shape, HOW.ACC)
        for k in range(HOW.KA):
            acc = add_row(acc, k, lines, b, lanes, HOW)
    return acc


@triton.jit
def tile_of(N, C, A, B, W, x_size, y_size, run, ROWS: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr):
    """The tile and the walk of a program in its result, which has A x B lines of W positions.

    It returns n, a and the first line; the positions along w; the parts of the offsets in x and in y that do not depend
    on a line; and the mask.  In planes, n is the first plane of the tile.
    """
    pid = tl.program_id(0)
    O, I = (W, C) if ROWS else (N, W)
    tiles_i, tiles_o = tl.cdiv(I, BLOCK_I), tl.cdiv(O, BLOCK_O)
    # Programs that read the same lines for other positions along a are neighbours.
    inner = pid % tiles_i * BLOCK_I + tl.arange(0, BLOCK_I)[None, :]
    pid = pid // tiles_i
    a = pid % A
    pid = pid // A
    first = pid % tiles_o * BLOCK_O
    outer = tl.arange(0, BLOCK_O)[:, None]
    mask = (first + outer < O) & (inner < I)
    pid = pid // tiles_o
    runs = tl.cdiv(B, run)
    start = pid % runs * run
    if ROWS:
        n = pid // runs
        w = first + outer
        x_rest, y_rest = inner, inner
    else:
        n = first
        w = inner
        x_rest, y_rest = outer * x_size, outer * y_size
    return n.to(tl.int64), a, start, w, x_rest, y_rest, mask


@triton.jit
def upsample_fwd_kernel(x_ptr, y_ptr, N, C, x_pitch, y_pitch, run, a_small, a_large, a_step, a_shift, a_den,
                        b_small, b_large, b_step, b_shift, b_den, w_small, w_large, w_step, w_shift, w_den,
                        KA: tl.constexpr, KB: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
                        ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_O: tl.constexpr,
                        BLOCK_I: tl.constexpr):  # fmt: skip
    """Computes ``run`` lines of y.  A pitch is the distance of two positions in memory, and 1 in planes.

    An output reads KA, KB and KW values along the axes.  ALIGN divides the pitches and the channels of rows, or the
    positions of y along w.  Triton itself knows only whether these numbers are multiples of 16.
    """
    if ROWS:
        C, x_pitch, y_pitch = C // ALIGN * ALIGN, x_pitch // ALIGN * ALIGN, y_pitch // ALIGN * ALIGN
    else:
        w_large = w_large // ALIGN * ALIGN
    x_size, y_size = a_small * b_small * w_small, a_large * b_large * w_large
    n, a, start, w, x_rest, y_rest, mask = tile_of(
        N, C, a_large, b_large, w_large, x_size, y_size, run, ROWS, BLOCK_O, BLOCK_I
    )
    x_ptr += n * x_size * x_pitch
    y_ptr += n * y_size * y_pitch
    y_rest += w * y_pitch
    along_a = Axis(a_small, a_large, a_step, a_shift, a_den)
    along_b = Axis(b_small, b_large, b_step, b_shift, b_den)
    along_w = Axis(w_small, w_large, w_step, w_shift, w_den)
    lanes = Lanes(a, first_read(a, along_a, True), w, first_read(w, along_w, True), x_rest, mask)
    lines = Lines(x_ptr, x_pitch, b_small, w_small, along_a, along_w)
    HOW: tl.constexpr = How(KA, KW, ACC, True)
    i = position(start, along_b) // b_den
    if KB > 1:
        low = read_line(lines, i, lanes, HOW)
        high = read_line(lines, tl.minimum(i + 1, b_small - 1), lanes, HOW)
    for o in range(start, tl.minimum(start + run, b_large)):
        if KB > 1:
            s = position(o, along_b)
            while s >= (i + 1) * b_den:
                i += 1
                low = high
                high = read_line(lines, tl.minimum(i + 1, b_small - 1), lanes, HOW)
            y = add(weight_of(s, i, along_b, ACC) * low, weight_of(s, i + 1, along_b, ACC), high)
        else:
            y = read_line(lines, o, lanes, HOW)
        line = ((a * b_large + o) * w_large).to(tl.int64) * y_pitch
        tl.store(y_ptr + line + y_rest, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def upsample_bwd_kernel(dy_ptr, dx_ptr, N, C, dy_pitch, dx_pitch, run, a_small, a_large, a_step, a_shift, a_den,
                        b_small, b_large, b_step, b_shift, b_den, w_small, w_large, w_step, w_shift, w_den,
                        KA: tl.constexpr, KB: tl.constexpr, KW: tl.constexpr, ROWS: tl.constexpr,
                        ALIGN: tl.constexpr, ACC: tl.constexpr, BLOCK_O: tl.constexpr,
                        BLOCK_I: tl.constexpr):  # fmt: skip
    """Computes ``run`` lines of dx.  At most KA, KB and KW outputs read an input along the axes.

    ALIGN divides the pitches and the channels of rows, or the positions of dx along w.
    """
    if ROWS:
        C, dy_pitch, dx_pitch = C // ALIGN * ALIGN, dy_pitch // ALIGN * ALIGN, dx_pitch // ALIGN * ALIGN
    else:
        w_small = w_small // ALIGN * ALIGN
    dy_size, dx_size = a_large * b_large * w_large, a_small * b_small * w_small
    n, a, start, w, dy_rest, dx_rest, mask = tile_of(
        N, C, a_small, b_small, w_small, dy_size, dx_size, run, ROWS, BLOCK_O, BLOCK_I
    )
    dy_ptr += n * dy_size * dy_pitch
    dx_ptr += n * dx_size * dx_pitch + a * b_small * w_small * dx_pitch
    dx_rest += w * dx_pitch
    along_a = Axis(a_small, a_large, a_step, a_shift, a_den)
    along_b = Axis(b_small, b_large, b_step, b_shift, b_den)
    along_w = Axis(w_small, w_large, w_step, w_shift, w_den)
    lanes = Lanes(a, first_read(a, along_a, False), w, first_read(w, along_w, False), dy_rest, mask)
    lines = Lines(dy_ptr, dy_pitch, b_large, w_large, along_a, along_w)
    HOW: tl.constexpr = How(KA, KW, ACC, False)
    stop = tl.minimum(start + run, b_small)
    if KB > 1:
        # ``low`` and ``high`` are the gradients of inputs i and i + 1.
        i = start - 1
        low = tl.zeros((BLOCK_O, BLOCK_I), ACC)
        high = tl.zeros((BLOCK_O, BLOCK_I), ACC)
        # The first output at input ``stop``, or behind it.  Behind the last input there is none.
        end = tl.where(stop < b_small, (stop * b_den - b_shift + b_step - 1) // b_step, b_large)
        for o in range(first_reader(start, along_b), tl.minimum(end, b_large)):
            s = position(o, along_b)
            while s >= (i + 1) * b_den:
                if i >= start:
                    line = (i * w_small).to(tl.int64) * dx_pitch
                    tl.store(dx_ptr + line + dx_rest, low.to(dx_ptr.dtype.element_ty), mask=mask)
                i += 1
                low = high
                high = tl.zeros((BLOCK_O, BLOCK_I), ACC)
            dy = read_line(lines, o, lanes, HOW)
            low = add(low, weight_of(s, i, along_b, ACC), dy)
            high = add(high, weight_of(s, i + 1, along_b, ACC), dy)
        while i < stop:
            if i >= start:
                line = (i * w_small).to(tl.int64) * dx_pitch
                tl.store(dx_ptr + line + dx_rest, low.to(dx_ptr.dtype.element_ty), mask=mask)
            i += 1
            low = high
            high = tl.zeros((BLOCK_O, BLOCK_I), ACC)
    else:
        for o in range(start, stop):
            dx = read_line(lines, o, lanes, HOW)
            line = (o * w_small).to(tl.int64) * dx_pitch
            tl.store(dx_ptr + line + dx_rest, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@plan
def launcher(forward, shape, axes, pitches, dtype, device):
    """The launch for tensors of N x C, with three axes (small, large, step, shift, den, values, readers).

    ``pitches`` are those of the tensor that is read and of the result, or None for planes.
    """
    N, C = shape
    rows = pitches is not None
    N, C, pitches = (N, C, pitches) if rows else (N * C, 1, (1, 1))
    A, B, W = (axis[1 if forward else 0] for axis in axes)
    itemsize = dtype.itemsize
    tile = (TILE_BYTES if rows or forward else PLANES_BWD_TILE_BYTES) // itemsize
    O, I = (W, C) if rows else (N, W)
    block_i = row_lanes(C, 128 // itemsize) if rows else min(triton.next_power_of_2(W), tile)
    block_o = min(triton.next_power_of_2(O), tile // block_i)
    # Offsets in the planes of a tile are 32 bits wide.
    if not rows and block_o * max(math.prod(axis[k] for axis in axes) for k in (0, 1)) >= 2**31:
        block_o = 1
    walks = A * triton.cdiv(O, block_o) * triton.cdiv(I, block_i) * (N if rows else 1)
    # Lines of the smaller tensor stand for several lines of the other.
    least, most = (max(1, n * B // axes[1][1]) for n in (FEWEST_LINES, MOST_LINES))
    runs = triton.cdiv(PROGRAMS_PER_SM * multiprocessors(device), walks)
    run = min(max(triton.cdiv(B, runs), least), most, B)
    named = {f"K{letter}": axis[5 if forward else 6] for letter, axis in zip("ABW", axes, strict=True)}
    named |= {"ROWS": rows, "ALIGN": math.gcd(*((C, *pitches) if rows else (W,)), 16), "ACC": acc_dtype(dtype),
              "BLOCK_O": block_o, "BLOCK_I": block_i,
              "num_warps": warps_of(block_o * block_i, max(1, tile // THREADS))}  # fmt: skip
    sizes = (N, C, *pitches, run, *(number for axis in axes for number in axis[:5]))
    kernel = upsample_fwd_kernel if forward else upsample_bwd_kernel
    return Launcher(kernel, (walks * triton.cdiv(B, run),), sizes, named)


def upsample_fwd(x, y, axes, pitches):
    """Writes y.  ``launcher`` describes the arguments."""
    launcher(True, tuple(x.shape[:2]), axes, pitches, x.dtype, x.device)((x, y))


def upsample_bwd(dy, dx, axes, pitches):
    """Writes dx.  ``launcher`` describes the arguments."""
    launcher(False, tuple(dy.shape[:2]), axes, pitches, dy.dtype, dy.device)((dy, dx))
