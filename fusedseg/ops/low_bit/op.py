"""The storage op: ``pack`` keeps a dense tensor in 8, 4 or 2 bits a value, and ``unpack_op`` rebuilds it.

    codes, lowest, highest = pack(t, kink, bits=4, key=mixed(seed, step, place))
    t4 = unpack_op(codes, lowest, highest, kink, 4, t.shape, t.stride())      every sign is exact; right on average

With a kink, one number for each channel, or for each channel of each sample, in the dtype of the arithmetic, the sign
of ``t - kink`` is exact instead.  That of a norm and an activation that bends at 0 is mean - bias / (weight * rstd).
Rounding depends on the key and on the place of a value in memory, and on nothing else.  ``grid.py`` describes the
values that codes stand for.  A group with an infinity or NaN comes back as NaN.

Source: stochastic rounding of groups is that of Chen et al., "ActNN", ICML 2021; the border of signs is ours.
"""

import torch
from torch import Tensor

from ... import _backend
from . import aten
from .spec import lines_of, signed


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def pack(t: Tensor, kink: Tensor | None, bits: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, and the lowest and the highest value of each group."""
    if t.numel() == 0:
        return packed_like(t, kink, bits)
    lines = lines_of(t, 0 if kink is None else kink.numel())
    if not _backend.use_triton(t, "low_bit"):
        return aten.pack(_flat(t), lines, bits, key, kink)
    from ...kernels.low_bit import low_bit_pack

    with _backend.launching(t):
        return low_bit_pack(_flat(t), lines, bits, signed(key), kink)


def packed_like(t: Tensor, kink: Tensor | None, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``pack`` without values."""
    lines = lines_of(t, 0 if kink is None else kink.numel())
    groups = lines.I * lines.groups * lines.C
    return t.new_empty(lines.code_bytes(bits), dtype=torch.uint8), t.new_empty(groups), t.new_empty(groups)


@torch.library.custom_op(
    "fusedseg::low_bit_unpack",
    mutates_args=(),
    schema="(Tensor codes, Tensor lowest, Tensor highest, Tensor? kink, int bits, SymInt[] size, SymInt[] stride)"
    " -> Tensor",
)
def unpack_op(codes, lowest, highest, kink, bits, size, stride):
    t = torch.empty_strided(size, stride, dtype=lowest.dtype, device=codes.device)
    lines = lines_of(t, 0 if kink is None else kink.numel())
    if t.numel() == 0:
        return t
    if not _backend.use_triton(t, "low_bit"):
        aten.unpack((codes, lowest, highest), kink, lines, bits, _flat(t))
        return t
    from ...kernels.low_bit import low_bit_unpack

    with _backend.launching(t):
        low_bit_unpack(codes, lowest, highest, kink, lines, bits, _flat(t))
    return t


@unpack_op.register_fake
def _(codes, lowest, highest, kink, bits, size, stride):
    return torch.empty_strided(size, stride, dtype=lowest.dtype, device=codes.device)
