"""The storage ops in graphs of the compiler backend, where each step rounds anew.

    key = rounding_key(seed)                              a number that differs from step to step; a tensor on the CPU
    codes, lowest, highest = low_bit_round(t, bits, key, place, kink, stride)
    kink = norm_kink(mean, rstd, weight, bias, channels)  of ``norm/kink.py``, for a norm whose sign must be exact
    t4 = low_bit_unpack(codes, lowest, highest, kink, bits, size, stride)      of ``op.py``
    packed = bits_pack(mask, stride)                      one bit a value
    mask = bits_unpack(packed, size, stride)

The generator of PyTorch is not moved.  Rounding depends on the seed, the rank in the process group, the number of the
step, and the place of the tensor in its graph.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ..norm.kink import kink_of
from .op import _pack, pack_op
from .signs import pack_signs, parts_with_signs
from .spec import mixed, rank

# How many steps there have been, for each seed.
_steps: defaultdict[int, "itertools.count[int]"] = defaultdict(itertools.count)


def _laid_out(t: Tensor, stride: Sequence[int]) -> Tensor:
    """``t`` in the strides that its graph says, and that ``unpack`` restores: a compiler may have chosen others."""
    if t.stride() == tuple(stride):
        return t
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


@torch.library.custom_op("fusedseg::rounding_key", mutates_args=(), schema="(int seed) -> Tensor")
def rounding_key(seed):
    return torch.tensor(mixed(seed, rank(), next(_steps[seed])), dtype=torch.int64)


@rounding_key.register_fake
def _(seed):
    return torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "fusedseg::low_bit_round",
    mutates_args=(),
    schema="(Tensor t, int bits, Tensor key, int place, Tensor? kink, SymInt[] stride) -> (Tensor, Tensor, Tensor)",
)
def round_op(t, bits, key, place, kink, stride):
    return _pack(_laid_out(t, stride), kink, bits, mixed(int(key), place))


@round_op.register_fake
def _(t, bits, key, place, kink, stride):
    return pack_op(_laid_out(t, stride), kink, bits, 0)


@torch.library.custom_op(
    "fusedseg::norm_kink",
    mutates_args=(),
    schema="(Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, int channels) -> Tensor",
)
def norm_kink(mean, rstd, weight, bias, channels):
    kink = kink_of(mean, rstd, weight, bias, torch.Size((1, channels)))
    return kink.clone() if kink.data_ptr() == mean.data_ptr() else kink


@norm_kink.register_fake
def _(mean, rstd, weight, bias, channels):
    return mean.new_empty(mean.numel(), dtype=torch.float64 if mean.dtype == torch.float64 else torch.float32)


@torch.library.custom_op("fusedseg::bits_pack", mutates_args=(), schema="(Tensor mask, SymInt[] stride) -> Tensor")
def bits_pack(mask, stride):
    return pack_signs(_laid_out(mask, stride).view(torch.uint8))


@bits_pack.register_fake
def _(mask, stride):
    return mask.new_empty(-(-mask.numel() // 8), dtype=torch.uint8)


@torch.library.custom_op(
    "fusedseg::bits_unpack", mutates_args=(), schema="(Tensor packed, SymInt[] size, SymInt[] stride) -> Tensor"
)
def bits_unpack(packed, size, stride):
    mask = torch.empty_strided(size, stride, dtype=torch.bool, device=packed.device)
    for part, above in parts_with_signs(mask, packed):
        part.copy_(above)
    return mask


@bits_unpack.register_fake
def _(packed, size, stride):
    return torch.empty_strided(size, stride, dtype=torch.bool, device=packed.device)
