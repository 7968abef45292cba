"""The storage op: ``pack`` keeps a tensor in 8, 4 or 2 bits a value, and ``unpack`` rebuilds it.

    packed = pack(t, bits=4, seed=mixed(seed, step, place))
    t4 = unpack(packed)             the size, strides and dtype of t; every sign is exact; right on average

With a kink, one number for each channel, the sign of ``t - kink`` is exact instead.  That of a norm and an activation
that bends at 0 is mean - bias / (weight * rstd).  Rounding depends on the seed and on the place of a value in memory,
and on nothing else.  ``grid.py`` describes the values that codes stand for.

Both functions record nothing for autograd.  Eager calls run directly; fake tensors and graphs of ``torch.compile`` go
through the ops ``fusedseg::low_bit_pack`` and ``fusedseg::low_bit_unpack``.

Source: stochastic rounding of groups is that of Chen et al., "ActNN", ICML 2021; the border of signs is ours.
"""

import torch
from torch import Tensor

from ... import _backend
from ..._torch import FakeTensor
from ..check import check_dtype, check_tensor
from . import aten
from .spec import BITS, OP, Packed, is_dense, lines_of, mixed, signed, wide_dtype


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


def _stored(t: Tensor) -> Tensor:
    """``t``, or a dense copy in the same order if elements of its memory are not its own, or are shared."""
    return t if is_dense(t.shape, t.stride()) else torch.empty_like(t).copy_(t)


def _pack(t: Tensor, kink: Tensor | None, bits: int, key: int) -> tuple[Tensor, Tensor, Tensor]:
    lines = lines_of(t, 0 if kink is None else kink.numel())
    if t.numel() == 0:
        return t.new_empty(0, dtype=torch.uint8), t.new_empty(0), t.new_empty(0)
    if not _backend.use_triton(t, "low_bit"):
        return aten.pack(_flat(t), lines, bits, key, kink)
    from ...kernels.low_bit import low_bit_pack

    with _backend.launching(t):
        return low_bit_pack(_flat(t), lines, bits, signed(key), kink)


def _unpack(packed: Packed) -> Tensor:
    codes, lowest, highest, kink, bits, size, stride = packed
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


@torch.library.custom_op(
    "fusedseg::low_bit_pack",
    mutates_args=(),
    schema="(Tensor t, Tensor? kink, int bits, int key) -> (Tensor, Tensor, Tensor)",
)
def pack_op(t, kink, bits, key):
    return _pack(t, kink, bits, key)


@pack_op.register_fake
def _(t, kink, bits, key):
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
    return _unpack(Packed(codes, lowest, highest, kink, bits, tuple(size), tuple(stride)))


@unpack_op.register_fake
def _(codes, lowest, highest, kink, bits, size, stride):
    return torch.empty_strided(size, stride, dtype=lowest.dtype, device=codes.device)


def _by_op(t: Tensor) -> bool:
    return torch.compiler.is_compiling() or isinstance(t, FakeTensor) or t.is_meta


def _check(t: Tensor, bits: int, seed: int, kink: Tensor | None) -> None:
    check_tensor(OP, t, "t")
    check_dtype(OP, "t", t.dtype)
    if bits not in BITS:
        raise ValueError(f"{OP}: bits must be one of {', '.join(map(str, BITS))}, got {bits!r}")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"{OP}: seed must be an integer, got {type(seed).__name__}")
    if kink is None:
        return
    check_tensor(OP, kink, "kink")
    if t.dim() < 2:
        raise ValueError(f"{OP}: t must have shape (N, C) or (N, C, *spatial) if a kink is given, got {tuple(t.shape)}")
    N, C = t.shape[:2]
    if kink.shape not in ((C,), (N * C,)):
        raise ValueError(
            f"{OP}: kink must have shape ({C},), one value per channel of t, or ({N * C},), one per sample and "
            f"channel, got {tuple(kink.shape)}"
        )
    if not kink.is_floating_point():
        raise TypeError(f"{OP}: kink must be floating point, got {kink.dtype}")
    if kink.device != t.device:
        raise ValueError(f"{OP}: kink must be on {t.device}, the device of t, got {kink.device}")


@torch.no_grad()
def pack(t: Tensor, bits: int, seed: int, kink: Tensor | None = None) -> Packed:
    """``t`` in ``bits`` bits a value, and two numbers per group of 256 values.

    Args:
        t: fp16, bf16, fp32 or fp64, of any shape and strides.  ``unpack`` returns the strides of a dense tensor;
            others come back with the strides of ``torch.empty_like(t)``.
        bits: 8 or 4; 2 for experiments.
        seed: an integer.  The same seed gives the same codes; different seeds give independent rounding errors.
        kink: (C,) or (N C,), the value of each channel, or of each sample and channel, whose sides are exact, for
            ``t`` of shape (N, C, *spatial).

    Returns:
        ``Packed``, which shares no memory with ``t``.  A group with an infinity or NaN comes back as NaN.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    _check(t, bits, seed, kink)
    t = _stored(t.detach())
    if kink is not None:
        # unpack finds the layout again from the strides, so it must be that of planes or rows.
        t = t if lines_of(t, kink.numel()).S * kink.numel() <= t.numel() else t.contiguous()
        kink = kink.detach().to(wide_dtype(t.dtype), copy=True)
    key = mixed(seed)
    codes, lowest, highest = (pack_op if _by_op(t) else _pack)(t, kink, bits, key)
    return Packed(codes, lowest, highest, kink, bits, tuple(t.shape), t.stride())


@torch.no_grad()
def unpack(packed: Packed) -> Tensor:
    """The tensor that was packed, in its strides and dtype, with the error of the rounding."""
    codes, lowest, highest, kink, bits, size, stride = packed
    if _by_op(codes):
        return unpack_op(codes, lowest, highest, kink, bits, size, stride)
    return _unpack(packed)
