"""A convolution of 3x3x3 taps for few channels, and the gradient of its input: stride 1, padding 1, 16 bit, rows.

    y[z, h, w, k] = sum over kd, kh, kw, c of  x[z + kd - 1, h + kh - 1, w + kw - 1, c] weight[k, c, kd, kh, kw]

x outside the volume is 0.  The gradient of x is the same convolution of dy, by the flipped weight with C and K
exchanged; ``ordered_weight`` does both.  Rows means channels_last_3d.

Each value of x is needed for 27 taps, and a library's kernel reads it from L2 for every tap.  Here a program owns TH x
TW positions of a plane and 32 output channels, and walks along the depth.  It loads a tile of x for each of the nine
taps (kh, kw) once, and multiplies it by the weights of all three kd in one product, into 128 columns of accumulators:

    columns   0 to  31    kd = 2    plane z - 1 of y, which is complete after plane z of x
    columns  32 to  63    kd = 1    plane z
    columns  64 to  95    kd = 0    plane z + 1
    columns  96 to 127    no weight: the width of the product is a power of two

After plane z of x, the first block is stored, the second block becomes the first, the third block becomes the second,
and the third block begins at 0.  One product of 128 columns replaces three of 32, because Triton waits for the end of
every product whose left operand lies in registers.

All weights stay in shared memory.  A tile of x goes from L1 to registers in 16-byte accesses, and the same threads use
it there as the left operand of Hopper's wgmma: ``operand`` gives its rows and channels other numbers, so that no value
changes threads.  The channels of the weights have the same numbers.  The sum does not depend on the order of channels,
and ``natural`` gives the rows and channels of the result their own numbers again.

The kernel takes 0.0 and 1.0 as arguments, which the compiler does not know.  Without them it makes code that waits:

    one     A tile is loaded one tap ahead, and is multiplied by 1.0 where it is used.  Without the product, the
            compiler copies the tile to the registers of wgmma where it is loaded, and so waits for memory at once.
    zero    It is added to the accumulators that move to another block.  Without the sum, the assembler renames
            registers while wgmma writes to them, and makes every wgmma wait for the one before (its warning C7514).

Both are exact.  Every output is one sum in a fixed order, which does not depend on the sizes of tiles and chunks.
"""

import torch
import triton
import triton.language as tl

from .launch import multiprocessors, registers_for
from .launcher import Launcher, plan

# The channels of a block.
LANES = tl.constexpr(32)
# The columns of a product.
COLUMNS = tl.constexpr(128)
# The most planes of y that a program computes, and the fewest if programs are too few for the device.  A chunk of
# planes reads two planes of x more than it writes.
MOST_PLANES, LEAST_PLANES = 64, 16
# Threads of a multiprocessor: each has 128 registers then.
THREADS = 512


