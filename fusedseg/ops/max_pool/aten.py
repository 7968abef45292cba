"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward has two implementations.  The first calls aten's pooling, which returns int64 indices, and turns them into codes
at once.  On a CPU aten's pooling is slow for contiguous tensors, because it reads one scalar at a time.  There the
second implementation, in ``planes.py``, compares whole rows, in chunks that fit the cache.  For the codes of large
windows, chunks are copied to channels_last instead, and given to the first implementation; small tensors are given to
it as they are.  Backward rebuilds the
indices (the first position of the window plus the distance that the code stands for) and calls aten's backward, on a
CPU in chunks.  So neither direction holds int64 indices of the whole tensor.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..layout import FORMATS
from . import chunks
from .planes import by_dimension
from .windows import Pool, first_positions, rows_told_apart, steps

aten = torch.ops.aten

# Windows with more positions are pooled faster in a channels_last copy than dimension by dimension.
FEW_POSITIONS = 4
# Up to this number of outputs, the number of calls costs more than their arithmetic.
FEW = 2**12
# Up to this number of windows of a plane, their first positions are remembered.
FEW_WINDOWS = 2**15
# Matrices of fewer rows are not transposed faster by aten than tensors are copied.
LEAST_TRANSPOSED = 32
# A multiple of the number of channels in a vector of any CPU.
VECTOR = 64


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and the codes unless they are None.  All tensors are channels_last (``rows``) or contiguous."""
    told_apart = rows_told_apart(tuple(x.shape[2:]), pool)
    planes = x.device.type == "cpu" and not rows
    if codes is not None and told_apart and _are_few(z, rows):
        _few(x, z, codes, pool)
    elif planes and codes is not None and told_apart and math.prod(pool.kernel) > FEW_POSITIONS:
        _by_indices(_as_rows(x, z, codes, pool), x, z)
    elif planes or (codes is not None and not told_apart):
        for of_x, of_z, inner in chunks.parts(x, z, rows, pool, split=True):
            by_dimension(x[of_x], z[of_z], None if codes is None else codes[of_z], inner)
    else:
        parts = chunks.parts(x, z, rows, pool, split=True)
        of_codes = ((x[of_x], z[of_z], None if codes is None else codes[of_z], inner) for of_x, of_z, inner in parts)
        _by_indices(of_codes, x, z)


def _are_few(z: Tensor, rows: bool) -> bool:
    """Whether there are so few outputs that the number of calls costs more than their arithmetic."""
    return z.numel() <= FEW and z.device.type == "cpu" and (z.dim() == 4 or not rows)


def _first(size, out_size, pool: Pool, device: torch.device, dtype: torch.dtype, inside: bool = False) -> Tensor:
    """``first_positions``, which is remembered if it is small, because making it takes as long as a small pool."""
    few = device.type == "cpu" and math.prod(out_size) <= FEW_WINDOWS
    make = _remembered_first if few else _remembered_first.__wrapped__
    return make(size, out_size, pool, device, dtype, inside)


@functools.lru_cache(32)
def _remembered_first(size, out_size, pool: Pool, device: torch.device, dtype: torch.dtype, inside: bool) -> Tensor:
    # Later calls may run in another mode.
    with torch.inference_mode(False):
        return first_positions(size, out_size, pool, device, dtype, inside)


@functools.lru_cache(16)
def _tables(size: tuple[int, ...], out_size: tuple[int, ...], pool: Pool) -> tuple[Tensor, Tensor, Tensor]:
    """The first position of each window, the code of each distance from it, and the distance of each code.

    A distance is the difference of two flat indices.  It must determine the code (``rows_told_apart``).
    """
    axes = (range(0, k * step, step) for k, step in zip(pool.kernel, _distances(size, pool), strict=True))
    distance_of = np.array([sum(at) for at in itertools.product(*axes)])
    code_of = np.zeros(distance_of[-1] + 1, dtype=np.uint8)
    code_of[distance_of] = np.arange(len(distance_of))
    with torch.inference_mode(False):
        first = first_positions(size, out_size, pool, torch.device("cpu"), torch.int64)
        return first, torch.from_numpy(code_of), torch.from_numpy(distance_of)


def _few(x: Tensor, z: Tensor, codes: Tensor, pool: Pool) -> None:
    """``forward`` for a few outputs; it looks the codes up."""
    op = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    first, code_of, _ = _tables(tuple(x.shape[2:]), tuple(z.shape[2:]), pool)
    index = torch.empty_like(z, dtype=torch.int64)
    op.out(x, *pool, out=z, indices=index)
    torch.take(code_of, index.sub_(first), out=codes)


def _as_rows(x: Tensor, z: Tensor, codes: Tensor, pool: Pool) -> Iterator[tuple[Tensor, Tensor, Tensor, Pool]]:
    """Ranges of contiguous planes as channels_last copies of x, z and codes.

    The caller writes to the copies of z and codes; these are copied back when it asks for the next range.
    """
    of_all = [t.view(1, -1, *t.shape[2:]) for t in (x, z, codes)]
    count, step = of_all[0].shape[1], max(1, chunks.CHUNK_BYTES // (x.element_size() * x[0, 0].numel()))
    copies: list[Tensor] = []
    for first in range(0, count, step):
        x_part, *others = parts = [t[:, first : first + step] for t in of_all]
        if not copies or copies[0].shape != x_part.shape:
            copies = [torch.empty_like(t, memory_format=FORMATS[t.dim()]) for t in parts]
        _copy_to_rows(copies[0], x_part)
        yield copies[0], copies[1], copies[2], pool
        for part, copy in zip(others, copies[1:], strict=True):
            part.copy_(copy)


def _copy_to_rows(rows: Tensor, planes: Tensor) -> None:
    """Copies a contiguous (1, C, *spatial) to a channels_last tensor."""
    C = planes.shape[1]
    if C < LEAST_TRANSPOSED:
        rows.copy_(planes)
        return
    # aten copies the transpose of a matrix faster than a tensor of another memory format.
    rows.movedim(1, -1).view(-1, C).copy_(planes.reshape(C, -1).t())


def _by_indices(parts: Iterable[tuple[Tensor, Tensor, Tensor | None, Pool]], whole_x: Tensor, whole_z: Tensor) -> None:
    """Pools parts of x, each into its parts of z and codes (unless these are None), from the indices that aten returns.

    On a CPU parts are channels_last.
    """
    size, dims, on_cpu = tuple(whole_x.shape[2:]), whole_x.dim() - 2, whole_x.device.type == "cpu"
    op = aten.max_pool2d_with_indices if dims == 2 else aten.max_pool3d_with_indices
    index: Tensor | None = None
    memory: _Memory | None = None
    tables: Any = None
    for x, z, codes, pool in parts:
        if index is None or index.shape != z.shape:
            index = torch.empty_like(z, dtype=torch.int64)
        op.out(x, *pool, out=z, indices=index)
        if codes is None:
            continue
        if memory is None:
            memory = _Memory(_narrow(size, pool))
        if tables is None or tables[0] != (z.shape, pool):
            # A part of a channels_last tensor may be a range of its first spatial dimension; indices count from there.
            first, inside = _first(size, tuple(z.shape[2:]), pool, x.device, memory.dtype), None
            # If all values of a window are -inf, aten's index is too low in two cases: on a CPU in channels_last_3d if
            # the channels do not fill a vector, and on GPUs in channels_last.
            if (dims == 3 and x.shape[1] % VECTOR) if on_cpu else (dims == 2 and not x.is_contiguous()):
                inside = _first(size, tuple(z.shape[2:]), pool, x.device, torch.int64, inside=True)
            tables = (z.shape, pool), first, inside
        _, first, inside = tables
        for piece in chunks.pieces(index):
            taken = chunks.along(index, piece)
            if inside is not None:
                taken = torch.maximum(taken, inside[piece])
            distance = memory.like(taken).copy_(taken).sub_(first[piece])
            code = _recoded(distance, _distances(size, pool), steps(pool.kernel), pool.kernel, memory)
            chunks.along(codes, piece).copy_(code)


class _Memory:
    """Tensors of one dtype for the numbers of a piece, which later pieces of the same shape use again.

    New memory for each piece would cost more than the arithmetic on it: the first write to a page of new memory takes
    microseconds.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._tensors: list[Tensor] = []

    def like(self, t: Tensor, number: int = 0) -> Tensor:
        """The tensor of this number, in the shape and with the order of strides of ``t``; its old values are lost."""
        if self._tensors and self._tensors[0].shape != t.shape:
            self._tensors.clear()
        while len(self._tensors) <= number:
            self._tensors.append(torch.empty_like(t, dtype=self.dtype))
        return self._tensors[number]


