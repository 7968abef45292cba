"""Concatenation along the channels of images in channels_last, and copies of slices of channels, at a copy's speed.

``concat`` is ``torch.cat`` with the same bits and the same strides.  Where the Triton kernels serve the device, images
whose channels are adjacent in memory are joined by a kernel (``kernels/concat.py``), because PyTorch's kernel copies
their values one by one.  Slices of such images, such as the gradient of a concatenation, may be its sources.

The transpose of a concatenation is slices of the gradient.  ``dense`` copies a slice for an op that needs its memory
without gaps.  Both compute nothing for autograd, because graphs of the backend call them after differentiation.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _backend
from .at_size import Compared, channel_ranges, checked, exactly, wide
from .check import ACTIVATION_DTYPES
from .layout import FORMATS, pitch_of, suggests_channels_last

FAMILY = "concat"
Ints, Biases = tuple[int, ...], Sequence[Tensor | None]


def concat(tensors: Sequence[Tensor], dim: int = 0, biases: Biases = ()) -> Tensor:
    """``torch.cat``, whose result is no view of a source.

    ``biases`` has for each source a vector that is added to its channels, or None.
    """
    first = tensors[0]
    pitches = _served(tensors) if dim in (1, 1 - first.dim()) else None
    if pitches is None:
        if biases:
            tensors = [
                x if b is None else x + b.view(-1, *(1,) * (x.dim() - 2)) for x, b in zip(tensors, biases, strict=True)
            ]
        return torch.cat(list(tensors), dim)
    channels = tuple([x.shape[1] for x in tensors])
    shape = [first.shape[0], sum(channels), *first.shape[2:]]
    y = torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=FORMATS[first.dim()])
    _launch(y, tensors, channels, pitches, biases)
    return y


def concat_biased(tensors: Sequence[Tensor], biases: Biases) -> Tensor:
    """The concatenation of the channels of images, with their biases, as an op of graphs."""
    return concat(tensors, 1, biases)


concat_biased_op = torch.library.custom_op(
    "fusedseg::concat_biased", concat_biased, mutates_args=(), schema="(Tensor[] tensors, Tensor?[] biases) -> Tensor"
)


@concat_biased_op.register_fake
def _(tensors, biases):
    return torch.cat(tensors, 1)


def dense(x: Tensor) -> Tensor:
    """A copy of an image without gaps in its memory; a slice of channels of an image in channels_last stays so."""
    rows = x.dim() in FORMATS and suggests_channels_last(x)
    memory_format = FORMATS[x.dim()] if rows else torch.contiguous_format
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format)
    pitches = _served((x,)) if rows else None
    if pitches is None:
        return y.copy_(x)
    _launch(y, (x,), (x.shape[1],), pitches, ())
    return y


def pitches_of(tensors: Sequence[Tensor]) -> Ints | None:
    """The pitches of tensors that the kernel can join if ``torch.cat`` would return channels_last; otherwise None."""
    first = tensors[0]
    if first.dim() not in FORMATS or first.dtype not in ACTIVATION_DTYPES:
        return None
    pitches = []
    size = first.shape[0], *first.shape[2:]
    for x in tensors:
        # Without these checks torch.cat would raise its own error, or promote a dtype.
        alike = x.dtype == first.dtype and x.device == first.device and (x.shape[0], *x.shape[2:]) == size
        pitch = pitch_of(x) if alike else None
        if pitch is None or not suggests_channels_last(x):
            return None
        pitches.append(pitch)
    return tuple(pitches)


def _served(tensors: Sequence[Tensor]) -> Ints | None:
    """The pitches of tensors that the kernel joins; None for others."""
    pitches = pitches_of(tensors)
    return pitches if pitches is not None and _backend.use_triton(tensors[0], FAMILY) else None


def _results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of a concatenation, which copies, or adds a bias and rounds once."""
    y, tensors, channels, _, biases = before
    parts = y.split(channels, dim=1)
    for x, bias, part in zip(tensors, biases or (None,) * len(tensors), parts, strict=True):
        for a, b in channel_ranges(x):
            exact = exactly(wide(x, a, b))
            if bias is not None:
                exact = (exact + exactly(bias.detach()[a:b].double().view(1, -1, 1))).stored(y.dtype)
            yield exact.near("y", part[:, a:b])


def _kind(y: Tensor, tensors: Sequence[Tensor], channels: Ints, pitches: Ints, biases: Biases) -> tuple[Any, ...]:
    """A pitch has the strides of a source."""
    return y.shape, y.dtype, y.get_device(), channels, pitches, *[b if b is None else b.dtype for b in biases]


@checked(FAMILY, _kind, _results)
def _launch(y: Tensor, tensors: Sequence[Tensor], channels: Ints, pitches: Ints, biases: Biases) -> None:
    from ..kernels import concat as kernels

    # The kernel reads vectors whose elements are adjacent; a bias may be a column of a matrix.
    biases = tuple(b if b is None else b.contiguous() for b in biases)
    with _backend.launching(y):
        kernels.concat(tensors, pitches, y, y.shape[1], biases)
