"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward compares the positions of all windows one after the other, without branches, and writes no int64 index.  On a
CPU that takes a third of the time of aten's pooling for windows of 2x2, and two thirds for 3x3 and 2x2x2; but three
times as long for 13x13, because it grows with the positions of a window.  Backward looks up the distance of each code,
and gives aten's backward the indices.

CUDA's kernel of backward writes 3D results into contiguous memory alone, whatever the strides of ``grad_input`` are.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from types import EllipsisType

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..._torch import FakeTensor, write_gradient
from .windows import Pool, distances, first_codes, first_positions

aten = torch.ops.aten

# A CPU takes samples of about this many bytes together.  They stay in its cache, and indices of the whole tensor would
# take twice the bytes of an fp32 result.
PART_BYTES = 2**22
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
    size, count = tuple(x.shape[2:]), tuple(z.shape[2:])
    edges: list[int] = []
    windows: list[list[EllipsisType | slice]] = [[Ellipsis]]
    for n, c, k, s, p, d in zip(size, count, *pool[:4], strict=True):
        edges = [p, max(0, (c - 1) * s + (k - 1) * d + 1 - p - n), *edges]
        windows.append([slice(at * d, at * d + (c - 1) * s + 1, s) for at in range(k)])
    # Where all values of a window are -inf, the code stays that of its first position inside of x.
    least = first_codes(count, pool, x.device) if any(pool.padding) else None
    for x_part, z_part, codes_part in _parts(rows, x, z, z if codes is None else codes):
        padded = F.pad(x_part, edges, value=-math.inf) if any(edges) else x_part
        value = torch.empty_like(z_part)
        for code, window in enumerate(itertools.product(*windows)):
            found = padded[window]
            if code == 0:
                z_part.copy_(found)
            else:
                value.copy_(found)
                more = torch.gt(value, z_part).logical_or_(value != value)
                _replace(z_part, value, more)
            if codes is None:
                continue
            if code > 0:
                # A later position has a larger code.
                torch.maximum(codes_part, more.view(torch.uint8).mul_(code), out=codes_part)
            elif least is None:
                codes_part.zero_()
            else:
                codes_part.copy_(least)


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