def _narrow(size: tuple[int, ...], pool: Pool) -> torch.dtype:
    """The narrowest integer type that holds codes and the distance of two positions of a window.

    Indices may wrap in this type, but their differences are exact.
    """
    reach = sum((k - 1) * d * step for k, d, step in zip(pool.kernel, pool.dilation, steps(size), strict=True))
    return torch.int16 if reach < 2**15 else torch.int32 if reach < 2**31 else torch.int64


def _recoded(number: Tensor, old: list[int], new: list[int], kernel: tuple[int, ...], memory: _Memory) -> Tensor:
    """Rewrites, in place, numbers of positions in a window.

    A step along each dimension adds ``old`` to the given numbers, and ``new`` to the results.  ``number`` is tensor 0
    of ``memory``; tensors after it are written to.
    """
    later: list[tuple[Tensor, int]] = []
    alike = old[-1] == new[-1]
    for axis, (k, of_old, of_new) in enumerate(zip(kernel[:-1], old, new, strict=False)):
        if k == 1:
            continue
        used = 1 + len(later)
        count = torch.ge(number, of_old, out=memory.like(number, used))
        for j in range(2, k):
            count.add_(torch.ge(number, j * of_old, out=memory.like(number, used + 1)))
        if alike and axis == len(kernel) - 2:
            # The remainder needs no change.
            number.sub_(count, alpha=of_old - of_new)
        else:
            number.sub_(count, alpha=of_old)
            later.append((count, of_new))
    if not alike:
        number.div_(old[-1], rounding_mode="floor").mul_(new[-1])
    for count, of_new in later:
        number.add_(count, alpha=of_new)
    return number


