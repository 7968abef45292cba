"""The norm op on Triton with a packed copy of the tensor that it keeps.

Forward writes the copy in the launch that writes z.  Backward reads the codes of planes, so that the unpacked tensor
does not exist; for rows (channels_last), the tensor is unpacked and passed to ``passes.backward``.  The codes are those
of the storage op (``ops/low_bit``) to the bit, which packs where these kernels do not fit.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from ..layout import Layout, layout_of, like
from ..low_bit.spec import Lines, Packed, lines_of, mixed, signed, wide_dtype
from .backend import TRITON, backend_of
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted, adjacent


class Copy:
    """A packed copy that ``forward`` writes if the kernels can: of z (``Spec.keep`` "output") or of x ("input").

    kink: whether the copy has the kink of the norm, which needs a kept input.
    seed: returns the seed of the rounding; it is called only if the copy is written.
    packed: the copy, or None.
    source: the tensor that the copy stands for.
    is_read: whether ``backward`` reads the codes.
    """

    packed: Packed | None = None
    source: Tensor | None = None
    is_read = False

    def __init__(self, bits: int, seed: Callable[[], int], kink: bool) -> None:
        self.bits, self.seed, self.kink = bits, seed, kink


def may_write(x: Tensor, spec: Spec) -> bool:
    """Whether the kernels serve the norm of ``x``, so that they can write a ``Copy``."""
    if spec.process_group is not None or backend_of(x, spec.act) is not TRITON:
        return False
    # Fake tensors have no memory for kernels.
    return type(x) is Tensor and x.numel() > 0 and _backend.use_triton(x, "low_bit")


def new_codes(x: Tensor, bits: int, key: int, kinks: int, lines: Lines) -> Any:
    """Memory for the ``Codes`` of ``x`` with so many kinks; ``lines`` is ``lines_of(x, kinks)``."""
    from ...kernels.low_bit_tile import Codes

    ends = (x.new_empty(lines.I * lines.groups * lines.C) for _ in range(2))
    kink = x.new_empty(kinks, dtype=wide_dtype(x.dtype)) if kinks else None
    return Codes(x.new_empty(lines.code_bytes(bits), dtype=torch.uint8), *ends, kink, bits, lines.row_bytes(bits), key)


def forward(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None, copy: Copy
) -> Normalised | None:
    """``passes.forward``, which also writes ``copy``; None if the kernels cannot.  ``may_write`` is True."""
    from ...kernels.low_bit_tile import fits

    x = passed.x
    kinks = layout.I * layout.C if copy.kink else 0
    lines = lines_of(x, kinks)
    vectors = passed.weight, passed.bias, passed.running_mean, passed.running_var
    if not (fits(layout, lines, x.dtype) and adjacent(*vectors)):
        return None
    codes = new_codes(x, copy.bits, signed(mixed(copy.seed())), kinks, lines)
    found = TRITON.forward(passed, spec, layout, kept, out, codes)
    copy.packed = Packed._make((*codes.tensors, copy.bits, tuple(x.shape), x.stride()))
    copy.source, copy.is_read = found.z if spec.keep == "output" else x, not layout.rows
    return found


def _read(packed: Packed, t: Tensor, layout: Layout) -> Any:
    """``Codes`` of a tensor with the strides of ``t``; None if kernels cannot read them."""
    from ...kernels.low_bit_tile import Codes, fits

    lines = lines_of(t, 0 if packed.kink is None else packed.kink.numel())
    if layout.rows or not fits(layout, lines, t.dtype):
        return None
    return Codes(*packed[:4], packed.bits, lines.row_bytes(packed.bits))


def rebuild(packed: Packed, spec: Spec) -> Callable[[Saved], Tensor] | None:
    """``passes.rebuild`` of a packed ``Saved.source``, which is not read; None if kernels cannot read the codes."""
    if not may_write(packed.lowest, spec):
        return None
    z = torch.empty_strided(packed.size, packed.stride, dtype=packed.lowest.dtype, device=packed.codes.device)
    layout = layout_of(z)
    codes = None if layout is None else _read(packed, z, spec.layout(z, layout))

    def again(saved: Saved) -> Tensor:
        residual = None if saved.residual is None else like(saved.residual, z)
        return TRITON.rebuild(saved._replace(source=z, residual=residual), spec, codes=codes)

    return None if codes is None else again


def backward(
    dz: Tensor, packed: Packed, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
) -> Gradients:
    """``passes.backward`` of the tensor that ``packed`` stands for; ``saved.source`` only gives the strides."""
    codes = _read(packed, saved.source, layout)
    if dz.stride() != packed.stride:
        dz = torch.empty_strided(packed.size, packed.stride, dtype=dz.dtype, device=dz.device).copy_(dz)
    residual = None if saved.residual is None else like(saved.residual, dz)
    return TRITON.backward(dz, saved._replace(source=dz, residual=residual), spec, layout, kept, wanted, codes)


class FromCodes:
    """The base class of a function of a recipe that may read the codes of its first input."""

    def from_codes(self, packed: Packed) -> Callable[..., Tensor] | None:
        """The same function of the other inputs; None if the first input must be unpacked."""
        raise NotImplementedError


class _Thread(threading.local):
    """The codes that ``with_codes`` has found so far in this thread; None outside of it."""

    found: list[Packed] | None = None


_thread = _Thread()


def found_codes() -> list[Packed] | None:
    """The list to which a saved tensor adds its codes, inside ``with_codes``; then it returns a meta tensor."""
    return _thread.found


def with_codes(ctx: Any) -> tuple[list[Tensor], Packed | None]:
    """The saved tensors of a node, and the codes of the one that is saved in fewer bits, which is a meta tensor.

    Without such a tensor there are no codes.
    """
    found: list[Packed] = []
    _thread.found = found
    try:
        tensors = list(ctx.saved_tensors)
    finally:
        _thread.found = None
    return tensors, found[0] if found else None