@triton.jit
def operand(x, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """A tile as it is loaded -> the rows and channels that the same threads hold of the left operand of wgmma."""
    x = tl.reshape(x, (BLOCK // (16 * WARPS), 2, WARPS, 8, 4, 4, 2))
    return tl.reshape(tl.permute(x, (0, 2, 1, 3, 5, 4, 6)), (BLOCK, 32))


@triton.jit
def natural(y, BLOCK: tl.constexpr, WARPS: tl.constexpr):
    """The inverse of ``operand``, for a block of the result."""
    y = tl.reshape(y, (BLOCK // (16 * WARPS), WARPS, 2, 8, 4, 4, 2))
    return tl.reshape(tl.permute(y, (0, 2, 1, 3, 5, 4, 6)), (BLOCK, 32))


@triton.jit
def channel_of(i):
    """The channel that ``operand`` puts at place i of 32.  The function is its own inverse."""
    return i // 2 % 4 * 8 + i // 8 * 2 + i % 2


@triton.jit
def load_tile(x_ptrs, inside, z, D, H, W, STEP: tl.constexpr, C: tl.constexpr):
    """The tile of one step (a tap and 32 channels) of plane z.  The steps after the last one belong to plane z + 1."""
    GROUPS: tl.constexpr = (C + 31) // 32
    STEPS: tl.constexpr = 9 * GROUPS
    TAP: tl.constexpr = STEP % STEPS // GROUPS
    FIRST: tl.constexpr = STEP % GROUPS * 32
    # A plane of the size of the tile: Triton's interpreter combines blocks of truth values with such blocks only.
    plane = z + STEP // STEPS + tl.zeros_like(inside)
    mask = (((inside >> TAP) & 1) != 0) & (plane >= 0) & (plane < D)
    mask = mask[:, None]
    if C % 32 != 0:
        mask = mask & (FIRST + tl.arange(0, 32) < C)[None, :]
    offset = ((z + STEP // STEPS) * H + (TAP // 3 - 1)) * W + (TAP % 3 - 1)
    return tl.load(x_ptrs + (offset * C + FIRST), mask=mask, other=0.0)


@triton.jit
def conv3d_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, zero, one, D, H, W, tiles_h, tiles_w, planes, C: tl.constexpr,
                  K: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, WARPS: tl.constexpr):  # fmt: skip
    STEPS: tl.constexpr = 9 * ((C + 31) // 32)
    BLOCK: tl.constexpr = TH * TW
    pid = tl.program_id(0)
    first_k = tl.program_id(1) * LANES
    one = (tl.zeros((1, 1), tl.float32) + one).to(x_ptr.dtype.element_ty)
    i = tl.arange(0, BLOCK)
    c = tl.arange(0, LANES)
    k = first_k + c
    h = pid // tiles_w % tiles_h * TH + i // TW
    w = pid % tiles_w * TW + i % TW
    z_begin = pid // (tiles_w * tiles_h) * planes
    z_end = tl.minimum(z_begin + planes, D)
    # Bit t says whether tap t of a position lies inside its plane.
    inside = tl.zeros_like(i)
    for t in tl.static_range(9):
        within = (h + (t // 3 - 1) >= 0) & (h + (t // 3 - 1) < H) & (w + (t % 3 - 1) >= 0) & (w + (t % 3 - 1) < W)
        inside |= within.to(tl.int32) << t
    # int64: a batch may have 2**31 elements or more.  A sample has fewer.
    sample = tl.program_id(2).to(tl.int64) * D * H * W
    x_ptrs = x_ptr + sample * C + ((h * W + w) * C)[:, None] + c[None, :]
    y_ptrs = y_ptr + sample * K + ((h * W + w) * K)[:, None] + k[None, :]
    mask = ((h < H) & (w < W))[:, None]
    if K % 32 != 0:
        mask = mask & (k < K)[None, :]
    w_ptrs = w_ptr + tl.program_id(1) * (STEPS * LANES * COLUMNS) + (c * COLUMNS)[:, None]
    weights = ()
    for s in tl.static_range(STEPS):
        tile = tl.load(w_ptrs + (s * LANES * COLUMNS + tl.arange(0, COLUMNS)[None, :]))
        # Triton knows no `(*weights, tile)`.
        weights = weights + (tile,)  # type: ignore[assignment]  # noqa: RUF005

    z = z_begin - 1
    x = load_tile(x_ptrs, inside, z, D, H, W, 0, C)
    acc = tl.zeros((BLOCK, COLUMNS), tl.float32)
    # Triton 3.6 cannot pipeline a `for` over these products, and has nothing to gain from it.
    while z <= z_end:
        for s in tl.static_range(STEPS):
            x_next = load_tile(x_ptrs, inside, z, D, H, W, s + 1, C)
            acc = tl.dot(operand(x * one, BLOCK, WARPS), weights[s], acc)
            x = x_next
        # Splits the blocks 0, 1, 2, 3 into 0, 2 and 1, 3.
        even, odd = tl.split(tl.permute(tl.reshape(acc, (BLOCK, 2, 2, LANES)), (0, 3, 1, 2)))
        acc0, acc2 = tl.split(even)
        acc1, _ = tl.split(odd)
        if z > z_begin:
            if bias_ptr is not None:
                of_block = first_k + channel_of(c)
                acc0 += tl.load(bias_ptr + of_block, mask=of_block < K, other=0.0).to(tl.float32)[None, :]
            y = natural(acc0.to(y_ptr.dtype.element_ty), BLOCK, WARPS)
            tl.store(y_ptrs + (z - 1) * H * W * K, y, mask=mask)
        empty = tl.zeros((BLOCK, LANES), tl.float32)
        even = tl.join(acc1 + zero, empty)
        odd = tl.join(acc2 + zero, empty)
        acc = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (BLOCK, COLUMNS))
        z += 1


@triton.jit
def conv3d_weight_kernel(weight_ptr, w_ptr, stride_k, stride_c, stride_tap, C: tl.constexpr, K: tl.constexpr,
                         FLIP: tl.constexpr):  # fmt: skip
    """Writes one step of one block of output channels, as ``conv3d_kernel`` reads it: (32, 128)."""
    GROUPS: tl.constexpr = (C + 31) // 32
    step = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.arange(0, LANES)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    c = step % GROUPS * LANES + channel_of(row)
    k = block * LANES + channel_of(column % LANES)
    tap = (2 - column // LANES) * 9 + step // GROUPS
    mask = (c < C) & (k < K) & (column < 3 * LANES)
    if FLIP:
        tap = 26 - tap
    weight = tl.load(weight_ptr + k * stride_k + c * stride_c + tap * stride_tap, mask=mask, other=0.0)
    first = (block * tl.num_programs(0) + step) * LANES * COLUMNS
    tl.store(w_ptr + first + row * COLUMNS + column, weight)


def ordered_weight(weight, backward):
    """The weights (blocks of K, steps, 32, 128) for ``conv3d``, from (K, C, 3, 3, 3) without gaps in its memory.

    ``backward``: for the gradient of the input, whose output channels are those of the input.
    """
    K, C = weight.shape[:2]
    stride_k, stride_c = weight.stride()[:2]
    if backward:
        K, C, stride_k, stride_c = C, K, stride_c, stride_k
    grid = 9 * triton.cdiv(C, 32), triton.cdiv(K, 32)
    w = torch.empty(grid[1], grid[0], 32, 128, dtype=weight.dtype, device=weight.device)
    weight_plan(grid, stride_k, stride_c, weight.stride(4), C, K, backward)((weight, w))
    return w


@plan
def weight_plan(grid, stride_k, stride_c, stride_tap, C, K, flip):
    constants = {"C": C, "K": K, "FLIP": flip, "num_warps": 4}
    return Launcher(conv3d_weight_kernel, grid, (stride_k, stride_c, stride_tap), constants)


@plan
def conv3d_plan(shape, K, device):
    N, C, D, H, W = shape
    # The weights of 64 channels leave room for one program in a multiprocessor, which takes all threads then.
    tile, warps = ((4, 32), 8) if C <= 32 else ((8, 32), 16)
    tiles_h, tiles_w = triton.cdiv(H, tile[0]), triton.cdiv(W, tile[1])
    programs = tiles_h * tiles_w * triton.cdiv(K, 32) * N
    planes = MOST_PLANES if C <= 32 else MOST_PLANES // 2
    # Shorter chunks read more.  They are taken if a quarter of the multiprocessors would have no program.
    while planes > LEAST_PLANES and programs * triton.cdiv(D, planes) < 0.75 * multiprocessors(device):
        planes //= 2
    grid = (tiles_h * tiles_w * triton.cdiv(D, planes), triton.cdiv(K, 32), N)
    constants = {"C": C, "K": K, "TH": tile[0], "TW": tile[1], "WARPS": warps, "num_warps": warps,
                 **registers_for(THREADS)}  # fmt: skip
    return Launcher(conv3d_kernel, grid, (D, H, W, tiles_h, tiles_w, planes), constants)


def conv3d(x, w, bias, y):
    """Writes to ``y`` the convolution of ``x`` by ordered weights, plus ``bias`` or None; x and y are dense rows."""
    conv3d_plan(x.shape, y.shape[1], x.device)((x, w, bias, y), 0.0, 1.0)
