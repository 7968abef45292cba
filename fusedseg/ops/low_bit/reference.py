"""Packing and unpacking on aten ops: a plain reference of ``kernels/low_bit.py``, which computes the same bits.

It works part by part, so that memory beside the tensor and its codes stays small.  A part has the axes (samples,
groups, positions of a group, channels), and numbers of its groups have the axes (samples, groups, 1, channels).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..check import wide_dtype
from .grid import JUMP, Grid, decoding_of, encoding_of, grid_of, limits_of, outward
from .spec import FRACTION_BITS, GOLDEN, GROUP, MULTIPLIER, NEAR, ChannelLines, signed

# The number of values of a part, for each thread.
PART = 1 << 18
# On a GPU, where each op is one launch.
DEVICE_PART = 1 << 24


def _part_size(device: torch.device) -> int:
    return DEVICE_PART if device.type != "cpu" else PART * torch.get_num_threads()


def workspace(numel: int, dtype: torch.dtype, device: torch.device, packing: bool) -> int:
    """The most bytes beside values and codes while values are packed, or unpacked.

    They are three tensors of a part and its codes as int16, or two tensors, the codes, and their sides.
    """
    return min(numel, _part_size(device)) * ((3 if packing else 2) * wide_dtype(dtype).itemsize + 2)


class Piece(NamedTuple):
    """A range of samples, and a range of positions that consists of groups of one length."""

    samples: slice
    positions: slice

    @property
    def groups(self) -> slice:
        return slice(self.positions.start // GROUP, -(-self.positions.stop // GROUP))

    def of_values(self, x: Tensor) -> Tensor:
        """A view of the part of (samples, positions, channels)."""
        groups = self.groups
        return x[self.samples, self.positions].unflatten(1, (groups.stop - groups.start, -1))

    def of_groups(self, numbers: Tensor) -> Tensor:
        """A view of the part of (samples, groups, channels)."""
        return numbers[self.samples, self.groups].unsqueeze(2)

    def rows(self, codes: Tensor, lines: ChannelLines, bits: int) -> Tensor:
        """The bytes of the part, (samples, positions, bytes of a row); a plane is one row."""
        if lines.C > 1:
            return codes.view(lines.I, lines.S, -1)[self.samples, self.positions]
        per = 8 // bits
        return codes.view(lines.I, 1, -1)[self.samples, :, self.positions.start // per : -(-self.positions.stop // per)]


def _parts(lines: ChannelLines, device: torch.device) -> Iterator[Piece]:
    """Whole samples, or groups of one sample; the shorter groups at the end of channels are parts of their own."""
    I, S, C = lines
    most, whole = _part_size(device), S // GROUP * GROUP
    for first, end in ((0, whole), (whole, S)):
        if first == end:
            continue
        samples, positions = max(1, most // ((end - first) * C)), max(1, most // (GROUP * C)) * GROUP
        for i in range(0, I, samples):
            for s in range(first, end, positions):
                yield Piece(slice(i, min(i + samples, I)), slice(s, min(s + positions, end)))


def hashes(indices: Tensor, key: int) -> Tensor:
    """The hash of each int32 index: int32 with 32 random bits."""
    h = (indices * signed(GOLDEN)).add_(signed(key))
    # Integers of aten are signed, so that a shift would bring copies of the sign.
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(signed(MULTIPLIER))
    return h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))


class Noise:
    """The random numbers of a tensor; ``spec.py`` has the formula."""

    def __init__(self, lines: ChannelLines, key: int, device: torch.device) -> None:
        places = torch.arange(GROUP, dtype=torch.int32, device=device)
        self.of_places = hashes(-1 - places, key).to(torch.int16).view(-1, 1)
        groups = torch.arange(lines.I * lines.groups * lines.C, dtype=torch.int64, device=device).to(torch.int32)
        h = hashes(groups, key).view(lines.I, lines.groups, lines.C)
        self.factors, self.summands = (h | 1).to(torch.int16), (h >> 16).to(torch.int16)

    def of(self, part: Piece) -> Tensor:
        """int16 with FRACTION_BITS random bits, from -2**(FRACTION_BITS - 1) on."""
        length = part.positions.stop - part.positions.start
        h = self.of_places[:length] * part.of_groups(self.factors)
        return h.add_(part.of_groups(self.summands)).bitwise_right_shift_(16 - FRACTION_BITS)


def _kinks_of_groups(kink: Tensor | None, lines: ChannelLines) -> Tensor | None:
    """The kink of each group, (I, groups, C); ``kink`` has one for each channel, or for each channel of a sample."""
    if kink is None:
        return None
    kink = kink.repeat(lines.I * lines.C // kink.numel()).view(lines.I, 1, lines.C)
    return kink.expand(lines.I, lines.groups, lines.C)


def pack(flat: Tensor, lines: ChannelLines, bits: int, key: int, kink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, lowest and highest values of a tensor, whose memory is ``flat``."""
    codes = flat.new_empty(lines.code_bytes(bits), dtype=torch.uint8)
    shape = lines.I, lines.groups, lines.C
    lowest, highest = flat.new_empty(shape), flat.new_empty(shape)
    x, noise, kinks = flat.view(lines), Noise(lines, key, flat.device), _kinks_of_groups(kink, lines)
    wide = wide_dtype(flat.dtype)
    for part in _parts(lines, flat.device):
        v = part.of_values(x)
        low, high = v.amin(2, keepdim=True).to(wide), v.amax(2, keepdim=True).to(wide)
        v = v.to(wide)
        if kinks is not None:
            # Rounding is monotonic, so this is the range of the differences.
            low, high, v = (of - part.of_groups(kinks) for of in (low, high, v))
        poison = low * 0 + high * 0
        low, high = low + poison, high + poison
        if kinks is not None and flat.dtype != wide:
            # In fp16 the range may be smaller than the differences.
            low, high = outward(low, high, flat.dtype)
            v = torch.minimum(torch.maximum(v, low, out=v), high, out=v)
        part.of_groups(lowest).copy_(low)
        part.of_groups(highest).copy_(high)
        found = _encoded(v, grid_of(low, high, bits)).add_(noise.of(part)).bitwise_right_shift_(FRACTION_BITS)
        part.rows(codes, lines, bits).copy_(_to_bytes(found.to(torch.uint8).flatten(1, 2), lines, bits))
        # Otherwise these codes would be there until the next part has its own.
        del found
    return codes, lowest.flatten(), highest.flatten()


