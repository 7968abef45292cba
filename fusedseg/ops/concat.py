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
from .registry import Result, family, graph_op, serve
from .self_test.cases import TOLERANCE, image

FAMILY = "concat"
Ints = tuple[int, ...]
Biases = Sequence[Tensor | None]


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


concat_biased_op = graph_op(
    "concat_biased(Tensor[] tensors, Tensor?[] biases) -> Tensor",
    concat_biased,
    fake=lambda tensors, biases: torch.cat(tensors, 1),
    row={"reads": "follows", "layout": "keeps"},
    served=True,
)
serve(torch.ops.aten.cat.default, concat)


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


serve(dense, dense)


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


@checked(FAMILY, _results)
def _launch(y: Tensor, tensors: Sequence[Tensor], channels: Ints, pitches: Ints, biases: Biases) -> None:
    from ..kernels.concat import concat as launch

    # The kernel reads vectors whose elements are adjacent; a bias may be a column of a matrix.
    biases = tuple(b if b is None else b.contiguous() for b in biases)
    with _backend.launching(y):
        launch(tensors, pitches, y, y.shape[1], biases)


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    from ..kernels.concat import concat as launch

    # Five sources take two launches.
    of_all = image((2, 40, 16, 16), dtype, device, "channels_last", 0)
    for what, channels in (("aligned", (8, 16, 8)), ("odd channels", (3, 8, 1, 4, 5))):
        sources = of_all[:, 8 : 8 + sum(channels)].split(channels, dim=1)
        y = image((2, sum(channels), 16, 16), dtype, device, "channels_last", 1)
        launch(sources, [40] * len(channels), y, y.shape[1])
        # A concatenation copies.
        expected = torch.cat([x.double() for x in sources], 1)
        yield Result(f"y ({what})", y, expected, 0.0)
        biases = tuple(torch.ones_like(x[0, :, 0, 0]) for x in sources)
        other = torch.empty_like(y)
        launch(sources, [40] * len(channels), other, y.shape[1], biases)
        yield Result(f"y with biases ({what})", other, expected + 1.0, TOLERANCE[dtype])
