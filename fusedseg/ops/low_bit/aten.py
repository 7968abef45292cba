"""Packing and unpacking on aten ops, chunk by chunk: memory beside the tensor and its codes stays small.

A piece of a chunk is some groups of equal length.  Its axes are (samples, groups, positions), and for channels_last
(samples, groups, positions, channels).  Numbers of groups have the axes (samples, groups, channels); they are computed
for a block of several chunks at once, because ops on so few numbers take as long as ops on a chunk.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ... import _torch
from .grid import JUMP, bounds_of, decoding_of, encoding_of, grid_of, outward
from .spec import FRACTION_BITS, GOLDEN, GROUP, MULTIPLIER, NEAR, Lines, signed, wide_dtype

# The numbers of values of a chunk and of a block, for each thread.  With smaller chunks, the calls of ops take most of
# the time.
CHUNK, BLOCK = 1 << 18, 1 << 21
# On a GPU, where each op is one launch.
DEVICE_CHUNK = 1 << 24
# aten's loops over fewer adjacent values than this are slow.
ADJACENT = 256
# This many steps are more than any value.  The product moves a bound that does not apply out of the way.
FAR = 2.0**126
# Integers with as many int16, and with as many bytes, as codes fit into a byte.
INTEGERS = {2: torch.int64, 4: torch.int32}
SHORT_INTEGERS = {2: torch.int32, 4: torch.int16}

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


def pack_workspace(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most bytes beside values and codes while values are packed: three of a chunk, and their codes as int16."""
    return min(numel, _sizes(device)[1]) * (3 * wide_dtype(dtype).itemsize + 2)


def unpack_workspace(numel: int, dtype: torch.dtype, device: torch.device) -> int:
    """The most bytes beside values and codes while values are unpacked: two of a chunk, and their codes as bytes."""
    return min(numel, _sizes(device)[1]) * (2 * wide_dtype(dtype).itemsize + 1)


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

    def spread(self, of_groups: Tensor) -> tuple[Tensor, ...]:
        """Kinds of numbers of the groups of the part, (kinds, samples, groups, channels), shaped to broadcast."""
        of_groups = of_groups[:, :, self.groups]
        if self.C > 1:
            of_groups = of_groups.repeat(1, 1, 1, self.times).unsqueeze(3)
        return of_groups.unbind(0)

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


def hashes(indices: Tensor, key: int) -> Tensor:
    """The hash of each int32 index: int32 with 32 random bits."""
    h = (indices * signed(GOLDEN)).add_(signed(key))
    # Integers of aten are signed, so that a shift would bring copies of the sign.
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(signed(MULTIPLIER))
    return h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))


class Noise:
    """The random numbers of a tensor; ``spec.py`` has the formula."""

    def __init__(self, lines: Lines, key: int, device: torch.device) -> None:
        places = torch.arange(GROUP, dtype=torch.int32, device=device)
        self.of_places = hashes(-1 - places, key).to(torch.int16)
        groups = torch.arange(lines.I * lines.groups * lines.C, dtype=torch.int64, device=device).to(torch.int32)
        h = hashes(groups, key)
        factors, summands = (h | 1).to(torch.int16), (h >> 16).to(torch.int16)
        self.of_groups = torch.stack([factors, summands]).view(2, lines.I, lines.groups, lines.C)
        self.found: dict[tuple[int, int, int], Tensor] = {}

    def along(self, piece: "Piece", length: int) -> Tensor:
        """The numbers of positions, shaped to broadcast against the piece, whose groups have this length."""
        kind = length, piece.times, piece.C
        if kind not in self.found:
            numbers = self.of_places[:length]
            if piece.C > 1:
                # In rows the numbers of a position are those of all its channels.
                numbers = numbers.view(-1, piece.times, 1).expand(-1, -1, piece.C).reshape(-1, piece.times * piece.C)
            self.found[kind] = numbers
        return self.found[kind]


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
    x, noise = flat.view(lines), Noise(lines, key, flat.device)
    block, chunk = _sizes(flat.device)
    for i, s in _parts(lines, block):
        here = i, _groups(s)
        parts = list(_parts((i.stop - i.start, s.stop - s.start, lines.C), chunk))
        encoder = Encoder(x[i, s], parts, None if kinks is None else kinks[here], bits)
        lowest[here], highest[here] = encoder.range
        for part in parts:
            at = part[0], _groups(part[1])
            found = encoder.codes(part, noise, noise.of_groups[:, here[0], here[1]][:, at[0], at[1]])
            _rows(codes, lines, bits, _within((i, s), part)).copy_(_squeezed(found, lines, bits))
    return codes, *ends


