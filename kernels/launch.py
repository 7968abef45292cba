"""Blocks, splits and warps of a normalisation kernel.  They depend only on shape, dtype and device; no call is tuned.

Here and in the launchers, ``layout`` is a ``Layout`` of ``fusedseg/ops/layout.py``.  ``tile.py`` explains its sizes.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .triton_names import driver, interpreted

# Bytes of a tile of the split kernels, for each tensor that they read.  In any dtype these are two 16-byte loads for
# each of THREADS threads.  The statistics kernel reads one tensor only, and makes four loads at a time if no tile is
# cut short.
TILE_BYTES, STATS_TILE_BYTES, THREADS = 8192, 16384, 256
# The largest slab that one program keeps in registers, in bytes of one tensor.  Forward holds x; backward holds z and
# dz.  PER_THREAD is the number of values per thread.
ONCHIP_FWD, ONCHIP_BWD, PER_THREAD = 65536, 32768, 16
# The same where an access takes fewer than four bytes: a thread makes 16 loads of each tensor, and has registers for
# their addresses only if programs are smaller.
ODD_TILE_BYTES, ODD_THREADS = 4096, 128
# Programs per multiprocessor, which has REGISTERS registers.  The loads of one program overlap with the arithmetic of
# another.  If there were more programs than the registers allow at once, the last programs would run alone at the end.
# In backward of rows there are fewer programs, because a thread holds parameters for every channel of its vector.
# Where it reads THREE large tensors, the third of which is another gradient or a residual, two programs have as many
# bytes under way as three that read two.
PROGRAMS_PER_SM, ROWS_PER_SM, ROWS_OF_THREE_PER_SM, REGISTERS = 4, 3, 2, 65536
# The largest number of kept channels of rows whose values every thread of backward loads.
MAX_COLUMNS = 4
# MAX_PARTIALS is the largest number of partial results of a channel that every program of the second launch merges for
# itself.  A channel group of up to FEW_BYTES is split over at most MAX_PARTIALS programs, so that no separate launch is
# needed to merge.
MAX_PARTIALS, FEW_BYTES = 16, 2**20
# The tiles whose time a program takes to load its parameters and to merge parts.
START_TILES = 2
# Tensors of fewer bytes stay in L2 as a whole.
HOT_BYTES = 2**24
# The largest number of partial results of a channel.  One tile of the merging kernel takes this many.
MAX_SPLITS = 512
# The bytes of adjacent channels that a program of rows reads in each row.
ROW_BYTES = 128
# The number of tiles that are loaded ahead into shared memory.  None means that tiles are loaded into registers, and no
# tile is loaded ahead.
STAGES = None
# The eviction policies for the input of the first pass and for the output of the second pass.
FIRST_PASS_EVICTION, OUTPUT_EVICTION = "", ""
# The number of multiprocessors if kernels are compiled or interpreted without a GPU.
DEFAULT_SMS = 132


class Blocks(NamedTuple):
    """Grid and block sizes of a launch."""

    groups: int
    splits: int
    tiles_per_split: int
    meta: dict


def multiprocessors(device: torch.device) -> int:
    # Without a GPU this is not cached, because ``dry_run`` assumes another number for each GPU.
    return _multiprocessors_of(device) if device.type == "cuda" else DEFAULT_SMS


@functools.cache
def _multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def acc_dtype(dtype: torch.dtype):
    return tl.float64 if dtype == torch.float64 else tl.float32


def least_idle(candidates: Sequence[int], *channels: int) -> int:
    """The block of channels that leaves the fewest lanes idle; between equals, the larger one."""
    return min(candidates, key=lambda block: (sum(triton.cdiv(C, block) * block for C in channels), -block))


def row_lanes(C: int, at_most: int) -> int:
    """The number of channels of a program, a power of two."""
    candidates = [at_most]
    while candidates[-1] > 16:
        candidates.append(candidates[-1] // 2)
    return least_idle([lanes for lanes in candidates if lanes < 2 * C] or [triton.next_power_of_2(C)], C)


def warps(elements: int, per_thread: int) -> int:
    return min(16, max(1, elements // (32 * per_thread)))


def warps_of(elements: int, per_thread: int) -> int:
    """The number of warps that have ``per_thread`` elements per thread on any GPU; AMD's warps have 64 threads."""
    size = 32 if interpreted() else driver.active.get_current_target().warp_size
    return max(1, warps(elements, per_thread) * 32 // size)


def programs_per_sm(layout, backward: bool, three: bool) -> int:
    if not layout.rows or not backward:
        return PROGRAMS_PER_SM
    return ROWS_OF_THREE_PER_SM if three else ROWS_PER_SM


def most_registers(layout, dtype: torch.dtype, K: int, backward: bool, three: bool = False) -> dict[str, int]:
    """The option that lets as many programs be resident as are started for each multiprocessor.

    The compiler takes a few registers more by itself: in rows a thread holds the parameters of 8 channels.  In fp64, or
    with an address for each element of kept channels of rows, it would spill many.
    """
    without_addresses = MAX_COLUMNS if backward else 0
    if (layout.rows and without_addresses < K) or dtype == torch.float64:
        return {}
    return registers_for(THREADS * programs_per_sm(layout, backward, three))


def on_amd() -> bool:
    """Whether kernels are compiled for AMD's GPUs."""
    return not interpreted() and driver.active.get_current_target().backend == "hip"


def registers_for(threads: int) -> dict[str, int]:
    """The option that lets so many threads be resident in a multiprocessor.  AMD's compiler has no such option."""
    return {} if interpreted() or on_amd() else {"maxnreg": min(255, REGISTERS // threads // 8 * 8)}


def vector_of(layout, dtype: torch.dtype) -> int:
    """How many adjacent elements an access takes: 16 bytes, or fewer if runs in memory are no multiples of 16 bytes."""
    return math.gcd(layout.C if layout.rows else layout.S, 16 // dtype.itemsize)


def peel_of(layout, dtype: torch.dtype, tile: int) -> int:
    """The elements of a vector if planes begin anywhere and are read by vectors all the same; 1 otherwise.

    The vectors at both ends hold elements of other planes (``lanes_before``), so none of them may leave the tensor, and
    no program may write to it meanwhile.  Planes of less than half a tile share tiles.
    """
    vector, elements = 16 // dtype.itemsize, layout.I * layout.N * layout.C * layout.S
    peels = not layout.rows and layout.S % vector and elements % vector == 0 and tile < 2 * layout.S < 2**31
    return vector if peels else 1


def shape_of(layout, dtype: torch.dtype, block_n: int, block_l: int) -> dict:
    """The constants of a kernel that say how tensor and tiles lie in memory.

    ``ALIGN`` is the vector, or 1 if Triton finds out by itself that runs are aligned.
    """
    align = vector_of(layout, dtype) if (layout.C if layout.rows else layout.S) % 16 else 1
    return {"STAT": layout.stat, "ALIGN": align, "ROWS": layout.rows, "BLOCK_N": block_n, "BLOCK_L": block_l}


def onchip_blocks(layout, dtype: torch.dtype, capacity: int) -> Blocks | None:
    """Blocks for programs that read whole statistics groups at once; None if such a slab exceeds the capacity.

    A program reads one channel (planes), 32 bytes of channels (rows), or one group of channels.  If planes are small,
    it reads several planes of a sample, so that a warp of up to 64 threads has 16 bytes per thread.
    """
    stat, units = layout.stat, layout.I * layout.C
    vector = 16 // dtype.itemsize
    block_n, block_l = triton.next_power_of_2(layout.N), triton.next_power_of_2(layout.S)
    if layout.rows:
        block_l = triton.next_power_of_2(layout.D if stat == "group" else min(layout.C, 2 * vector))
        # Every vector of 16 bytes needs an address, which leaves fewer registers for values.
        capacity = min(capacity, ONCHIP_BWD)
        groups = units // layout.D if stat == "group" else layout.I * triton.cdiv(layout.C, block_l)
        # With fewer channels than a 16-byte vector holds, part of every vector would be wasted.
        if stat == "group" and vector > layout.D:
            return None
    elif stat == "group":
        block_n, groups = triton.next_power_of_2(layout.D), units // layout.D
    elif stat == "instance":
        block_n = max(1, min(triton.next_power_of_2(units), 64 * vector // block_l))
        groups = triton.cdiv(units, block_n)
    else:
        groups = layout.C
    if block_n * block_l * dtype.itemsize > capacity:
        return None
    meta = shape_of(layout, dtype, block_n, block_l)
    num_warps = warps(block_n * block_l, PER_THREAD)
    if block_n * block_l == 8192 and capacity == ONCHIP_FWD:
        num_warps = 8
    return Blocks(groups, 1, 1, meta | {"num_warps": num_warps})


def splits_of(groups: int, tiles: int, most: int, places: int) -> int:
    """The number of programs that share a group, so that the fewest tiles follow each other.

    ``places`` programs run at a time.  320 groups on 528 places would leave 208 places empty: three programs a group
    take two waves of a third of the tiles.
    """
    if groups >= places:
        return 1
    least = places // groups

    def tiles_in_turn(splits: int) -> int:
        return triton.cdiv(groups * splits, places) * (triton.cdiv(tiles, splits) + START_TILES)

    return min(range(min(least, most), min(max(least, MAX_PARTIALS), most) + 1), key=tiles_in_turn)


def split_blocks(
    layout,
    dtype: torch.dtype,
    device: torch.device,
    reduces: bool = False,
    stats: bool = False,
    backward: bool = False,
    three: bool = False,
) -> Blocks:
    """Blocks for tiles that are distributed, in runs of adjacent tiles, over as many programs as fill the device.

    ``reduces`` says that every program leaves a partial result; ``stats`` says that the kernel reads one tensor only;
    ``backward`` says that it is one of those of backward, which hold more parameters, and ``three`` that it reads
    three large tensors.
    """
    tile_bytes, threads = STATS_TILE_BYTES if stats else TILE_BYTES, THREADS
    if stats and not layout.rows and triton.cdiv(layout.S * dtype.itemsize, TILE_BYTES) in (3, 5, 7):
        # A quarter of the last tile, or more, would be empty, and two tiles of another pass would not be one of this.
        tile_bytes = TILE_BYTES
    programs = programs_per_sm(layout, backward, three)
    peel = peel_of(layout, dtype, tile_bytes // dtype.itemsize) if stats else 1
    vector = 16 // dtype.itemsize if layout.rows or peel > 1 else vector_of(layout, dtype)
    if vector * dtype.itemsize < 4:
        programs = programs * THREADS // ODD_THREADS
        tile_bytes, threads = min(tile_bytes, ODD_TILE_BYTES), ODD_THREADS
    tile = tile_bytes // dtype.itemsize
    if layout.rows:
        block_l = row_lanes(layout.C, ROW_BYTES // dtype.itemsize)
        groups = layout.I * triton.cdiv(layout.C, block_l)
    else:
        block_l = min(triton.next_power_of_2(layout.S), tile)
        groups = layout.I * layout.C
    block_n = min(triton.next_power_of_2(layout.N), max(1, tile // block_l))
    tiles = triton.cdiv(layout.N, block_n) * (1 if layout.rows else triton.cdiv(layout.S + peel - 1, block_l))
    # All passes over a large tensor end their runs at the same places, so that a walk back begins with what L2 holds.
    # Passes over odd planes have other tiles and numbers of programs.
    unit = STATS_TILE_BYTES // tile_bytes if threads == THREADS and groups * tiles * tile_bytes > HOT_BYTES else 1
    units = triton.cdiv(tiles, unit)
    most = min(units, MAX_PARTIALS if reduces and tiles * tile_bytes <= FEW_BYTES else MAX_SPLITS)
    splits = splits_of(groups, units, most, programs * multiprocessors(device))
    tiles_per_split = unit * triton.cdiv(units, splits)
    meta = shape_of(layout, dtype, block_n, block_l)
    meta |= {"STAGES": STAGES, "EVICT": FIRST_PASS_EVICTION if reduces else OUTPUT_EVICTION}
    # The warps follow the true size, because a few small planes are less than a tile.
    num_warps = warps(block_n * block_l, max(1, tile // threads))
    # The number of vectors of a tile that a thread holds; of planes that are not aligned, shorter ones.
    fold = block_n * block_l // (vector * 32 * num_warps)
    meta |= {"num_warps": num_warps, "FOLD": max(1, min(fold, block_n) if layout.rows else fold)}
    if stats:
        meta["PEEL"] = peel
    meta["WHOLE"] = layout.N % block_n == 0 and (layout.C if layout.rows else layout.S) % block_l == 0
    return Blocks(groups, triton.cdiv(tiles, tiles_per_split), tiles_per_split, meta)
