"""Convolutions that take several sources for their concatenation."""

from collections.abc import Sequence

from torch import Tensor, nn

from ..ops import join_conv as op
from ..ops.sources import Source, padded, parse_sources, shape_of
from .leaf import as_leaf, proxy_in
from .unscriptable import Unscriptable


def arguments_of(conv: nn.Conv2d | nn.Conv3d) -> tuple:
    """What ``padded`` is to know of it."""
    pads = conv._reversed_padding_repeated_twice
    return conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode, pads


def _forward(module: nn.Conv2d | nn.Conv3d, dims: int, x: Source | Sequence[Source]) -> Tensor:
    if proxy_in(x) is not None:
        return as_leaf(module, x)
    name = f"fusedseg.JoinConv{dims}d"
    sources = parse_sources(name, x)
    shape = shape_of(sources)
    if len(shape) != dims + 2:
        raise ValueError(
            f"{name}: input must have shape (N, C) with {dims} spatial dimensions after it, got {tuple(shape)}"
        )
    sources, geometry = padded(name, sources, *arguments_of(module))
    sources, weight, bias = op.autocast(sources, module.weight, module.bias)
    op.check(name, sources, weight, bias, geometry)
    return op.join_conv(sources, weight, bias, geometry)


DOC = """``nn.Conv{dims}d`` of a concatenation that is not kept, and if it is large never formed.

    Equals ``nn.Conv{dims}d(C, K, ...)(torch.cat(x, dim=1))`` for a sequence ``x`` of tensors, of C channels together;
    any of them may be an ``functional.Interpolated``, of which the enlarged tensor is not kept.  One tensor is a
    sequence of one.  Arguments and ``state_dict`` are those of ``nn.Conv{dims}d``.

    Kept for backward: the weight (under autocast too, no copy of it) and the sources' tensors, small where they are to
    be enlarged.

    Falls back: with a padding mode other than zeros, or "same" and an even kernel, the concatenation is formed, padded,
    and kept, as the stock module keeps it.

    Raises:
        ValueError: sources that differ in more than their channels, or whose channels do not add up to C; groups with
            several sources.
        TypeError: an input that is no tensor, or of another dtype than the weight.
        RuntimeError: in backward, when it is differentiated itself.
    """


class JoinConv2d(Unscriptable, nn.Conv2d):
    __doc__ = DOC.format(dims=2)

    def forward(self, x: Source | Sequence[Source]) -> Tensor:
        return _forward(self, 2, x)


class JoinConv3d(Unscriptable, nn.Conv3d):
    __doc__ = DOC.format(dims=3)

    def forward(self, x: Source | Sequence[Source]) -> Tensor:
        return _forward(self, 3, x)
