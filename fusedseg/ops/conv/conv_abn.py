"""Convolution, BatchNorm and activation as one op: z = phi(weight * xhat + bias), xhat = (y - mean) * rstd,
y = conv(x, conv_weight).

Kept for backward: x, conv_weight, z, rstd, weight, bias and xhat of the kept channels; y is freed.  Backward first runs
the backward of ``ops/norm/eager.py``, which computes dy from z and dz, and then ``aten.convolution_backward``.

In training the norm subtracts the mean, which contains the bias of the convolution.  Therefore the bias is left out of
y, it moves running_mean by momentum * conv_bias, and its gradient is exactly zero.  Compiled code runs the stock
convolution with its bias, and the norm of ``ops/norm/eager.py``; there this gradient is zero up to rounding, unless the
backend "fusedseg" leaves the bias out (``compiler/capture/dead_bias.py``).

All functions below take the same objects: ``call`` describes the convolution, ``given`` and ``norm`` describe the norm
after it.  ``given.x`` is the output of the convolution; before the convolution has run, it is conv_weight instead.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..._backend import launching
from .. import unfused
from ..layout import dense, layout_of
from ..norm import eager as norm_op
from ..norm.aten_norms import activate
from ..norm.call import Norm, Operands, Statistics, adjacent, on_adjacent
from ..norm.checks import check_norm
from ..norm.kept import Kept
from ..registry import Result, family
from ..self_test.cases import EPS, FORMATS, MOMENTUM, SLOPE, image, parameters, stock
from . import choice, join_conv
from .convolutions import convolve_sources, stock_convolution
from .geometry import output_format
from .sources import Convolution, concatenated, is_tensor, shape_of, tensors_of

OP = "fusedseg.conv_abn"
CONV_SHAPE, CONV_CHANNELS = (2, 32, 8, 8), 64
# The largest relative errors in the self-test.  The convolution also rounds its output before the norm.  In fp32 it may
# use TF32, which cuts off 13 bits.
CONV_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
TF32_TOLERANCE = 5e-3


def _forward_with(
    name: str, call: Convolution, given: Operands, norm: Norm, kept: Kept | None
) -> tuple[Tensor, Statistics]:
    """z and the statistics.  The backend ``name`` computes the convolution."""
    sources, w, conv_bias, geometry, conv_backend = call
    if norm.own:
        conv_bias = None
    if name == "aten":
        if not norm.own and kept is None and _folds(call):
            return _folded(call, given, norm)
        z, _ = dense(convolve_sources(sources, w, conv_bias, geometry, conv_backend))
        return norm_op.forward(given._replace(x=z), norm, kept, z)
    if not adjacent(given.weight, given.bias, given.running_mean, given.running_var, conv_bias):
        call = call._replace(bias=None if conv_bias is None else conv_bias.contiguous())
        return on_adjacent(given, norm.own, lambda given: _forward_with(name, call, given, norm, kept))
    from ...kernels.conv_abn import conv_abn_fwd

    (source,) = sources
    x, x_layout = dense(source)  # type: ignore[arg-type]
    shape = geometry.output_shape(x.shape, w.shape)
    z = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=output_format(x, w))
    with launching(x):
        found = conv_abn_fwd(
            x, w, z, x_layout, layout_of(z), geometry, conv_bias=conv_bias, weight=given.weight, bias=given.bias,
            running_mean=given.running_mean, running_var=given.running_var, training=norm.own, momentum=norm.momentum,
            eps=norm.eps, act=norm.act, kept=None if kept is None else (kept.slots, kept.count),
            tf32=choice.takes_tf32(x),
        )  # fmt: skip
    if given.batches is not None:
        given.batches.add_(1)
    return z, Statistics(*found)


def _folds(call: Convolution) -> bool:
    """Whether the norm is folded into the weight in eval mode.

    It is not folded in half precision, because the scaled weight would be rounded once more.  It is not folded either
    if the weight is larger than the result, because scaling the result is cheaper then.
    """
    w = call.w
    wide = w.dtype in (torch.float32, torch.float64)
    return wide and w.numel() <= call.geometry.output_shape(shape_of(call.sources), w.shape).numel()


def _folded(call: Convolution, given: Operands, norm: Norm) -> tuple[Tensor, Statistics]:
    """Does what ``_forward_with`` does, in eval mode, by a convolution with a scaled weight and an activation."""
    sources, w, conv_bias, geometry, _ = call
    running_mean, running_var = given.running_mean, given.running_var
    assert running_mean is not None
    assert running_var is not None
    rstd = torch.rsqrt(running_var + norm.eps)
    scale = rstd if given.weight is None else given.weight * rstd
    shift = -running_mean if conv_bias is None else conv_bias - running_mean
    shift = shift * scale if given.bias is None else torch.addcmul(given.bias, shift, scale)
    z = convolve_sources(sources, w * scale.view(-1, *(1,) * (w.dim() - 1)), shift, geometry)
    return activate(dense(z)[0], norm.act), Statistics(running_mean, rstd)


def _chosen(call: Convolution, given: Operands, norm: Norm, kept: Kept | None) -> str:
    """The backend of the convolution, by the rules of ``choice.py``."""
    sources, w, _, geometry, conv_backend = call
    if not is_tensor(sources):
        return "aten"
    # The measurement must not move the running statistics, nor count a batch.
    unmoved = given._replace(running_mean=None, running_var=None, batches=None) if norm.own else given
    return choice.choose(
        OP, conv_backend, sources[0], w, geometry, norm.own,
        lambda name: _forward_with(name, call, unmoved, norm, kept)[0],
    )  # fmt: skip


def _forward(call: Convolution, given: Operands, norm: Norm, kept: Kept | None) -> tuple[Tensor, Statistics]:
    """Runs ``_forward_with``, which leaves the bias out of y in training, and moves the running mean by the bias."""
    z, stats = _forward_with(_chosen(call, given, norm, kept), call, given, norm, kept)
    # An empty batch moves no running statistics.
    if norm.own and call.bias is not None and given.running_mean is not None and z.numel():
        given.running_mean.add_(call.bias, alpha=norm.momentum)
    return z, stats


def check(call: Convolution, given: Operands, norm: Norm) -> None:
    """Raises ValueError or TypeError if the arguments do not fit the op."""
    shape = join_conv.check(OP, call)
    if call.conv_backend == "triton" and not is_tensor(call.sources):
        raise ValueError(
            f"{OP}: x must be one tensor for conv_backend 'triton', got several or Interpolated; use 'auto' or 'aten'"
        )
    check_norm(OP, given, norm, shape, call.w, "the convolution's output")


def conv_abn(call: Convolution, given: Operands, norm: Norm, kept: Kept | None) -> Tensor:
    """The op on checked arguments."""
    sources, w, conv_bias, geometry, _ = call
    step = call, given, norm, kept
    if unfused.wanted():
        y = stock_convolution(concatenated(sources), w, conv_bias, geometry)
        return norm_op.normalise(given.with_x(y), norm)
    if torch.compiler.is_compiling():
        # The compiler traces these stock functions, and decides itself how much of a concatenation to form.
        return norm_op.normalise(given.with_x(convolve_sources(sources, w, conv_bias, geometry)), norm, kept)
    if not torch.is_grad_enabled():
        return _forward(*step)[0]
    # The second node keeps them beside z.
    found: list[Statistics] = []

    def convolve() -> Tensor:
        z, stats = _forward(*step)
        found.append(stats)
        return z

    # This node has the whole forward, but only the convolution's part of backward; ``NormFunction`` has the other
    # part.  One node for both would hold dz, dy and dx at once, and each of the two holds only two of these.
    z = join_conv.ConvolutionFunction.apply(OP, call, convolve, norm.own, w, conv_bias, *tensors_of(sources))
    return norm_op.normalise_eagerly(given._replace(x=z), norm, kept, found[0])


@family("conv", dtypes=tuple(CONV_TOLERANCE))
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    from ...kernels.conv_abn import conv_abn_fwd

    C, K = CONV_SHAPE[1], CONV_CHANNELS
    weight, bias = parameters(K, dtype, device)
    # In fp32 the taps use TF32 where the GPU has it, because "auto" takes this kernel for it.
    taps_tf32 = dtype == torch.float32 and _backend.has_tf32(device)
    for fmt, taps, training, tf32 in (
        ("channels_last", 3, True, taps_tf32),
        ("channels_last", 3, False, taps_tf32),
        ("contiguous", 1, True, False),
    ):
        x = image(CONV_SHAPE, dtype, device, fmt, 0)
        w = image((K, C, taps, taps), dtype, device, fmt, 1)
        geometry = ((1, 1), (taps // 2,) * 2, (1, 1), 1)
        (y,) = stock(lambda x, w, padding=taps // 2: F.conv2d(x, w, padding=padding), x, w)
        running = y.mean((0, 2, 3)), y.var((0, 2, 3))
        norm: dict[str, Any] = {"running_mean": None, "running_var": None}
        if not training:
            norm = {name: t.to(weight) for name, t in zip(norm, running, strict=True)}
        of = F.batch_norm(y, *running, weight.cpu().double(), bias.cpu().double(), training, MOMENTUM, EPS)
        expected = F.leaky_relu(of, SLOPE)
        z = torch.empty(y.shape, dtype=dtype, device=device, memory_format=FORMATS[fmt])
        conv_abn_fwd(
            x, w, z, layout_of(x), layout_of(z), geometry, conv_bias=None, weight=weight, bias=bias, **norm,
            training=training, momentum=MOMENTUM, eps=EPS, act=("leaky_relu", SLOPE), kept=None, tf32=tf32,
        )  # fmt: skip
        mode = "training" if training else "eval mode"
        tolerance = TF32_TOLERANCE if tf32 else CONV_TOLERANCE[dtype]
        yield Result(f"z ({fmt}, {taps}x{taps}, {mode})", z, expected, tolerance)
