"""A convolution of sources (``sources.py``), whose concatenation is not kept, nor formed if it is large."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import unfused
from ..cast import cast, uncast
from ..check import check_tangents
from ..double_backward import differentiated_once
from .convolution import Geometry, check_convolution
from .sources import (
    Source,
    cast_sources,
    check_agree,
    concatenated,
    convolve_sources,
    convolve_sources_backward,
    enlarges_of,
    shape_of,
    sources_of,
    tensors_of,
)

OP = "fusedseg.join_conv"


class JoinConvFunction(torch.autograd.Function):
    """Keeps w and the tensors of the sources; for an ``Interpolated``, the tensor before interpolation.

    ``formed`` is a tuple with the concatenation of the sources if it exists already, and otherwise an empty tuple.
    """

    @staticmethod
    def forward(ctx, geometry, enlarges, formed, w, bias, *tensors):
        ctx.geometry, ctx.enlarges, ctx.dtype = geometry, enlarges, w.dtype
        ctx.save_for_backward(uncast(w), *tensors)
        return convolve_sources(formed or sources_of(tensors, enlarges), w, bias, geometry)

    @staticmethod
    def backward(ctx, dy):
        w, *tensors = ctx.saved_tensors
        args = (dy, sources_of(tensors, ctx.enlarges), w.to(ctx.dtype), ctx.geometry, ctx.needs_input_grad[3:])
        return None, None, None, *differentiated_once(OP, convolve_sources_backward, *args)


def check(op: str, sources: Sequence[Source], w: Tensor, bias: Tensor | None, geometry: Geometry) -> torch.Size:
    """The shape of the result; raises ValueError or TypeError if the arguments do not fit a convolution of sources."""
    check_agree(op, sources)
    check_tangents(op, w, *tensors_of(sources))
    first = tensors_of(sources)[0]
    shape = check_convolution(op, shape_of(sources), first.dtype, first.device, w, bias, geometry)
    if len(sources) > 1 and geometry.groups > 1:
        raise ValueError(f"{op}: groups must be 1 for several sources, got {geometry.groups}")
    return shape


def autocast(
    sources: tuple[Source, ...], w: Tensor, bias: Tensor | None
) -> tuple[tuple[Source, ...], Tensor, Tensor | None]:
    """The arguments as a stock convolution gets them: cast if autocast is on."""
    device = w.device.type
    # Meta tensors have no autocast, and asking for their autocast raises.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return sources, w, bias
    tensors = tensors_of(sources)
    if torch.float64 in (w.dtype, *(t.dtype for t in tensors)) or not all(t.is_floating_point() for t in tensors):
        return sources, w, bias
    dtype = torch.get_autocast_dtype(device)
    return cast_sources(sources, dtype), cast(w, dtype), None if bias is None else bias.to(dtype)


def join_conv(
    sources: tuple[Source, ...],
    w: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    formed: Tensor | None = None,
) -> Tensor:
    """The op on checked arguments.  ``formed`` is the concatenation of the sources if the caller has formed it."""
    if unfused.wanted():
        return unfused.convolution(concatenated(sources), w, bias, geometry)
    if torch.compiler.is_compiling():
        # The compiler traces these stock functions, and decides itself how much of the concatenation to form.
        return convolve_sources(sources, w, bias, geometry)
    given = () if formed is None else (formed.detach(),)
    return JoinConvFunction.apply(geometry, enlarges_of(sources), given, w, bias, *tensors_of(sources))