def _distances(size: tuple[int, ...], pool: Pool) -> list[int]:
    """The distance in flat indices from one position of a window to the next along each dimension."""
    return [d * step for d, step in zip(pool.dilation, steps(size), strict=True)]


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x of the maximum of each window."""
    index = torch.empty_like(codes, dtype=torch.int64)
    _write_indices(index, codes, _first_of_codes(codes, size, pool), size, pool, _Memory(_narrow(size, pool)))
    return index


def _first_of_codes(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """``first_positions`` for codes, in the narrowest type that holds every index and every distance."""
    types = (_narrow(size, pool), torch.int32, torch.int64)
    dtype = next(dtype for dtype in types if math.prod(size) <= torch.iinfo(dtype).max)
    return _first(size, tuple(codes.shape[2:]), pool, codes.device, dtype)


def _write_indices(
    index: Tensor, codes: Tensor, first: Tensor, size: tuple[int, ...], pool: Pool, memory: _Memory
) -> None:
    wide = _Memory(first.dtype)
    for piece in chunks.pieces(codes):
        code, into = chunks.along(codes, piece), chunks.along(index, piece)
        number = memory.like(code).copy_(code)
        distance = _recoded(number, steps(pool.kernel), _distances(size, pool), pool.kernel, memory)
        if first.dtype != memory.dtype:
            distance = wide.like(code).copy_(distance)
        # An addition in int64 takes seven times as long as one in int16, and four times as long as one in int32.
        into.copy_(distance.add_(first[piece]))


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx.  All tensors are channels_last (``rows``) or contiguous."""
    size = tuple(dx.shape[2:])
    name = "max_pool2d_with_indices_backward" if len(size) == 2 else "max_pool3d_with_indices_backward"
    op = getattr(aten, name).grad_input
    if _are_few(codes, rows) and rows_told_apart(size, pool):
        first, _, distance_of = _tables(size, tuple(codes.shape[2:]), pool)
        op(dz, dx, *pool, torch.take(distance_of, codes.long()).add_(first), grad_input=dx)
        return
    if dx.device.type == "cpu" and rows and not pool.overlaps:
        _backward_apart(dz, codes, dx, pool)
        return
    first = _first_of_codes(codes, size, pool)
    index, memory = None, _Memory(_narrow(size, pool))
    # The gradients of windows that overlap are summed, so the parts must not overlap.
    for of_x, of_z, _ in chunks.parts(dx, dz, rows, pool, split=False):
        into, code = dx[of_x], codes[of_z]
        if index is None or index.shape != code.shape:
            index = torch.empty_like(code, dtype=torch.int64)
        _write_indices(index, code, first, size, pool, memory)
        # aten reads only the shape of its input, so dx itself may stand in for it.
        op(dz[of_z], into, *pool, index, grad_input=into)


