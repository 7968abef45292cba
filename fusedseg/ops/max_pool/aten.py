"""Max-pooling with window codes on aten ops, for every device: the mathematics of ``kernels/max_pool.py``.

Forward calls aten's pooling, which returns int64 indices, and looks up the code of the distance between an index and
the first position of its window.  Backward looks up the distance of each code, and gives aten's backward the indices.
On a CPU both process parts of a tensor (``parts.py``), so that indices of the whole tensor take no memory.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .parts import parts
from .windows import Pool, distances, first_positions, rows_told_apart

aten = torch.ops.aten

# Up to this number of windows of a plane, their first positions are remembered.
FEW_WINDOWS = 2**15


def forward(x: Tensor, z: Tensor, codes: Tensor | None, rows: bool, pool: Pool) -> None:
    """Writes z, and the codes unless they are None.  All tensors are channels_last (``rows``) or contiguous."""
    op = aten.max_pool2d_with_indices if x.dim() == 4 else aten.max_pool3d_with_indices
    least, split = (0,) * (x.dim() - 2), True
    if codes is not None and not rows_told_apart(tuple(x.shape[2:]), pool):
        least, split = pool.padding, False
        x, pool = _padded(x, tuple(z.shape[2:]), pool)
    for of_x, of_z, inner in parts(x, z, rows, pool, split):
        z_part = z[of_z]
        index = torch.empty_like(z_part, dtype=torch.int64)
        op.out(x[of_x], *inner, out=z_part, indices=index)
        if codes is not None:
            # A part may be a range of the first spatial dimension; its indices count from there.
            size, count = tuple(x[of_x].shape[2:]), tuple(z_part.shape[2:])
            # If all values of a window are -inf, aten's index may lie in the padding or before the window.
            torch.maximum(index, _first(size, count, inner, x.device, least), out=index)
            code_of, _ = _tables(size, pool, x.device)
            torch.take(code_of, index.sub_(_first(size, count, inner, x.device)), out=codes[of_z])


def backward(dz: Tensor, codes: Tensor, dx: Tensor, rows: bool, pool: Pool) -> None:
    """Writes dx.  All tensors are channels_last (``rows``) or contiguous."""
    name = "max_pool2d_with_indices_backward" if dx.dim() == 4 else "max_pool3d_with_indices_backward"
    op, size = getattr(aten, name).grad_input, tuple(dx.shape[2:])
    # The gradients of windows that overlap are summed, so the parts must not overlap.
    for of_x, of_z, _ in parts(dx, dz, rows, pool, split=False):
        into = dx[of_x]
        # aten reads only the shape of its input, so dx itself may stand in for it.
        op(dz[of_z], into, *pool, indices(codes[of_z], size, pool), grad_input=into)


def indices(codes: Tensor, size: tuple[int, ...], pool: Pool) -> Tensor:
    """The flat int64 index in x of the maximum of each window."""
    _, distance_of = _tables(size, pool, codes.device)
    return torch.take(distance_of, codes.long()).add_(_first(size, tuple(codes.shape[2:]), pool, codes.device))


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


def _first(
    size: tuple[int, ...],
    count: tuple[int, ...],
    pool: Pool,
    device: torch.device,
    least: tuple[int, ...] | None = None,
) -> Tensor:
    """``first_positions``, which is remembered if it is small, because making it takes as long as a small pool."""
    # What a compiler traces remembers no tables.
    few = math.prod(count) <= FEW_WINDOWS and not torch.compiler.is_compiling()
    return (_remembered_first if few else first_positions)(size, count, pool, device, least)


def _tables(size: tuple[int, ...], pool: Pool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The code of each distance from the first position of a window, and the distance of each code."""
    return (distances if torch.compiler.is_compiling() else _remembered_tables)(size, pool, device)


# Later calls may run in another mode.
_remembered_first = functools.lru_cache(32)(torch.inference_mode(False)(first_positions))
_remembered_tables = functools.lru_cache(32)(torch.inference_mode(False)(distances))
