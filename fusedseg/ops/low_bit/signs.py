"""Which values of a tensor are above 0, in one bit a value.  On aten ops, on every device."""

import torch
from torch import Tensor

# 8 bytes of 0 or 1 times this number: the highest byte of the product has a bit for each of them, in their order.
GATHER = 0x0102040810204080
# A byte times SPREAD is 8 copies of it.  Of the k-th copy, CHOOSE leaves the k-th bit.
SPREAD, CHOOSE = 0x0101010101010101, 0x8040201008040201 - (1 << 64)


def pack_signs(t: Tensor) -> Tensor:
    """One bit for each value of a dense tensor, in the order of memory: uint8, 8 values a byte."""
    above = t.as_strided((t.numel(),), (1,)) > 0
    if above.numel() % 8:
        above = torch.nn.functional.pad(above, (0, 8 - above.numel() % 8))
    return (above.view(torch.int64) * GATHER).bitwise_right_shift_(56).bitwise_and_(255).to(torch.uint8)


def unpack_signs(packed: Tensor, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Whether each value of a tensor with this size and these strides was above 0: bool."""
    above = packed.to(torch.int64).mul_(SPREAD).bitwise_and_(CHOOSE).view(torch.uint8) != 0
    return above.as_strided(size, stride)
