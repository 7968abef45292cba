"""Functional forms of the convolutions."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _backend
from ..activation import parse_invertible
from ..ops.check import check_choice
from ..ops.conv import conv_abn as _conv_abn
from ..ops.conv import join_conv as _join_conv
from ..ops.conv.sources import Source
from ..ops.norm.call import Norm, Operands
from ..ops.norm.kept import find


def conv_abn(
    x: Source | Sequence[Source],
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    conv_backend: _backend.Backend = "auto",
) -> Tensor:
    """Convolution, batch normalisation and an invertible activation as one op, in two or three dimensions.

    Equals::

        y = conv2d(x, conv_weight, conv_bias, stride, padding, dilation, groups)
        y = batch_norm(y, running_mean, running_var, weight, bias, training, momentum, eps)
        leaky_relu(y, activation_param)

    Args:
        x: (N, C, *spatial), with two or three spatial dimensions, fp16, bf16, fp32 or fp64; it keeps its values.  A
            sequence of such tensors, or ``Interpolated``, stands for their concatenation, which is not kept.
        conv_weight, conv_bias: (K, C / groups, *kernel), and (K,) or None; both in the dtype of ``x``.
        running_mean, running_var, weight, bias: (K,) or None, in the dtype of ``x``, or fp32 if that is fp16 or bf16.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``; padding may be "same" or "valid".
        training, momentum, eps, activation, activation_param: as in ``inplace_abn``.
        conv_backend: "auto", "triton" or "aten", see ``ConvABN2d``.

    Returns:
        z, (N, K, *out), in the dtype of ``x``.  It is channels_last if ``x`` or ``conv_weight`` is.

    Kept for backward: x, conv_weight, z, 1 / sqrt(var + eps), weight, bias, and the normalised convolution of the
    channels whose weight is too small to rebuild it (see ``inplace_abn``).  In training the gradient of ``conv_bias``
    is exactly zero, because the mean of the batch contains the bias and is subtracted (in compiled code, zero up to
    rounding).

    Under autocast ``x``, ``conv_weight`` and ``conv_bias`` are cast as for a stock convolution.  ``torch.compile``
    breaks the graph here, where parameters are read; compile the module for ``fullgraph=True``.
    ``ConvABN2d`` lists the errors and the source.
    """
    act = parse_invertible(_conv_abn.OP, activation, activation_param)
    check_choice(_conv_abn.OP, "conv_backend", conv_backend, _backend.NAMES)
    call = _join_conv.parsed(_conv_abn.OP, x, conv_weight, conv_bias, stride, padding, dilation, groups)
    call = call._replace(conv_backend=conv_backend)
    given = Operands(call.w, weight=weight, bias=bias, running_mean=running_mean, running_var=running_var)
    norm = Norm("output", act, eps=eps, momentum=momentum, own=training)
    _conv_abn.check(call, given, norm)
    kept = find(weight, bias, act, call.w.dtype) if torch.is_grad_enabled() else None
    return _conv_abn.conv_abn(call, given, norm, kept)


def join_conv(
    x: Source | Sequence[Source],
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of a concatenation, in two or three dimensions.

    The concatenation is not kept for backward, and a large one is never formed.

    Equals ``conv2d(cat(x, dim=1), conv_weight, conv_bias, stride, padding, dilation, groups)``, where an
    ``Interpolated`` in ``x`` stands for ``interpolate`` of its tensor.

    Args:
        x: a tensor (N, C, *spatial), an ``Interpolated``, or a sequence of these.  Their shapes may differ only in the
            number of channels.
        conv_weight, conv_bias, stride, padding, dilation, groups: as in ``conv_abn``.

    Returns:
        The convolution, (N, K, *out), in the dtype of ``x``.

    On a Hopper GPU a kernel computes convolutions of 3x3x3 taps and few channels, and the gradients of their inputs,
    where it was measured to be faster than the vendor's; ``ConvABN3d`` says which ("a second kernel").

    Kept for backward: conv_weight and the tensor of each source; for an ``Interpolated``, the tensor before
    interpolation.

    Raises:
        ValueError, TypeError: an argument does not fit, as in ``conv_abn``.
        RuntimeError: backward itself is differentiated.
    """
    call = _join_conv.parsed(_join_conv.OP, x, conv_weight, conv_bias, stride, padding, dilation, groups)
    _join_conv.check(_join_conv.OP, call)
    return _join_conv.join_conv(call)