def _encoded(v: Tensor, grid: Grid) -> Tensor:
    """The codes that values lie at, in units of 2**-FRACTION_BITS, before they are rounded to a code."""
    threshold, ratio, scale, offset = encoding_of(grid)
    v = v - grid.border
    above = v >= threshold
    v.mul_(torch.where(v > 0, 1.0, ratio)).mul_(scale)
    return v.add_(offset).add_(above, alpha=JUMP).to(torch.int16)


def unpack(
    packed: tuple[Tensor, Tensor, Tensor], kink: Tensor | None, lines: ChannelLines, bits: int, flat: Tensor
) -> None:
    """Writes the values into ``flat``, the memory of a tensor."""
    codes, *ends = packed
    lowest, highest = (end.view(lines.I, lines.groups, lines.C) for end in ends)
    x, kinks, wide = flat.view(lines), _kinks_of_groups(kink, lines), wide_dtype(flat.dtype)
    for part in _parts(lines, flat.device):
        grid = grid_of(part.of_groups(lowest).to(wide), part.of_groups(highest).to(wide), bits)
        out = part.of_values(x)
        found = _to_codes(part.rows(codes, lines, bits), lines, bits, part.positions.stop - part.positions.start)
        out.copy_(_decoded(found.view(out.shape), grid, None if kinks is None else part.of_groups(kinks), flat.dtype))


def _decoded(codes: Tensor, grid: Grid, kink: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values of codes, before they are rounded to the dtype of the tensor."""
    offset, ratio, scale = decoding_of(grid)
    v = F.softshrink(codes - offset, 0.5 - NEAR)
    below = v < 0
    v.mul_(torch.where(below, ratio, 1.0)).mul_(scale)
    v.add_(grid.border if kink is None else grid.border + kink)
    if kink is None and dtype != torch.float16:
        # Only fp16 may round a value across a border of 0.
        return v
    least, most = limits_of(torch.zeros_like(grid.border) if kink is None else kink, grid, dtype)
    v = torch.minimum(v, torch.where(below, most, torch.inf), out=v)
    return torch.maximum(v, torch.where(below, -torch.inf, least), out=v)


def _to_bytes(codes: Tensor, lines: ChannelLines, bits: int) -> Tensor:
    """Codes (samples, positions, channels) in the rows of ``Piece.rows``; the first code of a byte has its low bits."""
    if lines.C == 1:
        codes = codes.view(codes.shape[0], 1, -1)
    per = 8 // bits
    codes = F.pad(codes, (0, -codes.shape[2] % per)).unflatten(2, (-1, per))
    found = codes[..., 0].clone()
    for j in range(1, per):
        found |= codes[..., j] << bits * j
    return found


def _to_codes(rows: Tensor, lines: ChannelLines, bits: int, positions: int) -> Tensor:
    """The reverse of ``_to_bytes``."""
    mask = (1 << bits) - 1
    codes = torch.stack([(rows >> bits * j) & mask for j in range(8 // bits)], dim=3).flatten(2)
    return codes[:, :, : positions if lines.C == 1 else lines.C].reshape(len(rows), positions, lines.C)
