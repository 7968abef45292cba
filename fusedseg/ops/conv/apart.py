"""Convolutions of sources (``sources.py``): of their small concatenation, or of each source by itself.

What is added to a large result or gradient is computed in slabs of samples (``slabs.py``), so that only one slab lies
beside the tensors of full size.

A 1x1 convolution and an interpolation U commute, because the weights of an interpolation sum to one.  So backward
applies the transpose of U to dy, and computes all gradients from the small tensor x:

    y = W U x + b:    g = U^T dy,  dx = W^T g,  dW = g x^T,  db = sum(g)

This neither enlarges x again nor convolves at full size, and U^T is applied to the channels of dy instead of those
of x.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reuse
from .convolution import Geometry, convolve, convolve_backward, convolve_backward_in_turn, output_format
from .slabs import Sum, slabs
from .sources import (
    Interpolated,
    Source,
    apart,
    commutes,
    concatenated,
    formed,
    samples_of,
    shape_of,
    tensors_of,
)


class _Part(NamedTuple):
    """A part of a convolution: one source or a range of its channels, with the part of the weight for it.

    ``of`` is the index of the source.  ``shrinks`` says that its gradients are computed from ``_shrunk``.
    """

    of: int
    source: Source
    w: Tensor
    shrinks: bool


def _parts(sources: Sequence[Source], w: Tensor, backward_of: Geometry | None = None) -> list[_Part]:
    """The parts of a convolution of sources, or of its backward; parts of ``Interpolated`` sources come first.

    Interpolation needs memory for a moment, so it runs before all other parts allocate memory.  An ``Interpolated``
    with more channels than the result is split into ranges of as many channels as the result has, if it is enlarged.
    """
    parts, start = [], 0
    for of, source in enumerate(sources):
        C, K = source.shape[1], w.shape[0]
        ranges: list[Source] = [source]
        shrinks = backward_of is not None and commutes(source, w, backward_of)
        if isinstance(source, Interpolated) and not shrinks:
            ranges = [source.channels(c, min(c + K, C)) for c in range(0, C, K)]
        for part in ranges:
            parts.append(_Part(of, part, w[:, start : start + part.shape[1]], shrinks))
            start += part.shape[1]
    return sorted(parts, key=lambda part: not isinstance(part.source, Interpolated))


def convolve_sources(sources: Sequence[Source], w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The vendor's convolution of the concatenation of the sources."""
    if not apart(sources, geometry):
        return convolve(concatenated(sources), w, bias, geometry)
    first, *others = _parts(sources, w)
    shape = geometry.output_shape(shape_of(sources), w.shape)
    ranges = slabs(shape[0], shape.numel() * w.element_size())
    if len(ranges) == 1:
        y = convolve(concatenated([first.source]), first.w, bias, geometry)
        for part in others:
            y += convolve(concatenated([part.source]), part.w, None, geometry)
        return y
    y = torch.empty(shape, dtype=w.dtype, device=w.device, memory_format=output_format(tensors_of(sources)[0], w))
    for n in ranges:
        y[n] = convolve(formed(samples_of(first.source, n)), first.w, bias, geometry)
        for part in others:
            y[n] += convolve(formed(samples_of(part.source, n)), part.w, None, geometry)
    return y


