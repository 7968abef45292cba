"""z = max over windows of x, and codes: one byte for each z, the position in its window that z came from.

Kept for backward: the codes.  Position t = (td KH + th) KW + tw of window o is at i = o stride - padding + t dilation
in every dimension.  As in PyTorch, the first of equal values wins, and the last NaN wins; padding never wins.

    dx[i] = sum of dz[o] over the windows o that hold i at position t and have codes[o] = t

Backward gathers, so it needs no atomics, and writes every dx once, with a fixed order of sums.  A cell is the block of
``stride`` adjacent positions of x in each dimension.  A program owns a tile of cells, and reads each window that
reaches into a cell once; so it reads dz and codes only once if windows do not overlap.

A tile is (rows, lanes); lanes are adjacent in memory:

    planes (contiguous)       rows count (n, c, d, h), lanes are positions along w
    rows   (channels_last)    rows count (n, d, h, w), lanes are channels
"""

import math
from collections import namedtuple

import triton
import triton.language as tl

from .conv import constants_of, three
from .launch import acc_dtype, row_lanes, warps_of
from .launcher import Launcher, plan
from .tile import tiles_of

# The bytes of x that a program of forward or backward covers.
TILE_BYTES = 8192
# The number of positions of a window that are unrolled, so that their loads overlap.  On gfx942 the masks of eight
# positions would spill.
MAX_TAPS = tl.constexpr(4)

# A value for each dimension.
Each = namedtuple("Each", "d h w")
# The size, stride, padding and dilation of windows along one dimension.  Backward adds the windows that reach into cell
# q: J of them, from q + F on.
Window = namedtuple("Window", "K S P DIL F J", defaults=[tl.constexpr(None), tl.constexpr(None)])
# The sizes of the tensor that is read, with C = 1 for planes, and the number of lanes that the tiles cut.
Size = namedtuple("Size", "D H W C L")
# Positions in this tensor; ``plane`` is n (or n C + c).
Position = namedtuple("Position", "plane d h w c")


