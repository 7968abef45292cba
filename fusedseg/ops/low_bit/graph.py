"""The storage ops in graphs of the compiler backend: tensors in 8, 4 or 2 bits a value, and masks in one.

    key = rounding_key(seed)                              a number that differs from step to step; a tensor on the CPU
    codes, lowest, highest = low_bit_round(t, bits, key, place, kink, unit, stride)   ``spec.py`` has the units
    kink = norm_kink(x, mean, rstd, weight, bias, of_samples)     for a norm whose sign must be exact
    t4 = low_bit_unpack(codes, lowest, highest, kink, bits, unit, size, stride)     signs are exact; right on average
    packed = bits_pack(t, bits, stride)                   the lowest bits of masks, and of small integers of one byte
    t = bits_unpack(packed, bits, dtype, size, stride)

With a kink, one number for each channel, or for each channel of each sample, in the dtype of the arithmetic, the sign
of ``t - kink`` is exact instead.  The kink of a norm is the input of a channel that the norm sends to 0, where an
activation such as ReLU bends:

    weight * (x - mean) * rstd + bias = 0    at    x = mean - bias / (weight * rstd)

Each step rounds anew.  The generator of PyTorch is not moved.  Rounding depends on the seed, the rank in the process
group, the number of the step, the place of the tensor in its graph, and the place of a value in memory.  ``grid.py``
describes the values that codes stand for.  A group with an infinity or NaN comes back as NaN.

Source: stochastic rounding of groups is that of Chen et al., "ActNN", ICML 2021; the border of signs is ours.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from ..at_size import PART, TINY, Compared, Rounded, U, checked
from ..check import has_values, is_computed, wide_dtype
from ..layout import laid_out
from ..registry import Result, family, graph_op
from ..self_test.cases import SHAPE, TOLERANCE, image
from . import reference
from .spec import ChannelLines, lines_of, mixed, rank, signed

FAMILY = "low_bit"
# Both compute the same codes.  A division that is rounded in another way may change one of them by 1.
LOW_BIT_TOLERANCE = 1e-2
# A kink is at most this many standard deviations away from the mean.  Values do not lie further away in practice, and
# the difference of a value and a far kink would have few digits.
FARTHEST = 64.0
# 8 bytes of 0 or 1 times this number: the highest byte of the product has a bit for each of them, in their order.
GATHER = 0x0102040810204080
# A byte times SPREAD is 8 copies of it.  Of the k-th copy, CHOOSE leaves the k-th bit.
SPREAD, CHOOSE = 0x0101010101010101, 0x8040201008040201 - (1 << 64)
# The values that are packed at once, and their bits.
CHUNK = 1 << 23
# How many steps there have been, for each seed.
_steps: defaultdict[int, "itertools.count[int]"] = defaultdict(itertools.count)


def _flat(t: Tensor) -> Tensor:
    return t.as_strided((t.numel(),), (1,))


# A value lies at the same place of the grid on aten, or one digit further: its code may differ by 1, which a random
# number decides in one of 128 cases.  More than this share of other codes is no rounding.
SHARE = 1 / 16


def _values(theirs: Tensor, kink: Tensor | None, dtype: torch.dtype, steps: int) -> Rounded:
    """Values to which a kernel adds the kink, or from which it takes it, in some steps, before it stores them.

    The range of fp16 is cut off at its largest number, which is no overflow.
    """
    exact, info = theirs.double(), torch.finfo(dtype)
    size = exact.abs() if kink is None else exact.abs() + 2 * kink.abs().amax()
    spacing = exact.abs() * info.eps + max(info.tiny * info.eps, TINY)
    return Rounded(exact, steps * U * size + 2 * spacing)


def _pack_results(found: tuple[Tensor, ...], now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The range of each group, and the codes of its values."""
    flat, lines, bits, key, kink = before
    exact = reference.pack(flat, lines, bits, key, kink)
    for name, mine, theirs in zip(("lowest", "highest"), found[1:], exact[1:], strict=True):
        yield _values(theirs, kink, flat.dtype, steps=4).stored(torch.float32).stored(torch.float32).near(name, mine)
    # A group with a value that is not finite has any codes.
    says = exact[1].isfinite().all() & exact[2].isfinite().all()
    mask = (1 << bits) - 1
    few = (found[0] != exact[0]).sum() <= SHARE * flat.numel() + 16
    for mine, theirs in zip(found[0].split(PART), exact[0].split(PART), strict=True):
        close = few.expand(len(mine)).clone()
        for shift in range(0, 8, bits):
            one, other = ((t >> shift & mask).to(torch.int16) for t in (mine, theirs))
            close &= (one - other).abs() <= 1
        yield Compared("codes", mine, theirs, close | (mine == theirs) | ~says, says.expand(len(mine)))