def _backward_apart(dz: Tensor, codes: Tensor, dx: Tensor, pool: Pool) -> None:
    """``backward`` for windows that do not overlap: each position of the window selects its values from dz."""
    size, count = dx.shape[2:], dz.shape[2:]
    kernel, stride, padding, dilation, _ = pool
    each = zip(size, count, kernel, stride, padding, dilation, strict=True)
    if any(s != k or d > 1 or c * s - p < n for n, c, k, s, p, d in each):
        # Some elements of x lie in no window.
        dx.zero_()
    # For each position: the windows whose position lies inside x, along the first dimension and along all later
    # dimensions, with the matching parts of dz and dx.
    parts = []
    for position in itertools.product(*map(range, pool.kernel)):
        of, at = [slice(None)] * 2, [slice(None)] * 2
        for j, n, c, s, p, d in zip(position, size, count, stride, padding, dilation, strict=True):
            shift = j * d - p
            low, high = max(0, -(shift // s)), min(c, -((shift - n) // s))
            of.append(slice(low, max(low, high)))
            at.append(slice(low * s + shift, max(low * s + shift, (high - 1) * s + shift + 1), s))
        along = of[2]
        of[2] = slice(None)
        parts.append((along, tuple(of), dz[tuple(of)], dx[tuple(at)]))
    memory = _Memory(dz.dtype)
    for n, begin, end in chunks.row_chunks(dz):
        part = codes[n, :, begin:end]
        code = memory.like(part).copy_(part)
        for number, (along, across, of_dz, of_dx) in enumerate(parts):
            low, high = max(begin, along.start), min(end, along.stop)
            if low < high:
                # The result is dz if the code names this position, otherwise 0.  No other op of aten selects as fast.
                aten.hardtanh_backward.grad_input(
                    of_dz[n].narrow(2, low, high - low),
                    code[across].narrow(2, low - begin, high - low),
                    number - 0.5,
                    number + 0.5,
                    grad_input=of_dx[n].narrow(2, low - along.start, high - low),
                )


def pick(ddx: Tensor, codes: Tensor, pool: Pool) -> Tensor:
    """For each window, the value of ``ddx`` at the position of its maximum."""
    index = indices(codes, tuple(ddx.shape[2:]), pool)
    return ddx.flatten(2).gather(2, index.flatten(2)).view(codes.shape)
