"""Packing and unpacking on aten ops, chunk by chunk: a chunk and its few copies stay in the cache.

A piece of a chunk is some groups of equal length.  Its axes are (samples, groups, positions), and for channels_last
(samples, groups, positions, channels).  Numbers of groups have the axes (samples, groups, channels); they are computed
for a block of several chunks at once, because ops on so few numbers take as long as ops on a chunk.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ... import _torch
from .grid import bounds_of, decoding_of, encoding_of, grid_of, outward
from .spec import GOLDEN, GROUP, MULTIPLIER, NEAR, Lines, signed, wide_dtype

# The numbers of values of a chunk and of a block, for each thread.
CHUNK, BLOCK = 1 << 18, 1 << 22
# On a GPU, where each op is one launch.
DEVICE_CHUNK = 1 << 24
# aten's loops over fewer adjacent values than this are slow.
ADJACENT = 256
# This many steps are more than any value.  The product moves a bound that does not apply out of the way.
FAR = 2.0**126
# Integers with the bytes of as many codes as fit into a byte.
INTEGERS = {2: torch.int32, 4: torch.int16}

Part = tuple[slice, slice]


def _parts(shape: Sequence[int], most: int) -> Iterator[Part]:
    """(samples, positions) of parts of up to ``most`` values: whole samples, or whole groups of one sample."""
    I, S, C = shape
    samples, positions = max(1, most // (S * C)), max(1, most // (GROUP * C)) * GROUP
    for i in range(0, I, samples):
        for s in range(0, S, positions):
            yield slice(i, min(i + samples, I)), slice(s, min(s + positions, S))


def _sizes(device: torch.device) -> tuple[int, int]:
    """The numbers of values of a block and of a chunk."""
    if device.type != "cpu":
        return DEVICE_CHUNK, DEVICE_CHUNK
    return BLOCK * torch.get_num_threads(), CHUNK * torch.get_num_threads()


def _groups(s: slice) -> slice:
    """The groups of positions that begin with a group."""
    return slice(s.start // GROUP, -(-s.stop // GROUP))


class Piece:
    """Groups of equal length: the whole groups of a part, or the shorter ones at its end.

    positions: their positions in the part.
    groups: their numbers in the part.
    """

    def __init__(self, positions: slice, C: int) -> None:
        length = positions.stop - positions.start
        self.positions, self.groups, self.C = positions, _groups(positions), C
        self.count = self.groups.stop - self.groups.start
        # Several positions of all channels are adjacent to each other.
        self.times = 1
        while C > 1 and self.times * C < ADJACENT and length // self.count % (2 * self.times) == 0:
            self.times *= 2

    def of(self, part: Tensor) -> Tensor:
        """The piece of a part, (samples, positions, channels)."""
        # Positions are adjacent, so this is a view even of a part of a plane.
        view = part[:, self.positions].unflatten(1, (self.count, -1))
        if self.C == 1:
            return view.squeeze(3)
        return view if self.times == 1 else view.unflatten(2, (-1, self.times)).flatten(3)

    def spread(self, of_groups: Tensor) -> Tensor:
        """Numbers of the groups of the part, shaped to broadcast against the piece."""
        of_groups = of_groups[:, self.groups]
        return of_groups if self.C == 1 else of_groups.repeat(1, 1, self.times).unsqueeze(2)

    def range(self, part: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value of each group."""
        view = self.of(part)
        ends = view.amin(2), view.amax(2)
        if self.times > 1:
            lowest, highest = (end.unflatten(2, (self.times, -1)) for end in ends)
            ends = lowest.amin(2), highest.amax(2)
        lowest, highest = (end.view(part.shape[0], self.count, self.C) for end in ends)
        return lowest, highest


def _pieces(part: Tensor) -> Iterator[Piece]:
    _, S, C = part.shape
    whole = S // GROUP * GROUP
    if whole:
        yield Piece(slice(0, whole), C)
    if whole < S:
        yield Piece(slice(whole, S), C)