@triton.jit
def tile_position(D, H, W, L, ROWS: tl.constexpr, INDEX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):
    """The rows (BLOCK_R, 1) and lanes (1, BLOCK_L) of the program's tile in a tensor of D x H x W.

    It also returns n (or n C + c), d, h and w of each element.
    """
    tiles_l = tiles_of(L, BLOCK_L)
    pid = tl.program_id(0)
    row = (pid // tiles_l).to(INDEX) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    lane = (pid % tiles_l) * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    if ROWS:
        w = row % W
        line = row // W
    else:
        w = lane
        line = row
    h = line % H
    d = line // H % D
    return row, lane, line // H // D, d, h, w


@triton.jit
def first_inside(o, WINDOW):
    """The first position of window o outside the padding."""
    if WINDOW.P > 0:
        first = tl.maximum(WINDOW.P - o * WINDOW.S + (WINDOW.DIL - 1), 0) // WINDOW.DIL
    else:
        first = o * 0
    return first


@triton.jit
def take(best, code, v, t):
    """Updates the maximum and its code with position t, whose value is v.  Positions must come in ascending order."""
    wins = (v > best) | (v != v)
    return tl.where(wins, v, best), tl.where(wins, t, code)


@triton.jit
def take_tap(x_ptr, best, code, t, begin, size, WINDOW, in_rows, in_lanes, PAIRS: tl.constexpr):
    """Loads position t of every window of the tile and calls ``take``.

    With PAIRS it loads both columns of row t of windows that are 2 wide.
    """
    columns: tl.constexpr = 1 if PAIRS else WINDOW.w.K
    d = begin.d + t // (WINDOW.h.K * columns) * WINDOW.d.DIL
    h = begin.h + t // columns % WINDOW.h.K * WINDOW.h.DIL
    inside = in_rows & (d >= 0) & (d < size.D) & (h >= 0) & (h < size.H)
    line = (begin.plane * size.D + d) * size.H + h
    if PAIRS:
        # One wide load that is split replaces two loads of every other element.
        BLOCK_L: tl.constexpr = best.shape[1]
        w = tl.program_id(0) % tiles_of(size.L, BLOCK_L) * (2 * BLOCK_L) + tl.arange(0, 2 * BLOCK_L)[None, :]
        v = tl.load(x_ptr + line * size.W + w, mask=inside & (w < size.W), other=float("-inf")).to(best.dtype)
        left, right = tl.split(tl.reshape(v, (best.shape[0], BLOCK_L, 2)))
        best, code = take(best, code, left, 2 * t)
        best, code = take(best, code, right, 2 * t + 1)
    else:
        w = begin.w + t % WINDOW.w.K * WINDOW.w.DIL
        inside = inside & in_lanes & (w >= 0) & (w < size.W)
        x_ptrs = x_ptr + (line * size.W + w) * size.C + begin.c
        v = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(best.dtype)
        best, code = take(best, code, v, t)
    return best, code


@triton.jit
def max_pool_fwd_kernel(x_ptr, z_ptr, code_ptr, M, D, H, W, OD, OH, OW, C, taps,
                        KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr,
                        SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr,
                        DH: tl.constexpr, DW: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
                        ALIGN: tl.constexpr, INDEX: tl.constexpr, ACC: tl.constexpr, BLOCK_R: tl.constexpr,
                        BLOCK_L: tl.constexpr):  # fmt: skip
    """Computes M rows of lanes of z, and their codes.  C is 1 for planes.

    ALIGN divides the number of lanes.  Triton itself knows only whether that number is a multiple of 16.
    """
    if ROWS:
        C = C // ALIGN * ALIGN
        L = C
    else:
        OW = OW // ALIGN * ALIGN
        L = OW
    row, lane, plane, od, oh, ow = tile_position(OD, OH, OW, L, ROWS, INDEX, BLOCK_R, BLOCK_L)
    in_tile = (row < M) & (lane < L)
    # The plane is int64, because offsets exceed 2**31 at 64 x 64 x 1024 x 1024.
    begin = Position(plane.to(tl.int64), od * SD - PD, oh * SH - PH, ow * SW - PW, lane if ROWS else 0)
    size = Size(D, H, W, C, L)
    WINDOW: tl.constexpr = Each(Window(KD, SD, PD, DD), Window(KH, SH, PH, DH), Window(KW, SW, PW, DW))

    best = tl.full((BLOCK_R, BLOCK_L), float("-inf"), ACC)
    # This is the code if all values are -inf.
    first = (first_inside(od, WINDOW.d) * KH + first_inside(oh, WINDOW.h)) * KW + first_inside(ow, WINDOW.w)
    code = tl.zeros((BLOCK_R, BLOCK_L), tl.int32) + first.to(tl.int32)
    if KD * KH * KW <= MAX_TAPS:
        for t in tl.static_range(KD * KH * KW // (2 if PAIRS else 1)):
            best, code = take_tap(x_ptr, best, code, t, begin, size, WINDOW, row < M, lane < L, PAIRS)
    else:
        for t in range(taps):
            best, code = take_tap(x_ptr, best, code, t, begin, size, WINDOW, row < M, lane < L, PAIRS)
    offs = row.to(tl.int64) * L + lane
    tl.store(z_ptr + offs, best.to(z_ptr.dtype.element_ty), mask=in_tile)
    if code_ptr is not None:
        tl.store(code_ptr + offs, code.to(tl.uint8), mask=in_tile)


@triton.jit
def tap_of(a, j, WINDOW):
    """The position (0 to K - 1) of the a-th element of cell q in window q + j, and whether it is inside the window."""
    steps = a + WINDOW.P - j * WINDOW.S
    return steps // WINDOW.DIL, (steps >= 0) & (steps % WINDOW.DIL == 0) & (steps < WINDOW.K * WINDOW.DIL)


@triton.jit
def add_window(dz_ptr, code_ptr, acc, j, cell, element, in_tile, size, WINDOW, ROWS: tl.constexpr):
    """Adds dz of the j-th window that reaches into each cell to the position of its maximum, if that is in the cell."""
    jd = WINDOW.d.F + j // (WINDOW.h.J * WINDOW.w.J)
    jh = WINDOW.h.F + j // WINDOW.w.J % WINDOW.h.J
    jw = WINDOW.w.F + j % WINDOW.w.J
    od, oh, ow = cell.d + jd, cell.h + jh, cell.w + jw
    inside = in_tile & (od >= 0) & (od < size.D) & (oh >= 0) & (oh < size.H) & (ow >= 0) & (ow < size.W)
    offs = (((cell.plane * size.D + od) * size.H + oh) * size.W + ow) * size.C + cell.c
    dz = tl.load(dz_ptr + offs, mask=inside, other=0.0).to(acc.dtype)
    code = tl.load(code_ptr + offs, mask=inside, other=0).to(tl.int32)
    td, is_d = tap_of(element.d, jd, WINDOW.d)
    th, is_h = tap_of(element.h, jh, WINDOW.h)
    tw, is_w = tap_of(element.w, jw, WINDOW.w)
    t = tl.where(is_d & is_h & is_w, (td * WINDOW.h.K + th) * WINDOW.w.K + tw, -1)
    if ROWS:
        # The shape is (rows, positions of the cell, lanes).
        dz, code = dz[:, None, :], code[:, None, :]
    else:
        # The shape is (rows, positions along d and h, lanes, positions along w).
        dz, code = dz[:, None, :, None], code[:, None, :, None]
    return acc + tl.where(code == t, dz, 0.0)


@triton.jit
def max_pool_bwd_kernel(dz_ptr, code_ptr, dx_ptr, M, D, H, W, OD, OH, OW, QD, QH, QW, C, windows,
                        KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SD: tl.constexpr, SH: tl.constexpr,
                        SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, DD: tl.constexpr,
                        DH: tl.constexpr, DW: tl.constexpr, JD: tl.constexpr, JH: tl.constexpr, JW: tl.constexpr,
                        FD: tl.constexpr, FH: tl.constexpr, FW: tl.constexpr, CELL: tl.constexpr,
                        CELL_W: tl.constexpr, ROWS: tl.constexpr, ALIGN: tl.constexpr, INDEX: tl.constexpr,
                        ACC: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """Computes dx for M rows of lanes of QD x QH x QW cells.  Windows q + F to q + F + J - 1 reach into cell q.

    CELL is the number of positions in a cell, rounded up to a power of two.  For planes, CELL counts positions along d
    and h, and CELL_W counts positions along w.  ALIGN divides C (rows) or OW (planes).
    """
    if ROWS:
        C = C // ALIGN * ALIGN
        L = C
    else:
        OW = OW // ALIGN * ALIGN
        L = QW
    row, lane, plane, qd, qh, qw = tile_position(QD, QH, QW, L, ROWS, INDEX, BLOCK_R, BLOCK_L)
    in_tile = (row < M) & (lane < L)
    plane = plane.to(tl.int64)
    cell = Position(plane, qd, qh, qw, lane if ROWS else 0)
    size = Size(OD, OH, OW, C, L)
    WINDOW: tl.constexpr = Each(
        Window(KD, SD, PD, DD, FD, JD), Window(KH, SH, PH, DH, FH, JH), Window(KW, SW, PW, DW, FW, JW)
    )

    a = tl.arange(0, CELL)
    if ROWS:
        acc = tl.zeros((BLOCK_R, CELL, BLOCK_L), ACC)
        ad, ah, aw = (a // (SH * SW))[None, :, None], (a // SW % SH)[None, :, None], (a % SW)[None, :, None]
    else:
        acc = tl.zeros((BLOCK_R, CELL, BLOCK_L, CELL_W), ACC)
        ad, ah = (a // SH)[None, :, None, None], (a % SH)[None, :, None, None]
        aw = tl.arange(0, CELL_W)[None, None, None, :]
    # The length of this loop is hidden from the compiler, because four unrolled windows of a channels_last tile spill
    # on gfx942.
    for j in range(windows):
        acc = add_window(dz_ptr, code_ptr, acc, j, cell, Each(ad, ah, aw), in_tile, size, WINDOW, ROWS)

    # Positions now get three axes (rows, positions of the cell, lanes); in planes all positions along w are lanes.
    if ROWS:
        ad, ah, aw = (a // (SH * SW))[None, :], (a // SW % SH)[None, :], (a % SW)[None, :]
        d, h, w = qd * SD + ad, qh * SH + ah, qw * SW + aw
        inside = (row < M) & (a < SD * SH * SW)[None, :] & (d < D) & (h < H) & (w < W)
        line = (((plane * D + d) * H + h) * W + w) * C
        mask = inside[:, :, None] & (lane < L)[:, None, :]
        offs = line[:, :, None] + lane[:, None, :]
    else:
        acc = tl.reshape(acc, (BLOCK_R, CELL, BLOCK_L * CELL_W))
        ad, ah = (a // SH)[None, :], (a % SH)[None, :]
        d, h = qd * SD + ad, qh * SH + ah
        inside = (row < M) & (a < SD * SH)[None, :] & (d < D) & (h < H)
        line = ((plane * D + d) * H + h) * W
        l = tl.arange(0, BLOCK_L * CELL_W)
        tiles_l = tiles_of(L, BLOCK_L)
        w = tl.program_id(0) % tiles_l * (BLOCK_L * SW)
        if CELL_W == SW:
            w += l
            mask = inside[:, :, None] & (w < W)[None, None, :]
        else:
            w += l // CELL_W * SW + l % CELL_W
            mask = inside[:, :, None] & ((w < W) & (l % CELL_W < SW))[None, None, :]
        offs = line[:, :, None] + w[None, None, :]
    tl.store(dx_ptr + offs, acc.to(dx_ptr.dtype.element_ty), mask=mask)


def blocks(rows: int, lanes: int, along: int, tile: int) -> tuple[int, dict]:
    """The grid and constants for a number of rows and lanes.

    ``along`` is the number of adjacent lanes that are read at once, ``tile`` the number of elements in a tile.
    """
    block_l = row_lanes(lanes, along)
    block_r = max(1, min(triton.next_power_of_2(rows), tile // block_l))
    meta = {"BLOCK_R": block_r, "BLOCK_L": block_l}
    return triton.cdiv(rows, block_r) * triton.cdiv(lanes, block_l), meta


@plan
def fwd_plan(shape, out_shape, dtype, rows, kernel, geometry):
    C = shape[1]
    size, out = three(shape[2:], 1), three(out_shape[2:], 1)
    L = C if rows else out[2]
    M = math.prod(out_shape) // L
    named = constants_of(kernel, *geometry[:3])
    pairs = not rows and (named["KW"], named["SW"], named["PW"], named["DW"]) == (2, 2, 0, 1)
    # A program reads 128 bytes of adjacent channels, or of x along w.
    along = 128 // dtype.itemsize
    programs, meta = blocks(M, L, along, TILE_BYTES // dtype.itemsize // 2)
    named |= {"PAIRS": pairs, "ROWS": rows, "ALIGN": math.gcd(L, 16), "INDEX": index_of(M, meta),
              "ACC": acc_dtype(dtype), **meta, "num_warps": warps_of(meta["BLOCK_R"] * meta["BLOCK_L"], 8)}  # fmt: skip
    sizes = (M, *size, *out, C if rows else 1, math.prod(kernel) // (2 if pairs else 1))
    return Launcher(max_pool_fwd_kernel, (programs,), sizes, named)


def max_pool_fwd(x, z, codes, rows, kernel, geometry):
    """Writes z, and the codes unless they are None.  All tensors are dense: channels_last (``rows``) or contiguous."""
    fwd_plan(tuple(x.shape), tuple(z.shape), x.dtype, rows, kernel, geometry)((x, z, codes))


@plan
def bwd_plan(shape, out_shape, dtype, rows, kernel, geometry):
    N, C = shape[:2]
    size, out = three(shape[2:], 1), three(out_shape[2:], 1)
    named = constants_of(kernel, *geometry[:3])
    cells = []
    for axis, n in zip("DHW", size, strict=True):
        K, S, P, D = (named[letter + axis] for letter in "KSPD")
        # Windows q + first to q + last reach into cell q.
        first, last = -(((K - 1) * D - P) // S), (S - 1 + P) // S
        named |= {f"F{axis}": first, f"J{axis}": last - first + 1}
        cells.append(triton.cdiv(n, S))
    S = named["SD"] * named["SH"] * named["SW"]
    cell = triton.next_power_of_2(S if rows else named["SD"] * named["SH"])
    cell_w = 1 if rows else triton.next_power_of_2(named["SW"])
    L = C if rows else cells[2]
    M = N * math.prod(cells) if rows else N * C * cells[0] * cells[1]
    along = max(1, 128 // dtype.itemsize // cell_w)
    programs, meta = blocks(M, L, along, max(1, TILE_BYTES // dtype.itemsize // (cell * cell_w)))
    windows = named["JD"] * named["JH"] * named["JW"]
    # This is the number of values of dx per thread for which it reads 16 bytes of dz at a time.  It is smaller if a
    # thread holds many windows, and in rows, because 64 values of rows spill under Triton 3.6.
    most = 64 if windows == 1 and not rows else 32
    per_thread = min(most, cell * cell_w * (16 // dtype.itemsize))
    named |= {"CELL": cell, "CELL_W": cell_w, "ROWS": rows, "ALIGN": math.gcd(C if rows else out[2], 16),
              "INDEX": index_of(M, meta), "ACC": acc_dtype(dtype), **meta,
              "num_warps": warps_of(meta["BLOCK_R"] * meta["BLOCK_L"] * cell * cell_w, per_thread)}  # fmt: skip
    return Launcher(max_pool_bwd_kernel, (programs,), (M, *size, *out, *cells, C if rows else 1, windows), named)


def max_pool_bwd(dz, codes, dx, rows, kernel, geometry):
    """Writes dx.  All tensors are dense: channels_last (``rows``) or contiguous."""
    bwd_plan(tuple(dx.shape), tuple(dz.shape), dx.dtype, rows, kernel, geometry)((dz, codes, dx))


def index_of(M: int, meta: dict):
    """The integer type for the index of a row, where M rows are rounded up to whole tiles."""
    return tl.int64 if M + meta["BLOCK_R"] >= 2**31 else tl.int32
