"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward compares the positions of windows, without branches, and writes no int64 index.  Large windows are compared
along one axis after the other.  channels_last tensors on a CPU take aten's pooling, which is fast for them, and look
up the code of the distance between an index and the first position of its window.  Backward looks up the distance of
each code, and gives aten's backward the indices.

CUDA's kernel of backward writes 3D results into contiguous memory alone, whatever the strides of ``grad_input`` are.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..._torch import FakeTensor, write_gradient
from .windows import Pool, distances, first_codes, first_positions, steps

aten = torch.ops.aten

# A CPU takes samples of about this many bytes together.  They stay in its cache, and indices of the whole tensor would
# take twice the bytes of an fp32 result.
PART_BYTES = 2**22
# Windows of at most this many positions are compared in one pass over all axes, which holds no values between passes.
FEW = 8
# The integers of as many bytes as a floating-point number.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _parts(rows: bool, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the same samples of each tensor.  If contiguous (not ``rows``), each channel counts as a sample."""
    if _backend.off_cpu(tensors[0]) or tensors[0].nbytes <= PART_BYTES:
        yield tensors
        return
    # The tensors are dense, so that both are views.
    views = tensors if rows else tuple(t.flatten(0, 1).unsqueeze(1) for t in tensors)
    samples = max(1, PART_BYTES // (views[0].element_size() * views[0][0].numel()))
    yield from zip(*(t.split(samples) for t in views), strict=True)


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and the codes unless they are None.  All tensors are channels_last (``rows``) or contiguous."""
    if rows and not _backend.off_cpu(x):
        distance_of = _distances(tuple(x.shape[2:]), pool, x)
        # In a window that is wider than x, two positions may have one distance.
        if len(np.unique(distance_of.numpy())) == len(distance_of):
            _by_indices(x, z, codes, distance_of, pool)
            return
    _by_axes(x, z, codes, rows, pool)


def _by_indices(x: Tensor, z: Tensor, codes: Tensor | None, distance_of: Tensor, pool: Pool) -> None:
    """Aten's pooling of channels_last tensors, which a CPU runs for many channels at a time."""
    op = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    size, count = tuple(x.shape[2:]), tuple(z.shape[2:])
    first = first_positions(size, count, pool, x.device)
    # Where all values of a window are -inf, aten's index may lie before the first position inside of x.
    least = distance_of[first_codes(count, pool, x.device, range(len(count))).long()]
    table = np.zeros(int(distance_of[-1]) + 1, dtype=np.uint8)
    table[distance_of.numpy()] = np.arange(len(distance_of))
    code_of = torch.from_numpy(table)
    for x_part, z_part, codes_part in _parts(True, x, z, z if codes is None else codes):
        index = torch.empty_like(z_part, dtype=torch.int64)
        op.out(x_part, *pool, out=z_part, indices=index)
        if codes is not None:
            torch.take(code_of, torch.maximum(index.sub_(first), least, out=index), out=codes_part)


def _by_axes(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Compares the positions of windows along one axis after the other, the last axis first.

    Of equal values the first one wins, and of NaN the last one, so the order is that of aten's loops over all axes.
    """
    count = tuple(z.shape[2:])
    edges: list[int] = []
    slices = []
    for n, c, k, s, p, d in zip(x.shape[2:], count, *pool[:4], strict=True):
        edges = [p, max(0, (c - 1) * s + (k - 1) * d + 1 - p - n), *edges]
        slices.append([slice(at * d, at * d + (c - 1) * s + 1, s) for at in range(k)])
    passes = []
    dims = range(len(count))
    for axes in [dims] if math.prod(pool.kernel) <= FEW else [[axis] for axis in reversed(dims)]:
        of = [slices[axis] if axis in axes else [slice(None)] for axis in dims]
        first = None if codes is None else first_codes(count, pool, x.device, axes)
        passes.append(([(..., *window) for window in itertools.product(*of)], first, steps(pool.kernel)[axes[-1]]))
    for x_part, z_part, codes_part in _parts(rows, x, z, z if codes is None else codes):
        value = F.pad(x_part, edges, value=-math.inf) if any(edges) else x_part
        code = None
        for windows, first, step in passes[:-1]:
            value, code = _largest(value, code, windows, first, step)
        _largest(value, code, *passes[-1], (z_part, codes_part))


def _largest(
    value: Tensor,
    code: Tensor | None,
    windows: Sequence[tuple],
    first: Tensor | None,
    step: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The largest of the values that ``windows`` pick, and their codes unless ``first`` is None, without branches.

    The codes of adjacent windows are ``step`` apart, beside ``code``, those of ``value``.
    """
    picked = value[windows[0]]
    z, codes = (torch.empty_like(picked, dtype=dtype) for dtype in (value.dtype, torch.uint8)) if into is None else into
    z.copy_(picked)
    before: list[int | Tensor] = [0] * len(windows) if code is None else [code[window] for window in windows]
    # Where all values of a window are -inf, the code stays that of its first position inside of x.
    best = None if first is None else codes.copy_(before[0] + first)
    found = torch.empty_like(z)
    for at, window in enumerate(windows[1:], 1):
        found.copy_(value[window])
        more = torch.gt(found, z).logical_or_(found != found)
        _replace(z, found, more)
        if best is not None:
            # A later position has a larger code.
            torch.maximum(best, more.view(torch.uint8).mul_(before[at] + at * step), out=best)
    return z, best


def _replace(z: Tensor, value: Tensor, where: Tensor) -> None:
    """Writes ``value`` over z where ``where`` is true, and over ``value``.

    A CPU's ``torch.where`` has a branch, and its maximum of zeros of both signs is either.
    """
    integers = INTEGERS[z.element_size()]
    into = z.view(integers)
    into ^= value.view(integers).bitwise_xor_(into).bitwise_and_(where.to(integers).neg_())


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
    distance_of = _distances(size, pool, codes)
    return torch.take(distance_of, codes.long()).add_(first_positions(size, tuple(codes.shape[2:]), pool, codes.device))


def pick(ddx: Tensor, codes: Tensor, pool: Pool) -> Tensor:
    """For each window, the value of ``ddx`` at the position of its maximum."""
    index = indices(codes, tuple(ddx.shape[2:]), pool)
    return ddx.flatten(2).gather(2, index.flatten(2)).view(codes.shape)


def _distances(size: tuple[int, ...], pool: Pool, like: Tensor) -> Tensor:
    """The distance of each code from the first position of its window."""
    # A fake call makes a fake table.
    forgets = torch.compiler.is_compiling() or isinstance(like, FakeTensor)
    return (distances if forgets else _remembered_distances)(size, pool, like.device)


# Later calls may run in another mode.
_remembered_distances = functools.lru_cache(32)(torch.inference_mode(False)(distances))
