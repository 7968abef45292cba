"""The passes of the norm op with a packed copy of the tensor that it keeps.

On Triton, forward writes the copy in the launch that writes z, and backward reads the codes of planes, so that the
unpacked tensor does not exist.  In all other cases the storage op packs and unpacks the whole tensor beside the op.
All ways give the same bits; only rows (channels_last) that fit in a slab have statistics that are added up in another
order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _backend
from ..layout import Layout, like
from ..low_bit.op import pack, unpack
from ..low_bit.spec import Lines, Packed, lines_of, mixed, signed, wide_dtype
from . import passes
from .backend import TRITON, backend_of
from .kept import Kept
from .kink import kink_of, of_channels
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted, adjacent


class Copy(NamedTuple):
    """The packed copy that is wanted; ``kink`` says whether it has the kink of the norm (a kept input only)."""

    bits: int
    seed: int
    kink: bool = False


def _fused(x: Tensor, spec: Spec, vectors: tuple[Tensor | None, ...]) -> bool:
    on_triton = backend_of(x, spec.act) is TRITON and _backend.use_triton(x, "low_bit")
    # Fake tensors have no memory for kernels.
    return on_triton and type(x) is Tensor and x.numel() > 0 and spec.process_group is None and adjacent(*vectors)


def _codes(x: Tensor, bits: int, key: int, kinks: int, lines: Lines) -> Any:
    from ...kernels.low_bit_tile import Codes

    ends = (x.new_empty(lines.I * lines.groups * lines.C) for _ in range(2))
    kink = x.new_empty(kinks, dtype=wide_dtype(x.dtype)) if kinks else None
    return Codes(x.new_empty(lines.code_bytes(bits), dtype=torch.uint8), *ends, kink, bits, lines.row_bytes(bits), key)


def forward(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None, copy: Copy
) -> tuple[Normalised, Packed]:
    """``passes.forward``, and the packed copy of z (``spec.keep`` "output") or of x ("input").

    The copy has the bits of ``low_bit.op.pack`` of the same tensor with the same seed and kink.
    """
    x = passed.x
    if _fused(x, spec, (passed.weight, passed.bias, passed.running_mean, passed.running_var)):
        from ...kernels.low_bit_tile import fits

        kinks = layout.I * layout.C if copy.kink else 0
        lines = lines_of(x, kinks)
        if fits(layout, lines, x.dtype):
            codes = _codes(x, copy.bits, signed(mixed(copy.seed)), kinks, lines)
            found = TRITON.forward(passed, spec, layout, kept, out, codes)
            tensors = codes.codes, codes.lowest, codes.highest, codes.kink
            return found, Packed._make((*tensors, copy.bits, tuple(x.shape), x.stride()))
    found = passes.forward(passed, spec, layout, kept, out)
    kink = _kink(found, passed, spec) if copy.kink else None
    return found, pack(found.z if spec.keep == "output" else x, copy.bits, copy.seed, kink)


def _kink(found: Normalised, passed: Passed, spec: Spec) -> Tensor:
    assert found.mean is not None
    mean, shape = found.mean, passed.x.shape
    rstd = torch.rsqrt(found.second + spec.eps) if spec.keeps_variance else found.second
    if spec.kind == "group":
        mean, rstd = of_channels(mean, shape), of_channels(rstd, shape)
    return kink_of(mean, rstd, passed.weight, passed.bias, shape)


def backward(
    dz: Tensor, packed: Packed, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
) -> Gradients:
    """``passes.backward`` of the tensor that ``packed`` stands for; ``saved.source`` is not read.

    Without the kernels, dx of a kept output is written over the unpacked tensor.
    """
    if not layout.rows and saved.share is None and _fused(dz, spec, (saved.weight, saved.bias)):
        from ...kernels.low_bit_tile import Codes, fits

        lines = lines_of(torch.empty_strided(packed.size, packed.stride, device="meta"), _count(packed.kink))
        if fits(layout, lines, packed.lowest.dtype):
            codes = Codes(*packed[:4], packed.bits, lines.row_bytes(packed.bits))
            if dz.stride() != packed.stride:
                dz = torch.empty_strided(packed.size, packed.stride, dtype=dz.dtype, device=dz.device).copy_(dz)
            residual = None if saved.residual is None else like(saved.residual, dz)
            return TRITON.backward(dz, saved._replace(source=dz, residual=residual), spec, layout, kept, wanted, codes)
    source = unpack(packed)
    if spec.keep == "output" and wanted.into is None:
        wanted = wanted._replace(into=source)
    return passes.backward(dz, saved._replace(source=source), spec, layout, kept, wanted)


def _count(kink: Tensor | None) -> int:
    return 0 if kink is None else kink.numel()
