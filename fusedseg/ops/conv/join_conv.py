"""A convolution of sources (``sources.py``).  Their concatenation is not kept; a large one is not even formed."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import unfused
from ..check import autocast_dtype, check_tangents, check_tensor
from ..double_backward import differentiated_once
from .convolutions import convolve_sources, convolve_sources_backward, stock_convolution
from .geometry import RawGeometry, check_convolution
from .sources import (
    Convolution,
    Source,
    check_agree,
    concatenated,
    enlarges_of,
    padded,
    parse_sources,
    shape_of,
    sources_of,
    tensors_of,
)

OP = "fusedseg.join_conv"
# The key, in the node of the graph that has cast a weight, of the version that the weight had.
VERSION = "fusedseg.version"


def _node_of_cast(t: Tensor) -> Any:
    """The node of the graph that has cast a parameter to ``t``; None if ``t`` is not a cast of a parameter."""
    node = t.grad_fn
    if node is None or t._version or node.name() != "ToCopyBackward0":
        return None
    return None if getattr(node.next_functions[0][0], "variable", None) is None else node


def cast(w: Tensor, dtype: torch.dtype) -> Tensor:
    """``w.to(dtype)``, marked so that ``uncast`` finds ``w``."""
    t = w.to(dtype)
    # Autocast keeps its casts for later calls, so ``t`` may be older than the values of the parameter.
    node = None if torch.compiler.is_compiling() else _node_of_cast(t)
    if node is not None and node.next_functions[0][0].variable is w:
        node.metadata.setdefault(VERSION, w._version)
    return t


def uncast(w: Tensor) -> Tensor:
    """The tensor to keep instead of ``w``: the parameter from which ``cast`` made it, or ``w`` itself.

    ``.to(w.dtype)`` of the result gives the values of ``w`` again.
    """
    node = _node_of_cast(w)
    if node is None or VERSION not in node.metadata:
        return w
    parameter = node.next_functions[0][0].variable
    return parameter if node.metadata[VERSION] == parameter._version else w


class ConvolutionFunction(torch.autograd.Function):
    """The autograd function of a convolution of sources, which a norm may follow.

    It keeps w and the tensors of the sources; for an ``Interpolated``, the tensor before interpolation.

    ``convolve`` computes the output.  ``centred`` says that a norm has subtracted the mean from it, so that the
    gradient of the bias is zero.  Autograd sees only w, the bias and ``tensors``, which are the tensors of the sources.
    """

    @staticmethod
    def forward(ctx, op, call, convolve, centred, w, bias, *tensors):
        ctx.op, ctx.geometry, ctx.centred, ctx.dtype = op, call.geometry, centred, w.dtype
        ctx.conv_backend = call.conv_backend
        ctx.enlarges = enlarges_of(call.sources)
        ctx.save_for_backward(uncast(w), *tensors)
        # As in the stock convolution, a missing gradient of the output gives no gradients of the inputs.
        ctx.set_materialize_grads(False)
        return convolve()

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        w, *tensors = ctx.saved_tensors
        need_w, need_bias, *needs = ctx.needs_input_grad[4:]
        sources, wanted = list(sources_of(tensors, ctx.enlarges)), (need_w, need_bias and not ctx.centred, *needs)
        del tensors
        rest = w.to(ctx.dtype), ctx.geometry, wanted, ctx.conv_backend
        # The list is the only reference to the sources, so that each of them can be freed.
        dw, dbias, *dtensors = differentiated_once(ctx.op, convolve_sources_backward, dy, sources, *rest)
        if need_bias and ctx.centred:
            dbias = dy.new_zeros(w.shape[0])
        return *(None,) * 4, dw, dbias, *dtensors


def prepared(op: str, sources: tuple[Source, ...], w: Tensor, bias: Tensor | None, raw: RawGeometry) -> Convolution:
    """The call of a convolution with a stock convolution's arguments.  Sources are padded and cast if necessary."""
    sources, geometry = padded(op, sources, raw)
    return Convolution(*autocast(sources, w, bias), geometry)


def parsed(op: str, x, w, bias, stride, padding, dilation, groups) -> Convolution:
    """Does what ``prepared`` does, for the arguments of a function."""
    sources = parse_sources(op, x)
    check_tensor(op, w, "conv_weight")
    if w.dim() not in (4, 5):
        raise ValueError(
            f"{op}: conv_weight must have shape (K, C / groups, *kernel) in two or three dimensions, "
            f"got {tuple(w.shape)}"
        )
    return prepared(op, sources, w, bias, RawGeometry(w.shape[2:], stride, padding, dilation, groups))


def check(op: str, call: Convolution) -> torch.Size:
    """The shape of the result.  Raises ValueError or TypeError if the arguments do not fit a convolution of sources."""
    sources, w, bias, geometry, _ = call
    check_agree(op, sources)
    tensors = tensors_of(sources)
    check_tangents(op, w, *tensors)
    first = tensors[0]
    shape = check_convolution(op, shape_of(sources), first.dtype, first.device, w, bias, geometry)
    if len(sources) > 1 and geometry.groups > 1:
        raise ValueError(f"{op}: groups must be 1 for several sources, got {geometry.groups}")
    return shape


def autocast(
    sources: tuple[Source, ...], w: Tensor, bias: Tensor | None
) -> tuple[tuple[Source, ...], Tensor, Tensor | None]:
    """The arguments as a stock convolution gets them: cast if autocast is on."""
    dtype = autocast_dtype(w, *tensors_of(sources))
    if dtype is None:
        return sources, w, bias
    sources = sources_of([tensor.to(dtype) for tensor in tensors_of(sources)], enlarges_of(sources))
    return sources, cast(w, dtype), None if bias is None else bias.to(dtype)


def join_conv(call: Convolution) -> Tensor:
    """The op on checked arguments."""
    sources, w, bias, geometry, _ = call
    if unfused.wanted():
        return stock_convolution(concatenated(sources), w, bias, geometry)
    if torch.compiler.is_compiling():
        # The compiler traces these stock functions, and decides itself how much of the concatenation to form.
        return convolve_sources(sources, w, bias, geometry)
    convolve = partial(convolve_sources, sources, w, bias, geometry)
    return ConvolutionFunction.apply(OP, call, convolve, False, w, bias, *tensors_of(sources))