class Encoder:
    """Computes the range of the groups of a block, chunk by chunk, and codes.  ``parts`` are the chunks."""

    def __init__(self, x: Tensor, parts: Sequence[Part], kink: Tensor | None, bits: int) -> None:
        self.x, self.wide, self.has_kink = x, wide_dtype(x.dtype), kink is not None
        low, high = x.new_empty((2, x.shape[0], -(-x.shape[1] // GROUP), x.shape[2]))
        for i, s in parts:
            part, here = x[i, s], (i, _groups(s))
            for piece in _pieces(part):
                low[here][:, piece.groups], high[here][:, piece.groups] = piece.range(part)
        low, high = low.to(self.wide), high.to(self.wide)
        if kink is not None:
            # Rounding is monotonic, so this is the range of the differences.
            low, high = low - kink, high - kink
        poison = low * 0 + high * 0
        low, high = low + poison, high + poison
        self.clamped = kink is not None and x.dtype != self.wide
        if self.clamped:
            low, high = outward(low, high, x.dtype)
        self.range = low, high
        grid = grid_of(low, high, bits)
        self.has_border = bool(grid.border.any())
        # They are one tensor, because views of each of them would take as long as an op on a chunk.
        self.numbers = torch.stack([low if kink is None else kink, low, high, grid.border, *encoding_of(grid)])

    def codes(self, part: Part, noise: Noise, of_groups: Tensor) -> Tensor:
        """The codes of a chunk as int16.  ``of_groups`` are the factors and summands of its groups."""
        i, s = part
        x, numbers = self.x[i, s], self.numbers[:, i, _groups(s)]
        out = torch.empty(x.shape, dtype=torch.int16, device=x.device)
        for piece in _pieces(x):
            view = piece.of(out)
            self._scaled(piece.of(x), piece.spread(numbers), view)
            factor, summand = piece.spread(of_groups)
            length = min(GROUP, piece.positions.stop - piece.positions.start)
            view.add_((noise.along(piece, length) * factor).add_(summand).bitwise_right_shift_(16 - FRACTION_BITS))
        return out.bitwise_right_shift_(FRACTION_BITS)

    def _scaled(self, x: Tensor, numbers: tuple[Tensor, ...], out: Tensor) -> None:
        """Writes the codes that values lie at, in units of 2**-FRACTION_BITS, before they are rounded to a code."""
        kink, lowest, highest, border, threshold, ratio, scale, offset = numbers
        v = x.to(self.wide)
        if self.has_kink:
            v = v - kink
        if self.clamped:
            # In fp16 the range may be smaller than the differences.
            v = torch.minimum(torch.maximum(v, lowest, out=v), highest, out=v)
        if self.has_border:
            v = v - border
        above = torch.ge(v, threshold, out=torch.empty_like(v))
        v = _torch.prelu_kernel(v, ratio).mul_(scale)
        out.copy_(v.add_(offset).add_(above, alpha=JUMP))


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
        bounds = bounds_of(kink, grid, lowest.dtype)
        base = grid.border if kink is None else grid.border + kink
        # Most groups lie on both sides of 0.
        self.has_base = bool(base.any())
        self.numbers = torch.stack([base, *decoding_of(grid), *(bounds or ())])

    def values(self, codes: Tensor, part: Part, out: Tensor) -> None:
        """Writes the values of a chunk."""
        numbers = self.numbers[:, part[0], _groups(part[1])]
        for piece in _pieces(out):
            base, offset, ratio, scale, *bounds = piece.spread(numbers)
            into = piece.of(out)
            d = piece.of(codes).to(self.wide).sub_(offset)
            d = torch.ops.aten.softshrink.out(d, 0.5 - NEAR, out=d)
            direct = into.dtype == self.wide
            v = _torch.prelu_kernel(d, ratio)
            v = torch.mul(v, scale, out=into if direct and not self.has_base else v)
            if self.has_base:
                v = torch.add(v, base, out=into if direct and not bounds else v)
            if bounds:
                least, most = bounds
                # A bound of the other side is moved beyond all values, which is faster than aten's ``where``.
                d.mul_(FAR)
                v = torch.minimum(v, d.clamp(min=0).add_(most), out=v)
                v = torch.maximum(v, d.clamp_(max=0).add_(least), out=v)
            if v is not into:
                into.copy_(v)


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
    """Codes (samples, positions, channels) as int16, in the shape of the rows of ``_rows``, in the lowest bytes."""
    codes = codes.view(codes.shape[0], 1, -1) if lines.C == 1 else codes
    per = 8 // bits
    if per == 1:
        return codes
    if codes.shape[2] % per:
        codes = torch.nn.functional.pad(codes, (0, per - codes.shape[2] % per))
    word = codes.view(INTEGERS[bits])
    # The codes are the int16 of a word.  Together they move to its lowest byte.
    found = word | word >> (16 - bits)
    for j in range(2, per):
        found.bitwise_or_(word >> (16 - bits) * j)
    return found


def _stretched(rows: Tensor, shape: torch.Size, bits: int) -> Tensor:
    """The reverse of ``_squeezed``, but the codes are bytes."""
    per = 8 // bits
    if per > 1:
        word = rows.to(SHORT_INTEGERS[bits])
        if per == 2:
            word = (word << 4).bitwise_or_(word).bitwise_and_(0x0F0F)
        else:
            word = (word | word << 6 | word << 12 | word << 18).bitwise_and_(0x03030303)
        rows = word.view(torch.uint8)
    _, S, C = shape
    if C == 1:
        return rows[:, 0, :S].unsqueeze(2)
    return rows[:, :, :C]