def random_bytes(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """The bytes of ``count`` adjacent values, of which ``first`` is the place in memory.  Four values share a hash."""
    begin, end = first // 4, (first + count - 1) // 4 + 1
    h = torch.arange(end - begin, dtype=torch.int32, device=device)
    h.mul_(signed(GOLDEN)).add_(signed(begin * GOLDEN + key))
    # Integers of aten are signed, so that a shift would bring copies of the sign.
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(signed(MULTIPLIER))
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))
    return h.view(torch.uint8)[first - 4 * begin :][:count]


def _by_group(lines: Lines, ends: Sequence[Tensor], kink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The range as (I, groups, C), and the kink too."""
    shape = lines.I, lines.groups, lines.C
    if kink is not None:
        kink = kink.repeat(lines.I * lines.C // kink.numel()).view(lines.I, 1, lines.C).expand(shape)
    return ends[0].view(shape), ends[1].view(shape), kink


def pack(flat: Tensor, lines: Lines, bits: int, key: int, kink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, lowest and highest values of a tensor, whose memory is ``flat``."""
    count = lines.I * lines.groups * lines.C
    codes = flat.new_empty(lines.code_bytes(bits), dtype=torch.uint8)
    ends = flat.new_empty(count), flat.new_empty(count)
    lowest, highest, kinks = _by_group(lines, ends, kink)
    x = flat.view(lines)
    block, chunk = _sizes(flat.device)
    for i, s in _parts(lines, block):
        here = i, _groups(s)
        encoder = Encoder(x[i, s], lowest[here], highest[here], None if kinks is None else kinks[here], bits)
        for j, t in _parts((i.stop - i.start, s.stop - s.start, lines.C), chunk):
            first = ((i.start + j.start) * lines.S + s.start + t.start) * lines.C
            found = encoder.codes((j, t), first, key)
            into = _rows(codes, lines, bits, _within((i, s), (j, t)))
            into.copy_(_squeezed(found, lines, bits))
    return codes, *ends


class Encoder:
    """Computes the range of the groups of a block, which it writes into ``lowest`` and ``highest``, and codes."""

    def __init__(self, x: Tensor, lowest: Tensor, highest: Tensor, kink: Tensor | None, bits: int) -> None:
        self.x, self.wide, self.kink = x, wide_dtype(x.dtype), kink
        for piece in _pieces(x):
            found = piece.range(x)
            lowest[:, piece.groups], highest[:, piece.groups] = found
        low, high = lowest.to(self.wide), highest.to(self.wide)
        if kink is not None:
            # Rounding is monotonic, so this is the range of the differences.
            low, high = low - kink, high - kink
        poison = low * 0 + high * 0
        low, high = low + poison, high + poison
        self.clamped = kink is not None and x.dtype != self.wide
        if self.clamped:
            low, high = outward(low, high, x.dtype)
        lowest.copy_(low)
        highest.copy_(high)
        self.range = low, high
        grid = grid_of(low, high, bits)
        self.border = grid.border if bool(grid.border.any()) else None
        self.encoding = encoding_of(grid)

    def codes(self, part: Part, first: int, key: int) -> Tensor:
        """The codes of a chunk, one a byte.  ``first`` is the place of its first value in memory."""
        i, s = part
        x, groups = self.x[i, s], _groups(s)
        noise = random_bytes(first, x.numel(), key, x.device).view(x.shape)
        out = torch.empty_like(noise)
        for piece in _pieces(x):
            self._encode(piece, (i, groups), piece.of(x), piece.of(noise), piece.of(out))
        return out

    def _encode(self, piece: Piece, at: Part, x: Tensor, noise: Tensor, out: Tensor) -> None:
        v = x.to(self.wide)
        if self.kink is not None:
            v = v - piece.spread(self.kink[at])
        if self.clamped:
            # In fp16 the range may be smaller than the differences.
            lowest, highest = (piece.spread(end[at]) for end in self.range)
            v = torch.minimum(torch.maximum(v, lowest), highest)
        if self.border is not None:
            v = v - piece.spread(self.border[at])
        threshold, ratio, scale, offset = (piece.spread(of[at]) for of in self.encoding)
        above = torch.ge(v, threshold, out=torch.empty_like(v))
        v = _torch.prelu_kernel(v, ratio).mul_(scale)
        v.add_(noise.to(self.wide), alpha=1 / 256).add_(offset).add_(above, alpha=1 - 2 * NEAR)
        out.copy_(v.to(torch.int32))


def unpack(packed: tuple[Tensor, Tensor, Tensor], kink: Tensor | None, lines: Lines, bits: int, flat: Tensor) -> None:
    """Writes the values into ``flat``, the memory of a tensor."""
    codes, *ends = packed
    lowest, highest, kinks = _by_group(lines, ends, kink)
    x = flat.view(lines)
    block, chunk = _sizes(flat.device)
    for i, s in _parts(lines, block):
        here = i, _groups(s)
        decoder = Decoder(lowest[here], highest[here], None if kinks is None else kinks[here], bits)
        for j, t in _parts((i.stop - i.start, s.stop - s.start, lines.C), chunk):
            part = _within((i, s), (j, t))
            out = x[part]
            decoder.values(_stretched(_rows(codes, lines, bits, part), out.shape, bits), (j, t), out)


class Decoder:
    """Computes the values of the groups of a block."""

    def __init__(self, lowest: Tensor, highest: Tensor, kink: Tensor | None, bits: int) -> None:
        self.wide = wide_dtype(lowest.dtype)
        grid = grid_of(lowest.to(self.wide), highest.to(self.wide), bits)
        self.bounds = bounds_of(kink, grid, lowest.dtype)
        self.base = grid.border if kink is None else grid.border + kink
        # Most groups lie on both sides of 0.
        self.has_base = bool(self.base.any())
        self.decoding = decoding_of(grid)

    def values(self, codes: Tensor, part: Part, out: Tensor) -> None:
        """Writes the values of a chunk."""
        at = part[0], _groups(part[1])
        for piece in _pieces(out):
            offset, ratio, scale = (piece.spread(of[at]) for of in self.decoding)
            d = piece.of(codes).to(self.wide).sub_(offset)
            d = torch.nn.functional.softshrink(d, 0.5 - NEAR)
            v = _torch.prelu_kernel(d, ratio).mul_(scale).add_(piece.spread(self.base[at]))
            if self.bounds is not None:
                least, most = (piece.spread(of[at]) for of in self.bounds)
                # A bound of the other side is moved beyond all values.  aten's ``where`` takes four times as long.
                d.mul_(FAR)
                v = torch.minimum(v, d.clamp(min=0).add_(most), out=v)
                v = torch.maximum(v, d.clamp_(max=0).add_(least), out=v)
            piece.of(out).copy_(v)


def _within(block: Part, chunk: Part) -> Part:
    """The samples and positions of a chunk of a block."""
    i, s = (slice(a.start + b.start, a.start + b.stop) for a, b in zip(block, chunk, strict=True))
    return i, s


def _rows(codes: Tensor, lines: Lines, bits: int, part: Part) -> Tensor:
    """The bytes of a part, (samples, positions, bytes of a row); a plane is one row."""
    i, s = part
    if lines.C > 1:
        return codes.view(lines.I, lines.S, -1)[i, s]
    per = 8 // bits
    return codes.view(lines.I, 1, -1)[i, :, s.start // per : -(-s.stop // per)]


def _squeezed(codes: Tensor, lines: Lines, bits: int) -> Tensor:
    """Codes (samples, positions, channels), one a byte, in the shape of the rows of ``_rows``."""
    codes = codes.view(codes.shape[0], 1, -1) if lines.C == 1 else codes
    per = 8 // bits
    if per == 1:
        return codes
    if codes.shape[2] % per:
        codes = torch.nn.functional.pad(codes, (0, per - codes.shape[2] % per))
    word = codes.view(INTEGERS[bits])
    # The codes are the bytes of a word.  Together they move to its lowest byte.
    found = word | word >> (8 - bits)
    for j in range(2, per):
        found.bitwise_or_(word >> (8 - bits) * j)
    return found.to(torch.uint8)


def _stretched(rows: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """The reverse of ``_squeezed``."""
    per = 8 // bits
    if per > 1:
        word = rows.to(INTEGERS[bits])
        if per == 2:
            word = (word | word << 4).bitwise_and_(0x0F0F)
        else:
            word = (word | word << 6 | word << 12 | word << 18).bitwise_and_(0x03030303)
        rows = word.view(torch.uint8)
    _, S, C = shape
    if C == 1:
        return rows[:, 0, :S].unsqueeze(2)
    return rows[:, :, :C]
