"""``torch.cat`` of sources (``sources.py``) along the channels, for networks of stock modules in a recompute scope.

An ``Interpolated`` is enlarged in slabs of samples, into its place in the result.  So a large enlarged tensor does not
lie beside the concatenation, in forward or when the scope rebuilds it in backward.  Values and gradients have the bits
of ``torch.nn.functional.interpolate`` and ``torch.cat``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _torch
from ..observer import OPEN, OpCall, observed, rounding
from .slabs import slabs
from .sources import (
    Enlarge,
    Interpolated,
    Source,
    concatenated,
    enlarges_of,
    formed,
    samples_of,
    shape_of,
    sources_of,
    tensors_of,
)

# A smaller concatenation is formed by the stock functions.
LEAST_BYTES = 2**20


class _Concatenation(torch.autograd.Function):
    """torch.cat of the sources.  It keeps the shapes of the tensors, and no tensor."""

    @staticmethod
    def forward(ctx, enlarges: Sequence[Enlarge | None], *tensors: Tensor) -> Tensor:
        ctx.enlarges, ctx.shapes = enlarges, [t.shape for t in tensors]
        ctx.set_materialize_grads(False)
        sources = sources_of(tensors, enlarges)
        out, start = tensors[0].new_empty(shape_of(sources)), 0
        for source in sources:
            place = out.narrow(1, start, source.shape[1])
            for n in slabs(place.shape[0], place.nbytes):
                place[n] = formed(samples_of(source, n))
            start += source.shape[1]
        return out

    @staticmethod
    def backward(ctx, dy: Tensor | None) -> Any:
        if dy is None:
            return (None,) * (1 + len(ctx.shapes))
        parts = dy.split([shape[1] for shape in ctx.shapes], dim=1)
        grads: list[Tensor | None] = []
        for need, part, shape, enlarge in zip(ctx.needs_input_grad[1:], parts, ctx.shapes, ctx.enlarges, strict=True):
            if need and enlarge is not None:
                # The gradient depends on the shape alone.
                part = enlarge.backward(part, torch.empty(shape, device="meta"))
            grads.append(part if need else None)
        return None, *grads


class _CatCall(NamedTuple):
    sources: tuple[Source, ...]


class CatCall(_CatCall, OpCall):
    """One call of ``cat`` that enlarges its sources in slabs."""

    __slots__ = ()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensors_of(self.sources))

    def run(self) -> Tensor:
        return _Concatenation.apply(enlarges_of(self.sources), *self.inputs)


def cat(sources: Sequence[Source]) -> Tensor:
    """The concatenation of the sources along the channels.

    The stock functions form it outside of a scope with ``bits``, if it is small, in channels_last, under autocast, and
    in forward-mode differentiation.
    """
    if not OPEN or not rounding() or not _fits(sources):
        return concatenated(sources)
    return observed(CatCall(tuple(sources)))


def _fits(sources: Sequence[Source]) -> bool:
    tensors = tensors_of(sources)
    return (
        any(isinstance(source, Interpolated) for source in sources)
        and not any(enlarge is not None and enlarge.mode == "area" for enlarge in enlarges_of(sources))
        and shape_of(sources).numel() * tensors[0].element_size() >= LEAST_BYTES
        and not (_torch.is_any_autocast_enabled() or _torch.in_forward_ad())
        # A tensor with dimensions of size 1 may be channels_last as well.
        and all(t.is_contiguous() and t.dtype == tensors[0].dtype for t in tensors)
        and all(min(t.shape[1:]) > 1 for t in tensors)
    )
