"""Max-pooling of contiguous planes on a CPU, one spatial dimension after another, by comparisons of whole rows.

It is faster than aten's pooling, which reads planes one scalar at a time.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from .windows import Pool

# The integer type for each width of a value in bytes.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_dimension(x: Tensor, z: Tensor, codes: Tensor | None, pool: "Pool") -> None:
    """Writes z, and the codes unless they are None; with codes the last dimension comes first."""
    best, code = x, None
    # Without codes any order is right.  The last dimension is slow.  It comes last, when the fewest values are left.
    for axis in range(x.dim() - 1, 1, -1) if codes is not None else range(2, x.dim()):
        best, code = _pool_axis(best, code, axis, z.shape[axis], pool, codes is not None)
    z.copy_(best)
    if codes is not None and code is not None:
        codes.copy_(code)


def _pool_axis(
    x: Tensor, code: Tensor | None, axis: int, count: int, pool: "Pool", coded: bool
) -> tuple[Tensor, Tensor | None]:
    """Pools one dimension to ``count`` windows.  ``code`` has the codes of the dimensions after it.

    Codes of later positions are larger, so the maximum of the codes belongs to the last position that won.
    """
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
        # Comparisons of strided elements are slow, so they are copied first.
        return view if axis < t.dim() - 1 else view.contiguous()

    best = position(x, 0)
    bits = BITS[x.element_size()]
    if coded:
        taken = torch.zeros_like(best, dtype=torch.uint8) if code is None else position(code, 0).clone()
        # If all values are -inf, the code names the first position outside the padding.
        for o in range(min(count, -(-p // s))):
            j = -(-(p - o * s) // d)
            at = taken.select(axis, o)
            at.fill_(0) if code is None else at.copy_(code.select(axis, o * s + j * d))
            at.add_(j * weight)
    for j in range(1, k):
        v = position(x, j)
        if not coded:
            # If the values are zeros of different signs, both are right.
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
