"""The storage ops in graphs of the compiler backend, where each step rounds anew.

    key = rounding_key(seed)                              a number that differs from step to step; a tensor on the CPU
    codes, lowest, highest = low_bit_round(t, bits, key, place, kink, stride)
    kink = norm_kink(x, mean, rstd, weight, bias)         of ``low_bit/kink.py``, for a norm whose sign must be exact
    t4 = low_bit_unpack(codes, lowest, highest, kink, bits, size, stride)      of ``op.py``
    packed = bits_pack(t, bits, stride)                   the lowest bits of masks, and of small integers of one byte
    t = bits_unpack(packed, bits, dtype, size, stride)

The generator of PyTorch is not moved.  Rounding depends on the seed, the rank in the process group, the number of the
step, and the place of the tensor in its graph.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from .kink import kink_of, of_channels
from .op import pack, packed_like
from .signs import pack_signs, parts_with_signs
from .spec import mixed, rank, wide_dtype

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
    return pack(_laid_out(t, stride), kink, bits, mixed(int(key), place))


@round_op.register_fake
def _(t, bits, key, place, kink, stride):
    return packed_like(_laid_out(t, stride), kink, bits)


@torch.library.custom_op(
    "fusedseg::norm_kink",
    mutates_args=(),
    schema="(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias) -> Tensor",
)
def norm_kink(x, mean, rstd, weight, bias):
    """The kinks of a norm of ``x``, (N, C, *spatial), with statistics of channels, or of groups of each sample."""
    if mean.dim() == 2:
        mean, rstd = of_channels(mean, x.shape), of_channels(rstd, x.shape)
    kink = kink_of(mean, rstd, weight, bias, x.shape)
    return kink.clone() if kink.data_ptr() == mean.data_ptr() else kink


@norm_kink.register_fake
def _(x, mean, rstd, weight, bias):
    count = x.shape[0] * x.shape[1] if mean.dim() == 2 else mean.shape[0]
    return mean.new_empty(count, dtype=wide_dtype(mean.dtype))


@torch.library.custom_op(
    "fusedseg::bits_pack", mutates_args=(), schema="(Tensor t, int bits, SymInt[] stride) -> Tensor"
)
def bits_pack(t, bits, stride):
    t = _laid_out(t, stride).view(torch.uint8)
    if bits == 1:
        return pack_signs(t)
    return torch.cat([pack_signs(t & 1 << place) for place in range(bits)])


@bits_pack.register_fake
def _(t, bits, stride):
    return t.new_empty(-(-t.numel() // 8) * bits, dtype=torch.uint8)


@torch.library.custom_op(
    "fusedseg::bits_unpack",
    mutates_args=(),
    schema="(Tensor packed, int bits, ScalarType dtype, SymInt[] size, SymInt[] stride) -> Tensor",
)
def bits_unpack(packed, bits, dtype, size, stride):
    t = torch.empty_strided(size, stride, dtype=torch.uint8, device=packed.device)
    for place, of_place in enumerate(packed.view(bits, -1)):
        for part, above in parts_with_signs(t, of_place):
            if place:
                part |= above.view(torch.uint8) << place
            else:
                part.copy_(above)
    return t.view(dtype)


@bits_unpack.register_fake
def _(packed, bits, dtype, size, stride):
    return torch.empty_strided(size, stride, dtype=dtype, device=packed.device)
