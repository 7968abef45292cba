"""The storage op as functions without loops and conditions, which a compiler traces and fuses with their neighbours.

The values are those of ``grid.py``, and groups are those of ``spec.py``: positions of one channel.  Codes lie in
another order, which vectorises: the values of a byte are half a tensor or half a group (4 bits), or an eighth of a
tensor (masks), apart.  Bytes of groups that are shorter than 256 values are tensors of their own.

Numbers of groups are concatenated, because a compiler writes a concatenation to memory; otherwise it would compute them
again for every value.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .grid import JUMP, decoding_of, encoding_of, grid_of, limits_of
from .spec import FRACTION_BITS, GOLDEN, GROUP, MULTIPLIER, NEAR, ChannelLines, lines_of, mixed, signed, wide_dtype


def key_of(key: Tensor, place: int) -> Tensor:
    """The int32 key of the tensor at a place of its graph, from the key of the step.

    The sum is one of int64: a C++ compiler that knows the range of an int32 may take it for granted that it does not
    overflow, and leave the key out.
    """
    return _finished(((key & 0x7FFFFFFF) + signed(mixed(place))).to(torch.int32))


def hashed(indices: Tensor, key: Tensor) -> Tensor:
    """The hash of each index: int32 with 32 random bits.

    The two negations stop Inductor from multiplying the constants of the index as Python integers.  Their products
    leave the range of int32, and Triton refuses such a constant.
    """
    return _finished(~~indices * signed(GOLDEN) + key)


def _finished(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16) & 0xFFFF) * signed(MULTIPLIER)
    return h ^ (h >> 15) & 0x1FFFF


class MemoryOrder(NamedTuple):
    """How a tensor lies in memory: its lines, and the dimensions from the outermost to the innermost one."""

    lines: ChannelLines
    size: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, size: Sequence[int], stride: Sequence[int]) -> "MemoryOrder":
        t = torch.empty_strided(size, stride, device="meta")
        order = tuple(sorted(range(t.dim()), key=lambda d: (-stride[d], d)))
        return cls(lines_of(t, 0), tuple(size), order)

    def lined(self, t: Tensor) -> Tensor:
        """(samples, positions, channels)"""
        return t.permute(self.order).reshape(self.lines)

    def restored(self, t: Tensor) -> Tensor:
        """The reverse of ``lined``."""
        back = [self.order.index(d) for d in range(len(self.order))]
        return t.reshape([self.size[d] for d in self.order]).permute(back)

    def pieces(self) -> list[tuple[int, int]]:
        """The number of groups and their length: whole ones, and a shorter one at the end of each channel."""
        found = [(self.lines.S // GROUP, GROUP), (1, self.lines.S % GROUP)]
        return [(count, length) for count, length in found if count * length]

    def parts(self, t: Tensor, axis: int) -> list[Tensor]:
        """The numbers of groups, along ``axis``, of each piece."""
        return list(t.split([count for count, _ in self.pieces()], axis))


def pack(x: Tensor, key: Tensor, bits: int, form: MemoryOrder) -> tuple[Tensor, ...]:
    """The lowest and highest values of groups, (2, I, groups, C), and codes of each piece; ``key`` is an int32."""
    I, _, C = form.lines
    wide, t, key = wide_dtype(x.dtype), form.lined(x), key.to(x.device)
    views, start = [], 0
    for count, length in form.pieces():
        views.append(t[:, start : start + count * length].reshape(I, count, length, C))
        start += count * length
    low, high = (torch.cat([end(view, 2, True) for view in views], 1) for end in (torch.amin, torch.amax))
    low, high = low.to(wide), high.to(wide)
    poison = low * 0 + high * 0
    ends = torch.stack([low + poison, high + poison])
    grid = grid_of(ends[0], ends[1], bits)
    threshold, ratio, scale, offset = encoding_of(grid)
    numbers = [grid.border, threshold, ratio, scale, offset]
    groups = torch.arange(low.numel(), dtype=torch.int32, device=x.device).view_as(low)
    h = hashed(groups, key)
    random = torch.cat([h | 1, h >> 16], 2)
    halves = torch.arange(GROUP, dtype=torch.int32, device=x.device).view(1, 1, GROUP, 1).chunk(2, 2)
    places = torch.cat([hashed(-1 - half, key) for half in halves], 2)
    found = []
    for view, of, integers in zip(views, form.parts(torch.cat(numbers, 2), 1), form.parts(random, 1), strict=True):
        v, length = view.to(wide) - of[:, :, 0:1], view.shape[2]
        p = torch.where(v > 0, v, v * of[:, :, 2:3]) * of[:, :, 3:4] + of[:, :, 4:5]
        p = p + torch.where(v >= of[:, :, 1:2], JUMP, 0.0)
        noise = (places[:, :, :length] * integers[:, :, 0:1] + integers[:, :, 1:2]) << 16
        q = (p.to(torch.int32) + (noise >> (32 - FRACTION_BITS))) >> FRACTION_BITS
        if bits < 8:
            axis = _halved(form)
            if q.shape[axis] % 2:
                q = torch.nn.functional.pad(q, (0, 0, 0, 1))
            first, second = q.chunk(2, axis)
            q = first | second << bits
        found.append(q.to(torch.uint8))
    return ends.to(x.dtype), *found


def unpack(ends: Tensor, codes: Sequence[Tensor], bits: int, form: MemoryOrder) -> Tensor:
    """The tensor again, right on average."""
    wide = wide_dtype(ends.dtype)
    low, high = ends.to(wide).unbind(0)
    grid = grid_of(low, high, bits)
    offset, ratio, scale = decoding_of(grid)
    numbers = [grid.border, offset, ratio, scale]
    if ends.dtype == torch.float16:
        numbers += limits_of(torch.zeros_like(low), grid, ends.dtype)
    found = []
    for q, of, (_, length) in zip(codes, form.parts(torch.cat(numbers, 2), 1), form.pieces(), strict=True):
        q = q.to(torch.int32)
        if bits < 8:
            axis = _halved(form)
            shift = bits * torch.arange(2, dtype=torch.int32, device=q.device)
            q = q.unsqueeze(axis) >> shift.view([2 if d == axis else 1 for d in range(5)]) & 15
            q = q.flatten(axis, axis + 1)[:, :, :length]
        d = q.to(wide) - of[:, :, 1:2]
        d = torch.where(d > 0, d - (0.5 - NEAR), d + (0.5 - NEAR))
        v = torch.where(d > 0, d, d * of[:, :, 2:3]) * of[:, :, 3:4] + of[:, :, 0:1]
        if len(numbers) > 4:
            v = torch.where(d > 0, torch.maximum(v, of[:, :, 4:5]), torch.minimum(v, of[:, :, 5:6]))
        found.append(v.to(ends.dtype).flatten(1, 2))
    return form.restored(found[0] if len(found) == 1 else torch.cat(found, 1))


def _halved(form: MemoryOrder) -> int:
    """The axis of (samples, groups, positions, channels) whose halves share bytes: an outer one keeps loops simple."""
    return 2 if form.lines.I % 2 else 0


def _eighths(form: MemoryOrder) -> tuple[int, int, int] | None:
    """A tensor as (outer, middle, inner) whose middle is eight equal parts; None if there are no such."""
    I, S, C = form.lines
    return next((of for of in ((1, I, S * C), (I, S, C), (1, I * S * C, 1)) if of[1] % 8 == 0), None)


def pack_mask(mask: Tensor, form: MemoryOrder) -> Tensor:
    """One bit a value."""
    t, shape = form.lined(mask), _eighths(form)
    if shape is None:
        t = torch.nn.functional.pad(t.reshape(1, -1, 1), (0, 0, 0, -mask.numel() % 8))
        shape = (1, t.numel(), 1)
    I, S, C = shape
    parts = t.reshape(I, 8, S // 8, C).to(torch.int32).unbind(1)
    byte = parts[0]
    for k in range(1, 8):
        byte = byte | parts[k] << k
    return byte.to(torch.uint8)


def unpack_mask(byte: Tensor, form: MemoryOrder) -> Tensor:
    """The mask again."""
    shift = torch.arange(8, dtype=torch.int32, device=byte.device).view(1, 8, 1, 1)
    mask = (byte.to(torch.int32).unsqueeze(1) >> shift & 1).flatten()
    I, S, C = form.lines
    return form.restored(mask[: I * S * C]) != 0
