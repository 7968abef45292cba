"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward has two ways.  aten's own pooling gives int64 indices, which become codes at once.  On a CPU it is slow on
contiguous tensors (one scalar at a time); there each spatial dimension is pooled in turn, the last one first, by
comparisons of whole rows, a chunk that fits the cache at a time.  Backward rebuilds the indices, index = first
position of the window + what its code adds, and calls aten's backward; a chunk at a time on a CPU, so that neither
way holds int64 indices of the whole tensor.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

CHUNK_BYTES = 2**21
# of channels_last, of which fewer chunks are worth more than smaller ones
ROWS_CHUNK_BYTES = 2**23
# outputs whose codes are made, or read, at a time
PIECE = 2**20
# channels in a vector of any CPU, or a multiple of it
VECTOR = 64
# as wide as a value
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pool(NamedTuple):
    """Window, stride, padding and dilation per spatial dimension; and ceil_mode."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

    @property
    def overlaps(self) -> bool:
        return any((k - 1) * d >= s for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True))

    def output_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        out = []
        for n, k, s, p, d in zip(size, *self[:4], strict=True):
            count = (n + 2 * p - d * (k - 1) - 1 + (s - 1 if self.ceil_mode else 0)) // s + 1
            # no window begins in the padding on the right
            out.append(count - 1 if self.ceil_mode and (count - 1) * s >= n + p else count)
        return tuple(out)


def _steps(size: tuple[int, ...]) -> list[int]:
    """Elements from one position to the next along each dimension."""
    return [math.prod(size[axis + 1 :]) for axis in range(len(size))]


def _rows_told_apart(size: tuple[int, ...], pool: Pool) -> bool:
    """Whether the position in the window follows from the distance to its first: not where it is wider than x."""
    reach = 0
    for k, d, step in zip(reversed(pool.kernel), reversed(pool.dilation), reversed(_steps(size)), strict=True):
        if k > 1 and reach >= d * step:
            return False
        reach += (k - 1) * d * step
    return True


def _first_positions(size, out_size, pool: Pool, like: Tensor, dtype: torch.dtype, inside: bool = False) -> Tensor:
    """Flat index of the first position of every window, which may lie in the padding; or the first one inside x."""
    first = torch.zeros((), dtype=torch.int64, device=like.device)
    for axis, (step, s, p, d) in enumerate(zip(_steps(size), *pool[1:4], strict=True)):
        along = torch.arange(-p, out_size[axis] * s - p, s, device=like.device)
        if inside:
            along = torch.where(along < 0, along + -(along // d) * d, along)
        first = first + (along * step).view(-1, *(1,) * (len(size) - 1 - axis))
    return first.to(dtype)


def _chunks(x: Tensor, z: Tensor, rows: bool, pool: Pool) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Parts of x, and of z that they alone decide: samples and channels, each dense in memory, and in channels_last
    ranges of the first spatial dimension where windows do not overlap."""
    everything = slice(None)
    if x.device.type != "cpu":
        yield (everything,), (everything,)
        return
    N, C, count = *x.shape[:2], z.shape[2]
    nbytes = ROWS_CHUNK_BYTES if rows else CHUNK_BYTES
    planes = max(1, nbytes // (x.element_size() * x[0, 0].numel()))
    samples, channels = max(1, planes // C), C if rows else min(planes, C)
    k, s, p, d = (values[0] for values in pool[:4])
    step = count
    if rows and samples == 1 and p == 0 and (k - 1) * d < s:
        step = max(1, nbytes // (x.element_size() * s * x[0, :, 0].numel()))
    for n in range(0, N, samples):
        for c in range(0, C, channels):
            part = slice(n, n + samples), slice(c, c + channels)
            if step >= count:
                yield part, part
                continue
            for o in range(0, count, step):
                end = (o + step) * s if o + step < count else x.shape[2]
                yield (
                    (slice(n, n + 1), everything, slice(o * s, end)),
                    (slice(n, n + 1), everything, slice(o, o + step)),
                )


def _pieces(z: Tensor) -> Iterator[slice]:
    """Ranges of the first spatial dimension of few enough values for temporaries to stay in the cache."""
    step = count = z.shape[2]
    if z.device.type == "cpu":
        step = max(1, PIECE // (z.numel() // count))
    return (slice(o, min(o + step, count)) for o in range(0, count, step))


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and codes unless None; all as dense as ``rows`` says, channels_last or contiguous."""
    size, out_size = tuple(x.shape[2:]), tuple(z.shape[2:])
    told_apart = _rows_told_apart(size, pool)
    if (x.device.type == "cpu" and not rows) or (codes is not None and not told_apart):
        for of_x, of_z in _chunks(x, z, rows, pool):
            _by_dimension(x[of_x], z[of_z], None if codes is None else codes[of_z], pool)
        return
    op = aten.max_pool2d_with_indices if len(size) == 2 else aten.max_pool3d_with_indices
    # unused without codes
    first = _first_positions(size, out_size, pool, x, _narrow(size, pool))
    inside = None
    if rows and (x.shape[1] % VECTOR and len(size) == 3 if x.device.type == "cpu" else len(size) == 2):
        # where all of a window is -inf, aten's index is too low: on a CPU in channels_last_3d, of channels that fill no
        # vector, and on GPUs in channels_last
        inside = _first_positions(size, out_size, pool, x, torch.int64, inside=True)
    index = None
    for of_x, of_z in _chunks(x, z, rows, pool):
        if index is None or index.shape != z[of_z].shape:
            index = torch.empty_like(z[of_z], dtype=torch.int64)
        op.out(x[of_x], *pool, out=z[of_z], indices=index)
        if codes is None:
            continue
        for piece in _pieces(index):
            taken = index[:, :, piece]
            if inside is not None:
                taken = torch.maximum(taken, inside[piece])
            distance = taken.to(first.dtype).sub_(first[piece])
            codes[of_z][:, :, piece].copy_(_recoded(distance, _distances(size, pool), _steps(pool.kernel), pool.kernel))


def _narrow(size: tuple[int, ...], pool: Pool) -> torch.dtype:
    """Integers that hold the distance of two positions of a window, and codes: differences of indices that wrap are
    exact."""
    reach = sum((k - 1) * d * step for k, d, step in zip(pool.kernel, pool.dilation, _steps(size), strict=True))
    return torch.int16 if reach < 2**15 else torch.int32 if reach < 2**31 else torch.int64


def _recoded(number: Tensor, old: list[int], new: list[int], kernel: tuple[int, ...]) -> Tensor:
    """Positions of a window, numbers of ``old`` a step along each dimension, as numbers of ``new`` a step; in place."""
    later = []
    passed = torch.empty_like(number)
    alike = old[-1] == new[-1]
    for axis, (k, of_old, of_new) in enumerate(zip(kernel[:-1], old, new, strict=False)):
        if k == 1:
            continue
        count = torch.ge(number, of_old, out=torch.empty_like(number))
        for j in range(2, k):
            count.add_(torch.ge(number, j * of_old, out=passed))
        if alike and axis == len(kernel) - 2:
            # what is left is right as it is
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
    """From one position of a window to the next along each dimension, in flat indices."""
    return [d * step for d, step in zip(pool.dilation, _steps(size), strict=True)]


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x that each window took."""
    index = torch.empty_like(codes, dtype=torch.int64)
    first = _first_positions(size, tuple(codes.shape[2:]), pool, codes, torch.int64)
    for piece in _pieces(codes):
        _write_indices(index[:, :, piece], codes[:, :, piece], first[piece], size, pool)
    return index


def _write_indices(index: Tensor, codes: Tensor, first: Tensor, size: tuple[int, ...], pool: Pool) -> None:
    distance = _recoded(codes.to(_narrow(size, pool)), _steps(pool.kernel), _distances(size, pool), pool.kernel)
    index.copy_(distance).add_(first)


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx; all as dense as ``rows`` says."""
    size = tuple(dx.shape[2:])
    if dx.device.type == "cpu" and rows and not pool.overlaps:
        _backward_apart(dz, codes, dx, pool)
        return
    name = "max_pool2d_with_indices_backward" if len(size) == 2 else "max_pool3d_with_indices_backward"
    op = getattr(aten, name).grad_input
    first = _first_positions(size, tuple(codes.shape[2:]), pool, codes, torch.int64)
    index = None
    for of_x, of_z in _chunks(dx, dz, rows, pool):
        into, code = dx[of_x], codes[of_z]
        if index is None or index.shape != code.shape:
            index = torch.empty_like(code, dtype=torch.int64)
        for piece in _pieces(code):
            _write_indices(index[:, :, piece], code[:, :, piece], first[piece], size, pool)
        # aten asks its input for no more than its shape
        op(dz[of_z], into, *pool, index, grad_input=into)


def _backward_apart(dz: Tensor, codes: Tensor, dx: Tensor, pool: Pool) -> None:
    """Of windows that do not overlap: each position of the window selects from dz what is its own."""
    size, count = dx.shape[2:], dz.shape[2:]
    if any(s != k or d > 1 or c * s - p < n for n, c, k, s, p, d in zip(size, count, *pool[:4], strict=True)):
        # some lie in no window
        dx.zero_()
    # of each position: the windows whose position lies inside x, there and along the first dimension; and where it is
    parts = []
    for position in itertools.product(*map(range, pool.kernel)):
        of, at = [slice(None)] * 2, [slice(None)] * 2
        for j, n, c, s, p, d in zip(position, size, count, *pool[1:4], strict=True):
            shift = j * d - p
            low, high = max(0, -(shift // s)), min(c, -((shift - n) // s))
            of.append(slice(low, max(low, high)))
            at.append(slice(low * s + shift, max(low * s + shift, (high - 1) * s + shift + 1), s))
        along = of[2]
        of[2] = slice(None)
        parts.append((along, tuple(of), dz[tuple(of)], dx[tuple(at)]))
    for n, begin, end in _row_chunks(dz):
        code = codes[n, :, begin:end].to(dz.dtype)
        for number, (along, across, of_dz, of_dx) in enumerate(parts):
            low, high = max(begin, along.start), min(end, along.stop)
            if low < high:
                # dz where the code is this position's, 0 elsewhere: of all such selections in aten the fastest
                aten.hardtanh_backward.grad_input(
                    of_dz[n].narrow(2, low, high - low),
                    code[across].narrow(2, low - begin, high - low),
                    number - 0.5,
                    number + 0.5,
                    grad_input=of_dx[n].narrow(2, low - along.start, high - low),
                )


def _row_chunks(z: Tensor) -> Iterator[tuple[slice, int, int]]:
    """Samples, and a range of their first spatial dimension, of few enough values to stay in the cache."""
    step = max(1, PIECE // z[0, :, 0].numel())
    samples = max(1, step // z.shape[2])
    for n in range(0, z.shape[0], samples):
        for begin in range(0, z.shape[2], step):
            yield slice(n, n + samples), begin, min(begin + step, z.shape[2])


def pick(ddx: Tensor, codes: Tensor, pool: Pool) -> Tensor:
    """Of each window, what ``ddx`` holds where it took its value."""
    index = indices(codes, tuple(ddx.shape[2:]), pool)
    return ddx.flatten(2).gather(2, index.flatten(2)).view(codes.shape)


def _by_dimension(x: Tensor, z: Tensor, codes: Tensor | None, pool: Pool) -> None:
    best, code = x, None
    # without codes in any order: the last one, whose positions are scattered, when there is least of it
    for axis in range(x.dim() - 1, 1, -1) if codes is not None else range(2, x.dim()):
        best, code = _pool_axis(best, code, axis, z.shape[axis], pool, codes is not None)
    z.copy_(best)
    if codes is not None and code is not None:
        codes.copy_(code)


def _pool_axis(
    x: Tensor, code: Tensor | None, axis: int, count: int, pool: Pool, coded: bool
) -> tuple[Tensor, Tensor | None]:
    """Pools one dimension to ``count`` windows; ``code``: those of the dimensions after it.  Codes of later positions
    are larger, so that of the positions taken one after the other, the last one's is the maximum."""
    k, s, p, d = (values[axis - 2] for values in pool[:4])
    weight = math.prod(pool.kernel[axis - 1 :])
    after = (count - 1) * s + (k - 1) * d + 1 - p - x.shape[axis]
    if p or after > 0:
        edges = [0, 0] * (x.dim() - 1 - axis) + [p, max(0, after)]
        x = F.pad(x, edges, value=-math.inf)
        code = None if code is None else F.pad(code, edges)

    def position(t: Tensor, j: int) -> Tensor:
        view = t.narrow(axis, j * d, (count - 1) * s + 1)
        if s > 1:
            view = view[(slice(None),) * axis + (slice(None, None, s),)]
        # comparisons of every other element are slow
        return view if axis < t.dim() - 1 else view.contiguous()

    best = position(x, 0)
    bits = BITS[x.element_size()]
    if coded:
        taken = torch.zeros_like(best, dtype=torch.uint8) if code is None else position(code, 0).clone()
        # where all is -inf, the first position that is no padding
        for o in range(min(count, -(-p // s))):
            j = -(-(p - o * s) // d)
            at = taken.select(axis, o)
            at.fill_(0) if code is None else at.copy_(code.select(axis, o * s + j * d))
            at.add_(j * weight)
    for j in range(1, k):
        v = position(x, j)
        if not coded:
            # of zeros of both signs either one
            best = torch.maximum(v, best)
            continue
        wins = torch.gt(v, best, out=torch.empty_like(best))
        wins.add_(torch.ne(v, v, out=torch.empty_like(best)))
        mask = wins.to(bits).neg_()
        changed = torch.bitwise_xor(best.view(bits), v.view(bits)).bitwise_and_(mask)
        best = torch.bitwise_xor(best.view(bits), changed).view(x.dtype)
        at = mask.to(torch.uint8)
        at.bitwise_and_(j * weight if code is None else position(code, j) + j * weight)
        torch.maximum(taken, at, out=taken)
    return best, taken if coded else None
