"""The sources of a convolution: tensors that stand for their concatenation, which is not kept for backward.

A source may be ``Interpolated``.  Then the tensor before interpolation is kept, and the interpolated tensor exists only
while its part of the convolution is computed, in forward or backward (``convolutions.py``).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..._backend import Backend
from .. import unfused, upsample
from ..check import check_tensor
from ..layout import FORMATS
from .geometry import Geometry, RawGeometry, parse_geometry

aten = torch.ops.aten
# For each number of dimensions the modes, and whether they take align_corners.
MODES = {
    rank: {mode: aligns for (mode, dims), (_, aligns) in upsample.BACKWARD.items() if dims == rank - 2}
    | {"area": False}
    for rank in FORMATS
}


class Enlarge(NamedTuple):
    """Arguments of ``torch.nn.functional.interpolate``."""

    size: tuple[int, ...]
    mode: str
    align_corners: bool | None

    def backward(self, dlarge: Tensor, shape: Sequence[int]) -> Tensor:
        """The gradient of a tensor of this shape from the gradient of the interpolated tensor."""
        if self.mode == "area":
            # aten reads the shape and the memory format of the tensor alone.
            x = upsample.suggested(dlarge, shape)
            return getattr(aten, f"_adaptive_avg_pool{len(self.size)}d_backward")(dlarge, x)
        return upsample.backward(dlarge, self.size, shape, None, self.mode, self.align_corners)


class Interpolated:
    """``torch.nn.functional.interpolate(x, size, mode=mode, align_corners=align_corners)``, not yet computed.

    It is a source for ``functional.conv_abn``, ``functional.join_conv`` and their modules, which keep ``x`` for
    backward instead of the interpolated tensor.

    Args:
        x: (N, C, *spatial), with two or three spatial dimensions.
        size: the spatial size of the interpolated tensor.
        mode: "nearest", "nearest-exact", "bilinear" (2D), "trilinear" (3D), "bicubic" (2D) or "area".
        align_corners: as in ``interpolate``, for bilinear, trilinear and bicubic.

    Raises:
        ValueError: the mode does not fit the dimensions; the size has the wrong length or is not positive.
        TypeError: ``x`` is not a tensor.
    """

    def __init__(self, x: Tensor, size: Sequence[int], mode: str, align_corners: bool | None = None) -> None:
        op = "fusedseg.Interpolated"
        check_tensor(op, x)
        if x.dim() not in MODES:
            raise ValueError(f"{op}: x must have two or three spatial dimensions, got {tuple(x.shape)}")
        modes = MODES[x.dim()]
        if mode not in modes:
            raise ValueError(f"{op}: mode must be one of {', '.join(modes)} for x {tuple(x.shape)}, got {mode!r}")
        if align_corners is not None and not modes[mode]:
            alignable = ", ".join(of for of, aligns in modes.items() if aligns)
            raise ValueError(
                f"{op}: align_corners must be None unless mode is one of {alignable}, got {align_corners!r} for mode "
                f"{mode!r}"
            )
        size = tuple(size)
        if len(size) != x.dim() - 2 or min(size) < 1:
            raise ValueError(f"{op}: size must be {x.dim() - 2} positive integers for x {tuple(x.shape)}, got {size}")
        self.x = x
        self.enlarge = Enlarge(size, mode, align_corners)

    @property
    def shape(self) -> torch.Size:
        """The shape of the interpolated tensor."""
        return torch.Size([*self.x.shape[:2], *self.enlarge.size])

    def formed(self) -> Tensor:
        size, mode, align_corners = self.enlarge
        return upsample.eager(self.x, size, None, mode, align_corners)

    def channels(self, start: int, stop: int) -> "Interpolated":
        return Interpolated(self.x[:, start:stop], *self.enlarge)


Source = Tensor | Interpolated


def parse_sources(op: str, x: Source | Sequence[Source]) -> tuple[Source, ...]:
    """The sources as a tuple.  Raises an error if an element is no source, or if batches or spatial sizes differ."""
    if isinstance(x, (Tensor, Interpolated)):
        sources: tuple[Any, ...] = (x,)
    else:
        sources = tuple(x) if isinstance(x, (tuple, list)) else (x,)
        if not sources or not all(isinstance(source, (Tensor, Interpolated)) for source in sources):
            came = [type(source).__name__ for source in sources]
            raise TypeError(f"{op}: x must be a tensor, an Interpolated, or a sequence of these, got {came}")
    first = sources[0]
    if len(first.shape) < 2:
        raise ValueError(f"{op}: x must have shape (N, C, *spatial), got {tuple(first.shape)}")
    for source in sources[1:]:
        if (source.shape[0], *source.shape[2:]) != (first.shape[0], *first.shape[2:]):
            raise ValueError(
                f"{op}: sources must agree in all but their channels, got {[tuple(source.shape) for source in sources]}"
            )
    return sources


def check_agree(op: str, sources: Sequence[Source]) -> None:
    """Raises ValueError if the sources have several dtypes or devices."""
    if len(sources) == 1:
        return
    tensors = tensors_of(sources)
    for name in ("dtype", "device"):
        if len({getattr(t, name) for t in tensors}) > 1:
            raise ValueError(f"{op}: sources must have one {name}, got {[str(getattr(t, name)) for t in tensors]}")


def tensors_of(sources: Sequence[Source]) -> list[Tensor]:
    """The tensors to keep for the sources; for an ``Interpolated``, the tensor before interpolation."""
    return [source.x if isinstance(source, Interpolated) else source for source in sources]


def enlarges_of(sources: Sequence[Source]) -> tuple[Enlarge | None, ...]:
    return tuple(source.enlarge if isinstance(source, Interpolated) else None for source in sources)


def sources_of(tensors: Sequence[Tensor], enlarges: Sequence[Enlarge | None]) -> tuple[Source, ...]:
    """The sources again, from the results of ``tensors_of`` and ``enlarges_of``."""
    pairs = zip(tensors, enlarges, strict=True)
    return tuple(tensor if enlarge is None else Interpolated(tensor, *enlarge) for tensor, enlarge in pairs)


def samples_of(sources: tuple[Source, ...], n: slice) -> tuple[Source, ...]:
    """A range of the samples of each source."""
    if n == slice(None):
        return sources
    return sources_of([tensor[n] for tensor in tensors_of(sources)], enlarges_of(sources))


def concatenated(sources: Sequence[Source]) -> Tensor:
    """The concatenation of the sources, in one tensor."""
    if torch.compiler.is_compiling() and not is_tensor(sources) and not unfused.wanted():
        # The compiler would keep the concatenation for backward.  A checkpoint tells the compiler to form it again.
        enlarges = enlarges_of(sources)

        def again(*tensors):
            return _joined(sources_of(tensors, enlarges))

        return checkpoint(again, *tensors_of(sources), use_reentrant=False, preserve_rng_state=False)
    return _joined(sources)


def _joined(sources: Sequence[Source]) -> Tensor:
    tensors = [source.formed() if isinstance(source, Interpolated) else source for source in sources]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def is_tensor(sources: Sequence[Source]) -> TypeGuard[Sequence[Tensor]]:
    """Whether the sources are a single tensor, so that nothing must be joined or interpolated."""
    return len(sources) == 1 and isinstance(sources[0], Tensor)


def shape_of(sources: Sequence[Source]) -> torch.Size:
    """The shape of the concatenation."""
    if len(sources) == 1:
        return sources[0].shape
    N, _, *size = sources[0].shape
    return torch.Size([N, sum(source.shape[1] for source in sources), *size])


class Convolution(NamedTuple):
    """The arguments of a convolution of sources, which travel together.  They need not be checked yet.

    ``conv_backend`` is that of ``ConvABN2d``; a convolution without a norm has no such option.
    """

    sources: tuple[Source, ...]
    w: Tensor
    bias: Tensor | None
    geometry: Geometry
    conv_backend: Backend = "auto"


def padded(op: str, sources: tuple[Source, ...], raw: RawGeometry) -> tuple[tuple[Source, ...], Geometry]:
    """The sources and the geometry of a convolution.

    If a convolution cannot pad as asked, the sources become one tensor that is padded already.  This is so for a
    ``mode`` other than zeros, and for "same" with an even kernel.
    """
    if raw.mode != "zeros":
        sources, raw = (F.pad(concatenated(sources), raw.pads, mode=raw.mode),), raw._replace(padding=0)
    geometry, uneven = parse_geometry(op, raw)
    # `check_convolution` will refuse sources with another number of dimensions.
    if uneven and len(sources[0].shape) == len(raw.kernel) + 2:
        sources = (F.pad(concatenated(sources), uneven),)
    return sources, geometry
