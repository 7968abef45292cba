"""Packing and unpacking of the tiles of the norm kernels.  ``kernels/low_bit.py`` has the arithmetic.

The groups of a tile (BLOCK_N, BLOCK_L) of planes are its rows, in pieces of 256 positions; ``as_groups`` makes it a
block (groups, positions).  A tile of rows (channels_last) holds one whole group of each of its channels.  ``line`` is
the number of each plane of a tile, and ``s0`` its first position; a plane that does not exist has a number of at least
I N C.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .low_bit import GROUP, decode, divide, encode, noise_of
from .tile import tile_start, tiles_of

# The shortest planes whose codes kernels write and read.
SHORTEST = 8
# A kink is at most this many standard deviations away from the mean, as in ``fusedseg/ops/norm/kink.py``.
FARTHEST: tl.constexpr = tl.constexpr(64.0)


# In place of the tensors of ``Codes``.
NO_CODES = (None,) * 4


class Codes(NamedTuple):
    """A packed tensor, as the launchers of norms write and read it.

    ``kink`` is None, or has a value for each channel, or for each channel of each sample.  ``row_bytes`` is that of
    ``Lines`` in ``fusedseg/ops/low_bit/spec.py``.  ``key`` is the int32 of the hash; only writers need it.
    """

    codes: Tensor
    lowest: Tensor
    highest: Tensor
    kink: Tensor | None
    bits: int
    row_bytes: int
    key: int = 0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.lowest, self.highest, self.kink

    @property
    def dtype(self) -> torch.dtype:
        return self.lowest.dtype


def fits(layout, lines, dtype: torch.dtype) -> bool:
    """Whether the kernels can write codes whose groups lie as ``lines`` (``Lines`` of the storage op) says.

    They cannot if a group has values of several planes, as in small planes without a kink, or of several samples with
    statistics of their own; nor if rows are shorter than 16 bytes.  They can also read the codes of planes.
    """
    if not layout.rows:
        return lines.C == 1 and lines.S == layout.S and layout.S >= SHORTEST
    if lines.C != layout.C or layout.C * dtype.itemsize < 16:
        return False
    return lines.I == layout.I or layout.N % GROUP.value == 0


def parts_of(codes) -> tuple:
    """The tensors of ``Codes`` for a launch, and ``row_bytes``."""
    return (NO_CODES, 0) if codes is None else (codes.tensors, codes.row_bytes)


@triton.jit
def kink_of(mean, rstd, w, b):
    """The input that a norm sends to 0; the same bits as in ``fusedseg/ops/norm/kink.py``."""
    shift = divide(b, w)
    # 0 / 0 of a channel without weight and bias is NaN.
    shift = tl.where(shift == shift, tl.minimum(tl.maximum(shift, -FARTHEST), FARTHEST), 0.0)
    return mean - divide(shift, rstd)


@triton.jit
def line_of(j, i, group, N, C, S, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """The planes of tile j of a channel of sample i, (BLOCK_N, 1), and their first position."""
    n0, s0 = tile_start(j, S, False, BLOCK_N, BLOCK_L)
    n = tl.cast(i, tl.int64) * N + n0 + tl.arange(0, BLOCK_N)[:, None]
    return n * C + group, s0


@triton.jit
def as_groups(v, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """A tile of planes as (groups, positions)."""
    if BLOCK_L > GROUP:
        v = tl.reshape(v, (BLOCK_N * BLOCK_L // GROUP, GROUP))
    return v


@triton.jit
def over_groups(v, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """A value of each plane, (BLOCK_N, 1), as one of each group, (groups, 1)."""
    if BLOCK_L > GROUP:
        v = tl.broadcast_to(v, (BLOCK_N, BLOCK_L // GROUP))
        v = tl.reshape(v, (BLOCK_N * BLOCK_L // GROUP, 1))
    return v


@triton.jit
def places_of_planes(line, s0, I, N, C, S, row_bytes, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
                     BLOCK_L: tl.constexpr):  # fmt: skip
    """The offsets and masks of the bytes and of the groups of a tile of planes, and the places in a group."""
    PER: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP if BLOCK_L > GROUP else BLOCK_L
    COUNT: tl.constexpr = BLOCK_L // LENGTH
    first = s0 // GROUP + (tl.arange(0, BLOCK_N * COUNT)[:, None] % COUNT)
    line = over_groups(line, BLOCK_N, BLOCK_L)
    exists = line < tl.cast(I, tl.int64) * N * C
    group_mask = exists & (first * GROUP < S)
    byte = first * (GROUP // PER) + tl.arange(0, LENGTH // PER)[None, :]
    byte_offs, byte_mask = line * row_bytes + byte, exists & (byte < row_bytes)
    return byte_offs, byte_mask, line * tiles_of(S, GROUP) + first, group_mask, tl.arange(0, LENGTH)[None, :]


@triton.jit
def places_of_rows(j, i, group, N, C, row_bytes, BITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):
    """What ``places_of_planes`` returns, for a tile of rows."""
    PER: tl.constexpr = 8 // BITS
    n0, _ = tile_start(j, 1, True, BLOCK_N, BLOCK_L)
    n = n0 + tl.arange(0, BLOCK_N)[:, None]
    byte = group * (BLOCK_L // PER) + tl.arange(0, BLOCK_L // PER)[None, :]
    byte_offs = (tl.cast(i, tl.int64) * N + n) * row_bytes + byte
    c = group * BLOCK_L + tl.arange(0, BLOCK_L)[None, :]
    number = (tl.cast(i, tl.int64) * tiles_of(N, GROUP) + n0 // GROUP) * C + c
    return byte_offs, (n < N) & (byte < row_bytes), number, c < C, (n % GROUP).to(tl.int32)


@triton.jit
def pack_tile(v, mask, j, i, group, line, s0, has_kink: tl.constexpr, codes_ptr, lowest_ptr, highest_ptr, key,
              I, N, C, S, row_bytes, ROWS: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_L: tl.constexpr):  # fmt: skip
    """Writes the codes of a tile of whole groups.  v has the dtype of the arithmetic and no kink any more."""
    if ROWS:
        byte_offs, byte_mask, number, group_mask, place = places_of_rows(j, i, group, N, C, row_bytes, BITS, BLOCK_N,
                                                                         BLOCK_L)  # fmt: skip
    else:
        byte_offs, byte_mask, number, group_mask, place = places_of_planes(line, s0, I, N, C, S, row_bytes, BITS,
                                                                           BLOCK_N, BLOCK_L)  # fmt: skip
        v, mask = as_groups(v, BLOCK_N, BLOCK_L), as_groups(mask, BLOCK_N, BLOCK_L)
    encode(v, mask, has_kink, noise_of(number, place, key), number, group_mask, byte_offs, byte_mask, codes_ptr,
           lowest_ptr, highest_ptr, 0 if ROWS else 1, BITS)  # fmt: skip


@triton.jit
def unpack_tile(line, s0, kink, codes_ptr, lowest_ptr, highest_ptr, I, N, C, S, row_bytes, BITS: tl.constexpr,
                ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr):  # fmt: skip
    """The values of a tile of planes, the same bits as in the unpacked tensor.

    ``kink`` is None or has one for each channel.
    """
    byte_offs, byte_mask, number, group_mask, _ = places_of_planes(line, s0, I, N, C, S, row_bytes, BITS, BLOCK_N,
                                                                   BLOCK_L)  # fmt: skip
    if kink is not None:
        kink = over_groups(kink + tl.zeros((BLOCK_N, 1), ACC), BLOCK_N, BLOCK_L)
    v = decode(codes_ptr, lowest_ptr, highest_ptr, byte_offs, byte_mask, number, group_mask, kink, ACC, BITS)
    return tl.reshape(v, (BLOCK_N, BLOCK_L)).to(ACC)


@triton.jit
def load_saved(saved_ptr, codes_ptr, lowest_ptr, highest_ptr, kink, offs, mask, line, s0, I, N, C, S, row_bytes,
               BITS: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr,
               EVICT: tl.constexpr):  # fmt: skip
    """One tile of the kept tensor, or of the tensor that its codes stand for."""
    if BITS > 0:
        saved = unpack_tile(line, s0, kink, codes_ptr, lowest_ptr, highest_ptr, I, N, C, S, row_bytes, BITS, ACC,
                            BLOCK_N, BLOCK_L)  # fmt: skip
    else:
        saved = tl.load(saved_ptr + offs, mask=mask, other=0.0, eviction_policy=EVICT).to(ACC)
    return saved


@triton.jit
def load_kink(kink_ptr, u, valid):
    """The kinks of the channels u, or None."""
    kink = None
    if kink_ptr is not None:
        kink = tl.load(kink_ptr + u, mask=valid, other=0.0)
    return kink
