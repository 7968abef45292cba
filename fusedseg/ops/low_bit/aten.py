"""Packing and unpacking on aten ops, chunk by chunk: a chunk and its few copies stay in the cache.

A piece is some groups of equal length.  Its axes are (samples, groups, positions, channels); planes have no channels.
Numbers of groups have the axes (samples, groups, channels).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .grid import bounds_of, decoding_of, encoding_of, grid_of, outward
from .spec import GOLDEN, GROUP, MULTIPLIER, NEAR, Lines, signed, wide_dtype

# The number of values of a chunk for each thread.
CHUNK = 1 << 18
# On a GPU, where each op is one launch.
DEVICE_CHUNK = 1 << 24
# aten's loops over fewer adjacent values are slow.
ADJACENT = 256
# Integers with the bytes of as many codes as fit into a byte.
INTEGERS = {2: torch.int32, 4: torch.int16}


def _chunks(lines: Lines, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """(samples, positions) of each chunk: whole samples, or whole groups of one sample."""
    chunk = CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    samples = max(1, chunk // (lines.S * lines.C))
    positions = max(1, chunk // (GROUP * lines.C)) * GROUP
    for i in range(0, lines.I, samples):
        for s in range(0, lines.S, positions):
            yield slice(i, min(i + samples, lines.I)), slice(s, min(s + positions, lines.S))


class Piece:
    """A view of ``part``, (samples, positions, channels), as groups of g positions."""

    def __init__(self, part: Tensor, g: int) -> None:
        samples, S, C = part.shape
        self.shape = samples, S // g, C
        # Several positions of all channels are adjacent to each other.
        self.times = 1
        while C > 1 and self.times * C < ADJACENT and g % (2 * self.times) == 0:
            self.times *= 2
        self.view = self.of(part)

    def of(self, part: Tensor) -> Tensor:
        """The view of another tensor of the shape of ``part``."""
        samples, groups, C = self.shape
        # The positions of a part are adjacent, so this is a view even of a part of a plane.
        part = part.unflatten(1, (groups, -1))
        if C == 1:
            return part.squeeze(3)
        if self.times == 1:
            return part
        return part.unflatten(2, (-1, self.times)).flatten(3)

    def range(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """The lowest and the highest value of each group of w, a tensor like the view."""
        ends = w.amin(2), w.amax(2)
        if self.times > 1:
            of_channels = [end.unflatten(2, (self.times, -1)) for end in ends]
            ends = of_channels[0].amin(2), of_channels[1].amax(2)
        lowest, highest = (end.view(self.shape) for end in ends)
        poison = lowest * 0 + highest * 0
        return lowest + poison, highest + poison

    def spread(self, of_groups: Tensor) -> Tensor:
        """Numbers of groups, shaped to broadcast against the view."""
        if self.shape[2] == 1:
            return of_groups
        return of_groups.repeat(1, 1, self.times).unsqueeze(2)


def _pieces(part: Tensor) -> Iterator[tuple[slice, slice, Piece]]:
    """(positions, groups, piece) of the whole groups of a part, and of the shorter groups at its end."""
    S = part.shape[1]
    whole = S // GROUP * GROUP
    if whole:
        yield slice(0, whole), slice(0, whole // GROUP), Piece(part[:, :whole], GROUP)
    if whole < S:
        yield slice(whole, S), slice(whole // GROUP, whole // GROUP + 1), Piece(part[:, whole:], S - whole)


def random_bytes(first: int, count: int, key: int, device: torch.device) -> Tensor:
    """The bytes of ``count`` adjacent values, of which ``first`` is the place in memory.  Four values share a hash."""
    begin, end = first // 4, (first + count - 1) // 4 + 1
    h = torch.arange(end - begin, dtype=torch.int32, device=device)
    h.mul_(signed(GOLDEN)).add_(signed(begin * GOLDEN + key))
    # Integers of aten are signed, so that a shift would bring copies of the sign.
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(signed(MULTIPLIER))
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))
    return h.view(torch.uint8)[first - 4 * begin :][:count]


def _by_group(lines: Lines, lowest: Tensor, highest: Tensor, kink: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The range as (I, groups, C), and the kink as (I, 1, C)."""
    shape = lines.I, lines.groups, lines.C
    if kink is not None:
        kink = kink.repeat(lines.I * lines.C // kink.numel()).view(lines.I, 1, lines.C)
    return lowest.view(shape), highest.view(shape), kink


def pack(flat: Tensor, lines: Lines, bits: int, key: int, kink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, lowest and highest values of a tensor, whose memory is ``flat``."""
    count = lines.I * lines.groups * lines.C
    codes = flat.new_empty(lines.code_bytes(bits), dtype=torch.uint8)
    ends = flat.new_empty(count), flat.new_empty(count)
    lowest, highest, kink = _by_group(lines, *ends, kink)
    x, rows = flat.view(lines), _rows(codes, lines, bits)
    for i, s in _chunks(lines, flat.device):
        part = x[i, s]
        first = (i.start * lines.S + s.start) * lines.C
        noise = random_bytes(first, part.numel(), key, flat.device).view(part.shape)
        out = torch.empty_like(noise)
        for at, g, piece in _pieces(part):
            groups = slice(s.start // GROUP + g.start, s.start // GROUP + g.stop)
            here = lowest[i, groups], highest[i, groups]
            _encode(piece, piece.of(noise[:, at]), here, None if kink is None else kink[i], bits, piece.of(out[:, at]))
        rows[i, *_code_positions(s, lines, bits)] = _squeezed(out, lines, bits)
    return codes, *ends


def _encode(
    piece: Piece, noise: Tensor, range: tuple[Tensor, Tensor], kink: Tensor | None, bits: int, out: Tensor
) -> None:
    """Writes the codes of a piece into ``out``, and its range into ``range``."""
    dtype = piece.view.dtype
    v = piece.view.to(wide_dtype(dtype))
    if kink is not None:
        v = v - piece.spread(kink)
    lowest, highest = piece.range(v)
    if kink is not None and dtype != v.dtype:
        lowest, highest = outward(lowest, highest, dtype)
        v = torch.minimum(torch.maximum(v, piece.spread(lowest)), piece.spread(highest))
    range[0].copy_(lowest)
    range[1].copy_(highest)
    grid = grid_of(lowest, highest, bits)
    threshold, ratio, scale, offset = (piece.spread(of) for of in encoding_of(grid))
    if bool(grid.border.any()):
        v = v - piece.spread(grid.border)
    above = torch.ge(v, threshold, out=torch.empty_like(v))
    v = torch._prelu_kernel(v, ratio).mul_(scale)
    v.add_(torch.add(offset, noise.to(v.dtype), alpha=1 / 256)).add_(above, alpha=1 - 2 * NEAR)
    out.copy_(v.to(torch.int32))


def unpack(
    packed: tuple[Tensor, Tensor, Tensor], kink: Tensor | None, lines: Lines, bits: int, flat: Tensor
) -> None:
    """Writes the values into ``flat``, the memory of a tensor."""
    codes, *ends = packed
    lowest, highest, kink = _by_group(lines, *ends, kink)
    x, rows = flat.view(lines), _rows(codes, lines, bits)
    for i, s in _chunks(lines, flat.device):
        part = x[i, s]
        found = _stretched(rows[i, *_code_positions(s, lines, bits)], part.shape, bits)
        for at, g, piece in _pieces(part):
            groups = slice(s.start // GROUP + g.start, s.start // GROUP + g.stop)
            here = lowest[i, groups], highest[i, groups]
            _decode(piece, piece.of(found[:, at]), here, None if kink is None else kink[i], bits)


def _decode(piece: Piece, codes: Tensor, range: tuple[Tensor, Tensor], kink: Tensor | None, bits: int) -> None:
    """Writes the values of a piece."""
    dtype = piece.view.dtype
    wide = wide_dtype(dtype)
    grid = grid_of(range[0].to(wide), range[1].to(wide), bits)
    bounds = bounds_of(kink, grid, dtype)
    offset, ratio, scale = (piece.spread(of) for of in decoding_of(grid))
    d = torch.nn.functional.softshrink(codes.to(wide).sub_(offset), 0.5 - NEAR)
    v = torch._prelu_kernel(d, ratio).mul_(scale)
    v.add_(piece.spread(grid.border if kink is None else grid.border + kink))
    if bounds is not None:
        least, most = (piece.spread(of) for of in bounds)
        v = torch.where(d > 0, torch.maximum(v, least), torch.minimum(v, most))
    piece.view.copy_(v)


def _rows(codes: Tensor, lines: Lines, bits: int) -> Tensor:
    """The codes as (samples, positions, bytes of a row); a plane is one row."""
    return codes.view(lines.I, 1 if lines.C == 1 else lines.S, lines.row_bytes(bits))


def _code_positions(s: slice, lines: Lines, bits: int) -> tuple[slice, ...]:
    """The index of the bytes of positions s, after that of the samples."""
    per = 8 // bits
    return (slice(None), slice(s.start // per, -(-s.stop // per))) if lines.C == 1 else (s,)


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
    samples, S, C = shape
    if C == 1:
        return rows[:, 0, :S].unsqueeze(2)
    return rows[:, :, :C]
