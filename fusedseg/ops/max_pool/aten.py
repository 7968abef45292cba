"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward calls aten's pooling, which returns int64 indices, and looks up the code of the distance between an index and
the first position of its window.  Backward looks up the distance of each code, and gives aten's backward the indices.
On a CPU both process parts of a tensor, which stay in its cache, so that indices of the whole tensor take no memory.

CUDA's kernels write 2D results in the format that the strides of their input suggest, those of dimensions of size 1
included, and 3D results into contiguous memory alone, whatever the strides of ``out`` are.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..._torch import write_gradient
from .windows import Pool, distances, first_positions, rows_told_apart

aten = torch.ops.aten

CHUNK_BYTES = 2**21
# Chunks of channels_last tensors are larger, because fewer chunks are faster there than smaller ones.
ROWS_CHUNK_BYTES = 2**22


def _parts(
    x: Tensor, z: Tensor, rows: bool, pool: Pool, split: bool
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], Pool]]:
    """Parts of x, each with the part of z that depends on it alone, and the pool from one to the other.

    A part is a range of samples and channels that is dense in memory.  In channels_last it may be a range of the first
    spatial dimension if ``split`` is True.  Such parts of x overlap if windows do.
    """
    everything = slice(None)
    if _backend.off_cpu(x):
        yield (everything,), (everything,), pool
        return
    N, C, count = *x.shape[:2], z.shape[2]
    nbytes = ROWS_CHUNK_BYTES if rows else CHUNK_BYTES
    planes = max(1, nbytes // (x.element_size() * x[0, 0].numel()))
    samples, channels = max(1, planes // C), C if rows else min(planes, C)
    if rows and samples == 1 and split:
        of_row = x.element_size() * pool.stride[0] * x[0, :, 0].numel()
        ranges = list(_ranges(x.shape[2], count, pool, max(1, nbytes // of_row)))
        for n in range(N):
            one = slice(n, n + 1)
            for of_x, of_z, inner in ranges:
                yield (one, everything, of_x), (one, everything, of_z), inner
        return
    for n in range(0, N, samples):
        for c in range(0, C, channels):
            part = slice(n, n + samples), slice(c, c + channels)
            yield part, part, pool


def _ranges(size: int, count: int, pool: Pool, step: int) -> Iterator[tuple[slice, slice, Pool]]:
    """Ranges of the first spatial dimension of x, of the windows inside them, and the pool of each range.

    aten pads both ends of a range, so only the first range may have padding.  There is one range for all windows if
    that is not possible.
    """
    (k, *_), (s, *_), (p, *others), (d, *_), ceil_mode = pool
    reach = (k - 1) * d + 1
    if p and (p >= s or ceil_mode or (count - 1) * s - p + reach > size):
        step = count
    inner = pool._replace(padding=(0, *others))
    for o in range(0, count, step):
        last = o + step >= count
        end = size if last else (o + step - 1) * s - p + reach
        yield slice(max(0, o * s - p), end), slice(o, o + step), inner if o else pool


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and the codes unless they are None.  All tensors are channels_last (``rows``) or contiguous."""
    op = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    least, split = (0,) * (x.dim() - 2), True
    if codes is not None and not rows_told_apart(tuple(x.shape[2:]), pool):
        least, split = pool.padding, False
        x, pool = _padded(x, tuple(z.shape[2:]), pool)
    for of_x, of_z, inner in _parts(x, z, rows, pool, split):
        z_part = z[of_z]
        if _backend.off_cpu(x):
            found, index = op.default(x[of_x], *inner)
            z_part.copy_(found)
        else:
            index = torch.empty_like(z_part, dtype=torch.int64)
            op.out(x[of_x], *inner, out=z_part, indices=index)
        if codes is not None:
            # A part may be a range of the first spatial dimension; its indices count from there.
            size, count = tuple(x[of_x].shape[2:]), tuple(z_part.shape[2:])
            # If all values of a window are -inf, aten's index may lie in the padding or before the window.
            torch.maximum(index, first_positions(size, count, inner, x.device, least), out=index)
            code_of, _ = _tables(size, pool, x.device)
            torch.take(code_of, index.sub_(first_positions(size, count, inner, x.device)), out=codes[of_z])


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx.  All tensors are channels_last (``rows``) or contiguous."""
    name = "max_pool2d_with_indices_backward" if dx.dim() == 4 else "max_pool3d_with_indices_backward"
    op, size = getattr(aten, name), tuple(dx.shape[2:])
    # The gradients of windows that overlap are summed, so the parts must not overlap.
    for of_x, of_z, _ in _parts(dx, dz, rows, pool, split=False):
        part = dx[of_x]
        apart = _backend.off_cpu(dx) and dx.dim() == 5
        into = torch.empty_like(part, memory_format=torch.contiguous_format) if apart and rows else part
        # aten reads only the shape of its input, so dx itself may stand in for it.
        write_gradient(op, into, dz[of_z], into, *pool, indices(codes[of_z], size, pool))
        if into is not part:
            part.copy_(into)


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x of the maximum of each window."""
    _, distance_of = _tables(size, pool, codes.device)
    return torch.take(distance_of, codes.long()).add_(first_positions(size, tuple(codes.shape[2:]), pool, codes.device))


def pick(ddx: Tensor, codes: Tensor, pool: Pool) -> Tensor:
    """For each window, the value of ``ddx`` at the position of its maximum."""
    index = indices(codes, tuple(ddx.shape[2:]), pool)
    return ddx.flatten(2).gather(2, index.flatten(2)).view(codes.shape)


def _padded(x: Tensor, count: tuple[int, ...], pool: Pool) -> tuple[Tensor, Pool]:
    """x with its padding, in which a distance determines the position in a window, and the pool without padding."""
    edges: list[int] = []
    for n, c, k, s, p, d in zip(x.shape[2:], count, *pool[:4], strict=True):
        edges = [p, max(0, (c - 1) * s + (k - 1) * d + 1 - p - n), *edges]
    return F.pad(x, edges, value=-math.inf), pool._replace(padding=(0,) * len(count), ceil_mode=False)


def _tables(size: tuple[int, ...], pool: Pool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The code of each distance from the first position of a window, and the distance of each code."""
    return (distances if torch.compiler.is_compiling() else _remembered_tables)(size, pool, device)


# Later calls may run in another mode.
_remembered_tables = functools.lru_cache(32)(torch.inference_mode(False)(distances))