def convolve_sources_backward(
    dy: Tensor, sources: Sequence[Source], w: Tensor, geometry: Geometry, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of w, of the bias and of the tensors of the sources.

    ``wanted`` says in this order which gradients are needed; all other gradients are None.  If ``sources`` is a list,
    each source is taken off it when it is no longer needed, and is freed if nobody else has it.
    """
    given = sources if isinstance(sources, list) else list(sources)
    ours = [_is_ours(given, i, given is sources) for i in range(len(given))]
    by_parts = apart(given, geometry) or any(commutes(source, w, geometry) for source in given)
    return (_backward_of_parts if by_parts else _backward_of_one)(dy, given, ours, w, geometry, wanted)


def _backward_of_one(
    dy: Tensor, given: list[Source], ours: list[bool], w: Tensor, geometry: Geometry, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """``convolve_sources_backward`` by one convolution of the concatenation.  ``ours`` has ``_is_ours`` of each one."""
    need_w, need_bias, *needs = wanted
    small = [_Small.of(source) for source in given]
    inputs, one = [concatenated(given)], len(given) == 1
    given.clear()
    backward = convolve_backward_in_turn if ours[0] or not one else _at_once
    dx, dw, dbias = backward(dy, inputs, w, geometry, (any(needs), need_w, need_bias))
    if dx is None:
        return dw, dbias, *(None for _ in small)
    parts = (dx,) if one else dx.split([source.channels for source in small], dim=1)
    pairs = zip(small, parts, needs, strict=True)
    return dw, dbias, *(source.gradient(part) if need else None for source, part, need in pairs)


def _backward_of_parts(
    dy: Tensor, given: list[Source], ours: list[bool], w: Tensor, geometry: Geometry, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """``convolve_sources_backward`` by a convolution of each source, or of a range of its channels."""
    need_w, need_bias, *needs = wanted
    # The gradients of each source, in the order of its channels.
    dsources: list[list[Tensor | None]] = [[] for _ in given]
    dws: list[list[Tensor | None]] = [[] for _ in given]
    dbias = None
    todo, ranges = _parts(given, w, geometry), slabs(dy.shape[0], dy.nbytes)
    given.clear()
    todo.reverse()
    while todo:
        i, source, part, shrinks = todo.pop()
        # The first part computes the gradient of the bias.
        asked = (needs[i], need_w, need_bias and dbias is None)
        if isinstance(source, Interpolated) and shrinks:
            dx, dw, db = convolve_backward(_shrunk(dy, source), source.x, part, geometry, asked)
        elif isinstance(source, Interpolated) and len(ranges) > 1:
            dx, dw, db = _in_slabs(dy, source, part, geometry, asked)
        else:
            of, inputs = _Small.of(source), [formed(source)]
            del source
            dx, dw, db = (convolve_backward_in_turn if ours[i] else _at_once)(dy, inputs, part, geometry, asked)
            dx = None if dx is None else of.gradient(dx)
        dsources[i].append(dx)
        dws[i].append(dw)
        dbias = db if dbias is None else dbias
        # The next part needs the memory.
        del dx
    return _cat([dw for of in dws for dw in of]), dbias, *(_cat(of) for of in dsources)


def _shrunk(dy: Tensor, source: Interpolated) -> Tensor:
    """The transpose of the interpolation of ``source``, applied to ``dy``."""
    # Only the shape of a tensor counts, and a range of channels may be any number of times the same one.
    like = source.x[:, :1].expand(-1, dy.shape[1], *source.x.shape[2:])
    return source.enlarge.backward(dy, like)


def _in_slabs(
    dy: Tensor, source: Interpolated, w: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of the tensor of a source, of its part of the weight, and of the bias."""
    dxs, dw, dbias = [], Sum(), Sum()
    for n in slabs(dy.shape[0], dy.nbytes):
        of = samples_of(source, n)
        assert isinstance(of, Interpolated)
        dlarge, dw_n, dbias_n = convolve_backward_in_turn(dy[n], [formed(of)], w, geometry, wanted)
        dxs.append(None if dlarge is None else of.enlarge.backward(dlarge, of.x))
        dw.add(dw_n)
        dbias.add(dbias_n)
        # The next slab needs the memory.
        del dlarge
    return _cat(dxs, dim=0), dw.total, dbias.total


def _is_ours(sources: list[Source], i: int, only: bool) -> bool:
    """Whether nobody else has the tensor that is convolved for a source.  ``only`` says that only the list has it."""
    # An interpolated tensor is made for the convolution.
    return isinstance(sources[i], Interpolated) or (only and reuse.alone(sources, i))  # type: ignore[arg-type]


def _at_once(
    dy: Tensor, inputs: list[Tensor], w: Tensor, geometry: Geometry, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return convolve_backward(dy, inputs.pop(), w, geometry, wanted)


class _Small(NamedTuple):
    """The parts of a source that its gradient needs: its channels and the small tensor before interpolation."""

    channels: int
    interpolated: Interpolated | None

    @classmethod
    def of(cls, source: Source) -> "_Small":
        return cls(source.shape[1], source if isinstance(source, Interpolated) else None)

    def gradient(self, d: Tensor) -> Tensor:
        """The gradient of the source's tensor, from the gradient of the source."""
        return d if self.interpolated is None else self.interpolated.enlarge.backward(d, self.interpolated.x)


def _cat(gradients: list[Tensor | None], dim: int = 1) -> Tensor | None:
    """Concatenates the gradients of ranges of channels.  Either all gradients are tensors, or all are None."""
    given = [gradient for gradient in gradients if gradient is not None]
    return torch.cat(given, dim) if len(given) > 1 else given[0] if given else None
