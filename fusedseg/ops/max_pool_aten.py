"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward has two ways.  aten's own pooling gives int64 indices, which become codes at once.  On a CPU it is slow on
contiguous tensors (one scalar at a time); there each spatial dimension is pooled in turn, the last one first, by
comparisons of whole rows, a chunk that fits the cache at a time.  Backward rebuilds the indices, index = first
position of the window + what its code adds, and calls aten's backward; a chunk at a time on a CPU, so that neither
way holds int64 indices of the whole tensor.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

CHUNK_BYTES = 2**21
# outputs whose codes are made, or read, at a time
PIECE = 2**18
# as wide as a value
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pool(NamedTuple):
    """Window, stride, padding and dilation per spatial dimension; and ceil_mode."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool

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
    first = torch.zeros((1,) * len(size), dtype=dtype, device=like.device)
    for axis, (step, s, p, d) in enumerate(zip(_steps(size), *pool[1:4], strict=True)):
        along = torch.arange(out_size[axis], dtype=dtype, device=like.device) * s - p
        if inside:
            along = torch.where(along < 0, along + -(along // d) * d, along)
        first = first + (along * step).view(-1, *(1,) * (len(size) - 1 - axis))
    return first


def _chunks(x: Tensor, z: Tensor, rows: bool, pool: Pool) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Parts of x, and of z that they alone decide: samples and channels, each dense in memory, and in channels_last
    ranges of the first spatial dimension where windows do not overlap."""
    everything = slice(None)
    if x.device.type != "cpu":
        yield (everything,), (everything,)
        return
    N, C, count = *x.shape[:2], z.shape[2]
    planes = max(1, CHUNK_BYTES // (x.element_size() * x[0, 0].numel()))
    samples, channels = max(1, planes // C), C if rows else min(planes, C)
    k, s, p, d = (values[0] for values in pool[:4])
    step = count
    if rows and p == 0 and (k - 1) * d < s:
        step = max(1, CHUNK_BYTES // (x.element_size() * s * x[0, :, 0].numel()))
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
    first = _first_positions(size, out_size, pool, x, torch.int64).to(_narrow(size, pool))
    inside = None
    if rows and len(size) == 3 and x.device.type == "cpu":
        # in channels_last_3d aten's index is too low where all of a window is -inf
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
            codes[of_z][:, :, piece].copy_(_codes_of(taken.to(first.dtype).sub_(first[piece]), size, pool))


def _narrow(size: tuple[int, ...], pool: Pool) -> torch.dtype:
    """Integers that hold the distance of two positions of a window: differences of indices that wrap are exact."""
    reach = sum((k - 1) * d * step for k, d, step in zip(pool.kernel, pool.dilation, _steps(size), strict=True))
    return torch.int16 if reach < 2**15 else torch.int32 if reach < 2**31 else torch.int64


def _codes_of(distance: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """Codes from distances to the first position of the window, which are used up."""
    codes = None
    passed = torch.empty_like(distance)
    for axis, (step, k, d) in enumerate(zip(_steps(size), pool.kernel, pool.dilation, strict=True)):
        weight = math.prod(pool.kernel[axis + 1 :])
        if axis == len(size) - 1:
            last = distance if d == 1 else distance.div_(d, rounding_mode="floor")
            return last if codes is None else codes.add_(last)
        if k == 1:
            continue
        count = torch.ge(distance, d * step, out=torch.empty_like(distance))
        for j in range(2, k):
            count.add_(torch.ge(distance, j * d * step, out=passed))
        distance.sub_(count, alpha=d * step)
        codes = count.mul_(weight) if codes is None else codes.add_(count, alpha=weight)
    raise AssertionError("no spatial dimension")


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x that each window took."""
    dtype = torch.int32 if math.prod(size) < 2**31 - 2**8 else torch.int64
    first = _first_positions(size, tuple(codes.shape[2:]), pool, codes, dtype)
    return _indices(codes, first, size, pool).to(torch.int64)


def _indices(codes: Tensor, first: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    steps = _steps(size)
    code = codes.to(first.dtype)
    index = code * pool.dilation[-1] if pool.dilation[-1] != 1 else code.clone()
    index.add_(first)
    inner = 1
    for axis in range(len(size) - 1, 0, -1):
        inner *= pool.kernel[axis]
        # carrying from one dimension to the one before: code // inner, exact for codes below 256
        carry = (code * (2**16 // inner + 1)).bitwise_right_shift_(16)
        index.add_(
            carry,
            alpha=pool.dilation[axis - 1] * steps[axis - 1] - pool.kernel[axis] * pool.dilation[axis] * steps[axis],
        )
    return index


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx; all as dense as ``rows`` says."""
    size = tuple(dx.shape[2:])
    name = "max_pool2d_with_indices_backward" if len(size) == 2 else "max_pool3d_with_indices_backward"
    op = getattr(aten, name).grad_input
    dtype = torch.int32 if math.prod(size) < 2**31 - 2**8 else torch.int64
    first = _first_positions(size, tuple(codes.shape[2:]), pool, codes, dtype)
    index = None
    for of_x, of_z in _chunks(dx, dz, rows, pool):
        into, code = dx[of_x], codes[of_z]
        if index is None or index.shape != code.shape:
            index = torch.empty_like(code, dtype=torch.int64)
        for piece in _pieces(code):
            index[:, :, piece].copy_(_indices(code[:, :, piece], first[piece], size, pool))
        # aten asks its input for no more than its shape
        op(dz[of_z], into, *pool, index, grad_input=into)


def pick(ddx: Tensor, codes: Tensor, pool: Pool) -> Tensor:
    """Of each window, what ``ddx`` holds where it took its value."""
    index = indices(codes, tuple(ddx.shape[2:]), pool)
    return ddx.flatten(2).gather(2, index.flatten(2)).view(codes.shape)


def _by_dimension(x: Tensor, z: Tensor, codes: Tensor | None, pool: Pool) -> None:
    best, code = x, None
    for axis in range(x.dim() - 1, 1, -1):
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
        wins = torch.gt(v, best, out=torch.empty_like(best))
        wins.add_(torch.ne(v, v, out=torch.empty_like(best)))
        mask = wins.to(bits).neg_()
        changed = torch.bitwise_xor(best.view(bits), v.view(bits)).bitwise_and_(mask)
        best = torch.bitwise_xor(best.view(bits), changed).view(x.dtype)
        if coded:
            at = mask.to(torch.uint8)
            at.bitwise_and_(j * weight if code is None else position(code, j) + j * weight)
            torch.maximum(taken, at, out=taken)
    return best, taken if coded else None
