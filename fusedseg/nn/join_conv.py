"""``JoinConv2d`` and ``JoinConv3d``: convolutions of a concatenation, which receive its parts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..ops.conv import join_conv as op
from ..ops.conv.geometry import RawGeometry
from ..ops.conv.sources import Source, parse_sources, shape_of
from .unscriptable import Unscriptable


def geometry_of(conv: nn.Conv2d | nn.Conv3d) -> RawGeometry:
    """The arguments of a convolution module except the numbers of channels."""
    pads = conv._reversed_padding_repeated_twice
    return RawGeometry(conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode, pads)


def sources_of_input(name: str, x: Source | Sequence[Source], dims: int) -> tuple[Source, ...]:
    """The sources that a module's input stands for.  Raises ValueError unless they have ``dims`` spatial dimensions."""
    sources = parse_sources(name, x)
    shape = shape_of(sources)
    if len(shape) != dims + 2:
        raise ValueError(
            f"{name}: x must have shape (N, C) with {dims} spatial dimensions after it, got {tuple(shape)}"
        )
    return sources


DOC = """``nn.Conv{dims}d`` of a concatenation that is not kept for backward.  A large concatenation is never formed.

    Compiled code on a GPU forms it, in forward and in backward, because a convolution of each source takes longer.

    Equals ``nn.Conv{dims}d(C, K, ...)(torch.cat(x, dim=1))`` for a sequence ``x`` of tensors with C channels together.
    Any of them may be a ``functional.Interpolated``, whose interpolated tensor is not kept.  A single tensor counts as
    a sequence of one.  Arguments and ``state_dict`` are those of ``nn.Conv{dims}d``.

    Shapes: sources of (N, C_i, {sizes}), whose C_i add up to C, to (N, K, {out_sizes}), in fp16, bf16, fp32 or fp64.
    The output is channels_last if the concatenation or the weight is.

    Kept for backward: the weight (under autocast the weight itself and no copy of it) and the sources; for an
    ``Interpolated``, the tensor before interpolation.

    With a padding mode other than zeros, and with "same" and an even kernel, it falls back to the stock module's way:
    the concatenation is formed, padded and kept.

    Raises:
        ValueError: the sources differ in more than their channels, or their channels do not add up to C; there are
            several sources, and groups.
        TypeError: a source is no tensor, or has another dtype than the weight.
        RuntimeError: backward itself is differentiated.

    Source: Pleiss et al., "Memory-Efficient Implementation of DenseNets", 2017, does not keep a concatenation either.
    """


class _JoinConv(Unscriptable):
    def forward(self: Any, x: Source | Sequence[Source]) -> Tensor:
        dims = len(self.kernel_size)
        name = f"fusedseg.nn.JoinConv{dims}d"
        call = op.prepared(name, sources_of_input(name, x, dims), self.weight, self.bias, geometry_of(self))
        op.check(name, call)
        return op.join_conv(call)


class JoinConv2d(_JoinConv, nn.Conv2d):
    __doc__ = DOC.format(dims=2, sizes="H, W", out_sizes="OH, OW")


class JoinConv3d(_JoinConv, nn.Conv3d):
    __doc__ = DOC.format(dims=3, sizes="D, H, W", out_sizes="OD, OH, OW")
