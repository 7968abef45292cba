"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward calls aten's pooling, which returns int64 indices, and looks up the code of the distance between an index and
the first position of its window.  Backward looks up the distance of each code, and gives aten's backward the indices.

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
from ..._torch import FakeTensor, write_gradient
from .windows import Pool, distances, first_positions, rows_told_apart

aten = torch.ops.aten

# A CPU takes samples of about this many bytes together.  They stay in its cache, and indices of the whole tensor would
# take twice the bytes of an fp32 result.
PART_BYTES = 2**21


def _parts(rows: bool, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same samples of each tensor.  If contiguous (not ``rows``), each channel counts as a sample."""
    if _backend.off_cpu(tensors[0]):
        yield tensors
        return
    # The tensors are dense, so that both are views.
    views = tensors if rows else tuple(t.flatten(0, 1).unsqueeze(1) for t in tensors)
    samples = max(1, PART_BYTES // (views[0].element_size() * views[0][0].numel()))
    yield from zip(*(t.split(samples) for t in views), strict=True)


def _pooled(x: Tensor, z: Tensor, pool: Pool) -> Tensor:
    """Writes z, and returns the index in x of the maximum of each window."""
    op = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    if _backend.off_cpu(x):
        found, index = op.default(x, *pool)
        z.copy_(found)
        return index
    index = torch.empty_like(z, dtype=torch.int64)
    op.out(x, *pool, out=z, indices=index)
    return index


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and the codes unless they are None.  All tensors are channels_last (``rows``) or contiguous."""
    if codes is None:
        for x_part, z_part in _parts(rows, x, z):
            _pooled(x_part, z_part, pool)
        return
    least = (0,) * (x.dim() - 2)
    if not rows_told_apart(tuple(x.shape[2:]), pool):
        least = pool.padding
        x, pool = _padded(x, tuple(z.shape[2:]), pool)
    size, count = tuple(x.shape[2:]), tuple(z.shape[2:])
    code_of, _ = _tables(size, pool, x)
    first = first_positions(size, count, pool, x.device)
    first_of_x = first_positions(size, count, pool, x.device, least)
    for x_part, z_part, codes_part in _parts(rows, x, z, codes):
        index = _pooled(x_part, z_part, pool)
        # If all values of a window are -inf, aten's index may lie in the padding or before the window.
        torch.maximum(index, first_of_x, out=index)
        torch.take(code_of, index.sub_(first), out=codes_part)


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx.  All tensors are channels_last (``rows``) or contiguous."""
    volume, size = dx.dim() == 5, tuple(dx.shape[2:])
    op = aten.max_pool3d_with_indices_backward if volume else aten.max_pool2d_with_indices_backward
    apart = rows and volume and _backend.off_cpu(dx)
    for dx_part, dz_part, codes_part in _parts(rows, dx, dz, codes):
        into = torch.empty_like(dx_part, memory_format=torch.contiguous_format) if apart else dx_part
        # aten reads only the shape of its input, so dx itself may stand in for it.
        write_gradient(op, into, dz_part, into, *pool, indices(codes_part, size, pool))
        if apart:
            dx_part.copy_(into)


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x of the maximum of each window."""
    _, distance_of = _tables(size, pool, codes)
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


def _tables(size: tuple[int, ...], pool: Pool, like: Tensor) -> tuple[Tensor, Tensor]:
    """The code of each distance from the first position of a window, and the distance of each code."""
    # A fake call makes fake tables.
    forgets = torch.compiler.is_compiling() or isinstance(like, FakeTensor)
    return (distances if forgets else _remembered_tables)(size, pool, like.device)


# Later calls may run in another mode.
_remembered_tables = functools.lru_cache(32)(torch.inference_mode(False)(distances))
