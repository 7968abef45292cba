"""Geometry and blocks of the implicit-GEMM convolution.

The blocks depend only on shapes, dtype and device; no call is tuned.
"""

import torch
import triton

from .launch import Blocks, least_idle, multiprocessors, on_amd, registers_for, warps_of

# Programs per multiprocessor.  With several waves, programs that end early cost less.  Fewer programs leave fewer
# partial statistics.
PROGRAMS_PER_SM = 8
# Positions of the output (rows of the matrix product) in a tile.
TILE_ROWS = 128
# tl.dot needs at least 16 entries along the reduced dimension.
MIN_REDUCED = 16
STAGES = 3


def three(values: tuple[int, ...], first: int) -> tuple[int, int, int]:
    """The values of two or three spatial dimensions as three values; ``first`` is used for a missing dimension."""
    d, h, w = values if len(values) == 3 else (first, *values)
    return d, h, w


def constants_of(kernel: tuple[int, ...], *window: tuple[int, ...]) -> dict[str, int]:
    """The constexprs of a kernel's taps (KD to KW), stride (SD to SW), padding (PD to PW) and dilation (DD to DW)."""
    named: dict[str, int] = {}
    for letter, values in zip("KSPD", (kernel, *window), strict=True):
        each = three(values, 0 if letter == "P" else 1)
        named |= {letter + axis: value for axis, value in zip("DHW", each, strict=True)}
    return named


def conv_blocks(
    M: int,
    w_shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    tensor_cores: bool,
    device: torch.device,
    affine: bool = False,
    rows: bool = True,
) -> Blocks:
    """The blocks for M output positions.  ``w_shape`` begins with the output channels, and the inputs of a group.

    The grid has a program for each of ``groups`` tiles of output channels and each run of tiles of rows.

    ``affine`` says that the epilogue has a scale and a shift; ``rows``, that the input is channels_last.
    """
    K, C = w_shape[0] // groups, w_shape[1]
    # A swizzled row of shared memory holds 128 bytes of channels.  Without tensor cores both operands are in registers,
    # and operands of 32 channels would spill.
    block_c = min(max(MIN_REDUCED, triton.next_power_of_2(C)), 128 // dtype.itemsize if tensor_cores else MIN_REDUCED)
    # On sm_100, the scale and shift of 128 channels would take 128 registers per thread beside the product, and
    # hundreds of bytes would spill.  On AMD's GPUs so would the addresses of planes.
    planes_on_amd = not rows and on_amd()
    block_k = least_idle((64, 32, 16) if affine or planes_on_amd or not tensor_cores else (128, 64, 32, 16), K)
    tiles = triton.cdiv(M, TILE_ROWS) * triton.cdiv(K, block_k) * groups
    block_m = TILE_ROWS if tiles >= multiprocessors(device) else TILE_ROWS // 2
    # With 4 warps the epilogue of a 128 x 64 tile spills on sm_80 and sm_100, and so does a 128 x 16 tile in fp32.
    num_warps = 8 if block_m * block_k >= 128 * (16 if dtype == torch.float32 else 64) else 4
    meta = {"BLOCK_M": block_m, "BLOCK_K": block_k, "BLOCK_C": block_c, "num_warps": num_warps}
    meta["num_stages"] = 2 if planes_on_amd else STAGES
    if not tensor_cores:
        # A thread loads 16 bytes of x at least; AMD's warps have twice as many threads.
        meta["num_warps"] = min(num_warps, warps_of(block_m * block_c, 16 // dtype.itemsize))
        if not affine:
            # By itself the compiler of sm_90 takes 128 registers, so that two programs are resident, and spills.
            meta |= registers_for(256)
    # The tiles are distributed over as many programs as fill the device.
    tiles, channel_tiles = triton.cdiv(M, block_m), triton.cdiv(K, block_k) * groups
    splits = min(tiles, max(1, PROGRAMS_PER_SM * multiprocessors(device) // channel_tiles))
    tiles_per_split = triton.cdiv(tiles, splits)
    return Blocks(channel_tiles, triton.cdiv(tiles, tiles_per_split), tiles_per_split, meta)