def _pack_kind(flat: Tensor, lines: ChannelLines, bits: int, key: int, kink: Tensor | None) -> tuple[Any, ...]:
    """All but the key, which is random."""
    return lines, bits, flat.dtype, flat.get_device(), kink if kink is None else kink.shape


@checked(FAMILY, _pack_results, _pack_kind)
def _launch_pack(
    flat: Tensor, lines: ChannelLines, bits: int, key: int, kink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from ...kernels.low_bit import low_bit_pack

    with _backend.launching(flat):
        return low_bit_pack(flat, lines, bits, signed(key), kink)


def _unpack_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """A value is the sum of the border, of some steps on the same side of 0, and of the kink."""
    flat, packed, kink, lines, bits = before
    exact = torch.empty_like(flat)
    reference.unpack(packed, kink, lines, bits, exact)
    for mine, theirs in zip(flat.split(PART), exact.split(PART), strict=True):
        yield _values(theirs, kink, flat.dtype, steps=32).near("values", mine)


@checked(FAMILY, _unpack_results)
def _launch_unpack(
    flat: Tensor, packed: tuple[Tensor, Tensor, Tensor], kink: Tensor | None, lines: ChannelLines, bits: int
) -> None:
    from ...kernels.low_bit import low_bit_unpack

    with _backend.launching(flat):
        low_bit_unpack(*packed, kink, lines, bits, flat)


def _kink_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The sign of a channel whose weight is 0, or nearly so, does not depend on its kink."""
    mean, rstd, weight, bias, kink = before
    exact = _kink_by_aten(kink.numel(), mean, rstd, weight, bias, torch.float64)
    means = mean.flatten().double().repeat_interleave(kink.numel() // mean.numel())
    bound = 32 * U * (means.abs() + (exact - means).abs()) + TINY
    if weight is not None:
        bound = torch.where(weight.abs().repeat(kink.numel() // weight.numel()) < TINY, torch.inf, bound)
    yield Rounded(exact, bound).near("kinks", kink)


@checked(FAMILY, _kink_results)
def _launch_kink(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, kink: Tensor) -> None:
    from ...kernels.low_bit import low_bit_kink

    with _backend.launching(mean):
        low_bit_kink(mean, rstd, weight, bias, kink)


def _is_in_other_order(t: Tensor, lines: ChannelLines) -> bool:
    """Whether the channels of ``lines`` are adjacent, and those of the tensor are not."""
    return lines.C > 1 and t.stride(1) != 1


def is_moved(t: Tensor, unit: str) -> bool:
    """Whether a copy of a dense tensor is packed, and what is unpacked is copied too."""
    return t.dim() > 1 and t.numel() > 0 and _is_in_other_order(t, lines_of(t, unit))


def pack(t: Tensor, kink: Tensor | None, bits: int, unit: str, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, and the lowest and the highest value of each group."""
    if not is_computed(t, FAMILY):
        return packed_like(t, bits, unit)
    lines = lines_of(t, unit)
    flat = t.movedim(1, -1).flatten() if _is_in_other_order(t, lines) else _flat(t)
    if not _backend.use_triton(t, FAMILY):
        return reference.pack(flat, lines, bits, key, kink)
    return _launch_pack(flat, lines, bits, key, kink)


def packed_like(t: Tensor, bits: int, unit: str) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``pack`` without values."""
    lines = lines_of(t, unit)
    groups = lines.I * lines.groups * lines.C
    return t.new_empty(lines.code_bytes(bits), dtype=torch.uint8), t.new_empty(groups), t.new_empty(groups)


rounding_key = graph_op(
    "rounding_key(int seed) -> Tensor",
    lambda seed: torch.tensor(mixed(seed, rank(), next(_steps[seed])), dtype=torch.int64),
    fake=lambda seed: torch.empty((), dtype=torch.int64),
)
# A tensor is packed in the strides that its graph says, and that ``unpack`` restores: a compiler may choose others.
round_op = graph_op(
    "low_bit_round(Tensor t, int bits, Tensor key, int place, Tensor? kink, str unit, SymInt[] stride)"
    " -> (Tensor, Tensor, Tensor)",
    lambda t, bits, key, place, kink, unit, stride: pack(laid_out(t, stride), kink, bits, unit, mixed(int(key), place)),
    # The key has no value there, and none is needed.
    fake=lambda t, bits, key, place, kink, unit, stride: pack(laid_out(t, stride), kink, bits, unit, place),
    row={"reads": "follows", "cheap": False},
)


def unpack(packed, kink, bits, unit, size, stride):
    codes, lowest, _ = packed
    t = torch.empty_strided(size, stride, dtype=lowest.dtype, device=codes.device)
    if not is_computed(t, FAMILY):
        return t
    lines = lines_of(t, unit)
    moved = t.new_empty(t.movedim(1, -1).shape).movedim(-1, 1) if _is_in_other_order(t, lines) else t
    if not _backend.use_triton(t, FAMILY):
        reference.unpack(packed, kink, lines, bits, _flat(moved))
    else:
        _launch_unpack(_flat(moved), packed, kink, lines, bits)
    return t if moved is t else t.copy_(moved)


unpack_op = graph_op(
    "low_bit_unpack(Tensor codes, Tensor lowest, Tensor highest, Tensor? kink, int bits, str unit, SymInt[] size,"
    " SymInt[] stride) -> Tensor",
    lambda codes, lowest, highest, *call: unpack((codes, lowest, highest), *call),
)


def kink_of(x, mean, rstd, weight, bias, of_samples):
    """The kinks of a norm of ``x``, (N, C, *spatial).

    They are (C,) or (N C,), in fp32 or fp64.  A channel whose weight is 0 has any kink, because its sign is that of its
    bias.  With ``of_samples``, mean and rstd have one value for each group of channels of each sample, otherwise (C,).
    """
    wide = wide_dtype(mean.dtype)
    channels = x.shape[0] * x.shape[1] if of_samples else x.shape[1]
    if not has_values(mean) and not _backend.lists_launches(mean, FAMILY):
        return mean.new_empty(channels, dtype=wide)
    if channels and _backend.use_triton(mean, FAMILY):
        kink = mean.new_empty(channels, dtype=wide)
        _launch_kink(*(None if v is None else v.contiguous() for v in (mean, rstd, weight, bias)), kink)
        return kink
    return _kink_by_aten(channels, mean, rstd, weight, bias, wide)


def _kink_by_aten(
    channels: int, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wide: torch.dtype
) -> Tensor:
    # This makes new memory, which the result of an op needs.
    mean, rstd = (v.flatten().to(wide).repeat_interleave(channels // v.numel()) for v in (mean, rstd))
    if bias is None:
        return mean
    shift = bias.to(wide)
    if weight is not None:
        shift = shift / weight.to(wide)
    # 0 / 0 of a channel without weight and bias is NaN.
    shift = shift.nan_to_num(nan=0.0, posinf=FARTHEST, neginf=-FARTHEST).clamp(-FARTHEST, FARTHEST)
    return mean - shift.repeat(channels // shift.numel()) / rstd


norm_kink = graph_op(
    "norm_kink(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, bool of_samples) -> Tensor",
    kink_of,
)


def _pack_signs(t: Tensor) -> Tensor:
    """One bit for each value of a dense tensor, in the order of memory: uint8, 8 values a byte."""
    packed = torch.empty(-(-t.numel() // 8), dtype=torch.uint8, device=t.device)
    for of_chunk, part in zip(packed.split(CHUNK // 8), _flat(t).split(CHUNK), strict=True):
        above = part > 0
        if above.numel() % 8:
            above = torch.nn.functional.pad(above, (0, 8 - above.numel() % 8))
        of_chunk.copy_((above.view(torch.int64) * GATHER).bitwise_right_shift_(56).bitwise_and_(255))
    return packed


def _bits_pack(t, bits, stride):
    t = laid_out(t, stride).view(torch.uint8)
    if bits == 1:
        return _pack_signs(t)
    return torch.cat([_pack_signs(t & 1 << place) for place in range(bits)])


bits_pack = graph_op(
    "bits_pack(Tensor t, int bits, SymInt[] stride) -> Tensor",
    _bits_pack,
    fake=lambda t, bits, stride: t.new_empty(-(-t.numel() // 8) * bits, dtype=torch.uint8),
)


def _bits_unpack(packed, bits, dtype, size, stride):
    t = torch.empty_strided(size, stride, dtype=torch.uint8, device=packed.device)
    for place, of_place in enumerate(packed.view(bits, -1)):
        for of_chunk, part in zip(of_place.split(CHUNK // 8), _flat(t).split(CHUNK), strict=True):
            is_set = of_chunk.to(torch.int64).mul_(SPREAD).bitwise_and_(CHOOSE).view(torch.uint8)[: part.numel()] != 0
            if place:
                part |= is_set.view(torch.uint8) << place
            else:
                part.copy_(is_set)
    return t.view(dtype)


bits_unpack = graph_op(
    "bits_unpack(Tensor packed, int bits, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor",
    _bits_unpack,
    fake=lambda packed, bits, dtype, size, stride: torch.empty_strided(size, stride, dtype=dtype, device=packed.device),
)


def workspace_of(target: object, value: Tensor, numel: int, bits: int) -> int:
    """The most bytes beside arguments and results while an op of this module runs; 0 for other ops.

    ``value`` is what is packed, or unpacked; it may have no values, and symbolic sizes.
    """
    if target in (bits_pack, bits_unpack):
        # Chunks are larger than most tensors.
        return numel * (2 if bits == 1 else 3)
    if target not in (round_op, unpack_op) or _backend.use_triton(value, FAMILY):
        return 0
    return reference.workspace(numel, value.dtype, value.device, packing=target is round_op)


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    from ...kernels.low_bit import low_bit_kink, low_bit_pack, low_bit_unpack

    of, key = torch.promote_types(dtype, torch.float32), 12345
    for fmt, bits in (("contiguous", 8), ("contiguous", 4), ("channels_last", 4)):
        x = image(SHAPE, dtype, device, fmt, 0)
        kink = torch.linspace(-1.0, 1.0, SHAPE[1], dtype=of, device=device)
        lines, flat = lines_of(x, "batch"), _flat(x)
        found, expected = torch.empty_like(flat), torch.empty_like(flat)
        low_bit_unpack(*low_bit_pack(flat, lines, bits, key, kink), kink, lines, bits, found)
        reference.unpack(reference.pack(flat, lines, bits, key, kink), kink, lines, bits, expected)
        yield Result(f"values ({fmt}, {bits} bits)", found, expected.double(), LOW_BIT_TOLERANCE)
    mean, rstd = kink, kink + 2
    low_bit_kink(mean, rstd, weight=rstd, bias=mean, kink=(found := torch.empty_like(kink)))
    yield Result("kinks", found, mean.double() - mean.double() / rstd.double().square(), TOLERANCE[of])
