"""Which values of a tensor are above 0, in one bit a value.  On aten ops, on every device."""

from collections.abc import Iterator

import torch
from torch import Tensor

# 8 bytes of 0 or 1 times this number: the highest byte of the product has a bit for each of them, in their order.
GATHER = 0x0102040810204080
# A byte times SPREAD is 8 copies of it.  Of the k-th copy, CHOOSE leaves the k-th bit.
SPREAD, CHOOSE = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
# The values that are packed at once, and their bits.
CHUNK = 1 << 23


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def pack_signs(t: Tensor) -> Tensor:
    """One bit for each value of a dense tensor, in the order of memory: uint8, 8 values a byte."""
    packed = torch.empty(-(-t.numel() // 8), dtype=torch.uint8, device=t.device)
    for of_chunk, part in zip(packed.split(CHUNK // 8), _flat(t).split(CHUNK), strict=True):
        above = part > 0
        if above.numel() % 8:
            above = torch.nn.functional.pad(above, (0, 8 - above.numel() % 8))
        of_chunk.copy_((above.view(torch.int64) * GATHER).bitwise_right_shift_(56).bitwise_and_(255))
    return packed


def parts_with_signs(t: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of the memory of a dense tensor ``t``, and for each value of a part whether it was above 0 when packed."""
    for of_chunk, part in zip(packed.split(CHUNK // 8), _flat(t).split(CHUNK), strict=True):
        above = of_chunk.to(torch.int64).mul_(SPREAD).bitwise_and_(CHOOSE).view(torch.uint8)[: part.numel()] != 0
        yield part, above
