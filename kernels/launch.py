"""Blocks, splits and warps of a normalisation kernel, from shape and device alone: nothing is tuned per call."""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

# a tile of the split kernels: two 16-byte loads a thread and half-precision tensor
TILE_BYTES = 8192
# largest slab that one program keeps in registers, in bytes of the tensor: x alone (forward), z beside dz (backward)
ONCHIP_FWD, ONCHIP_BWD = 65536, 32768
# thread blocks a multiprocessor, so that loads of one overlap with the arithmetic of another
PROGRAMS_PER_SM = 4
MAX_SPLITS = 256
# partial results a channel that every program of the second launch still merges for itself
MAX_PARTIALS = 16
# stands in for a GPU's where kernels are compiled or interpreted without one
DEFAULT_SMS = 132


class Layout(NamedTuple):
    """How a tensor lies in memory: see ``kernels/tile.py``.  For rows, N counts samples times positions and S is 1."""

    rows: bool
    N: int
    C: int
    S: int


class Blocks(NamedTuple):
    """Grid and block sizes of a launch."""

    groups: int
    splits: int
    tiles_per_split: int
    meta: dict


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return DEFAULT_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def acc_dtype(dtype: torch.dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_lanes(C: int, at_most: int) -> int:
    """Channels a program: the power of two that leaves the fewest lanes idle, the larger one of equals."""
    candidates = [at_most]
    while candidates[-1] > 16:
        candidates.append(candidates[-1] // 2)
    candidates = [lanes for lanes in candidates if lanes < 2 * C] or [triton.next_power_of_2(C)]
    return min(candidates, key=lambda lanes: (triton.cdiv(C, lanes) * lanes, -lanes))


def warps(elements: int, per_thread: int) -> int:
    return min(16, max(1, elements // (32 * per_thread)))


def onchip_blocks(layout: Layout, dtype: torch.dtype, capacity: int) -> Blocks | None:
    """One program a channel (planes) or 32 bytes of channels (rows), or None where such a slab exceeds the capacity."""
    if layout.rows:
        block_l = min(triton.next_power_of_2(layout.C), 32 // dtype.itemsize)
        # an address for every vector of 16 bytes leaves fewer registers for values
        capacity = min(capacity, ONCHIP_BWD)
    else:
        block_l = triton.next_power_of_2(layout.S)
    block_n = triton.next_power_of_2(layout.N)
    if block_n * block_l * dtype.itemsize > capacity:
        return None
    groups = triton.cdiv(layout.C, block_l) if layout.rows else layout.C
    meta = {"ROWS": layout.rows, "BLOCK_N": block_n, "BLOCK_L": block_l, "num_warps": warps(block_n * block_l, 16)}
    return Blocks(groups, 1, 1, meta)


def split_blocks(layout: Layout, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Tiles of ``TILE_BYTES``, dealt to as many programs as fill the device, in runs of adjacent tiles."""
    tile = TILE_BYTES // dtype.itemsize
    if layout.rows:
        block_l = row_lanes(layout.C, 128 // dtype.itemsize)
        groups = triton.cdiv(layout.C, block_l)
    else:
        block_l = min(triton.next_power_of_2(layout.S), tile)
        groups = layout.C
    block_n = min(triton.next_power_of_2(layout.N), max(1, tile // block_l))
    tiles = triton.cdiv(layout.N, block_n) * (1 if layout.rows else triton.cdiv(layout.S, block_l))
    splits = min(tiles, MAX_SPLITS, max(1, PROGRAMS_PER_SM * multiprocessors(device) // groups))
    tiles_per_split = triton.cdiv(tiles, splits)
    meta = {"ROWS": layout.rows, "BLOCK_N": block_n, "BLOCK_L": block_l, "num_warps": warps(tile, 16)}
    return Blocks(groups, triton.cdiv(tiles, tiles_per_split), tiles_per_split, meta)
