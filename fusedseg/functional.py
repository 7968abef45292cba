"""Functional forms of the ops."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .activation import parse_activation, parse_invertible
from .ops import conv_abn as _conv_abn
from .ops import join_conv as _join_conv
from .ops import max_pool as _max_pool
from .ops.conv_choice import check_conv_backend
from .ops.conv_choice import load as load_conv_choices
from .ops.conv_choice import save as save_conv_choices
from .ops.norm.checks import check
from .ops.norm.kept import find
from .ops.norm.op import normalise
from .ops.norm.spec import NAMES, Passed, Spec
from .ops.sources import Interpolated, Source, padded, parse_sources

__all__ = [
    "Interpolated",
    "conv_abn",
    "inplace_abn",
    "inplace_group_norm_act",
    "inplace_instance_norm_act",
    "join_conv",
    "load_conv_choices",
    "max_pool",
    "norm_act",
    "save_conv_choices",
]


def inplace_abn(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    *,
    residual: Tensor | None = None,
) -> Tensor:
    """Batch normalisation and an invertible activation, written over ``x``.

    Equals, with the arguments of ``torch.nn.functional.batch_norm`` in their order::

        leaky_relu(batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), activation_param)

    Args:
        x: (N, C) or (N, C, *spatial), fp16, bf16, fp32 or fp64, on any device.  Overwritten; use what is returned.
        running_mean, running_var, weight, bias: (C,) or None, in the dtype of ``x``, or fp32 beside half precision.
        training: statistics of the batch, which move the running ones by ``momentum``; else the running ones.
        eps: added to the variance.
        activation: "leaky_relu" (``activation_param``: the negative slope, > 0), "elu" (alpha, > 0) or "identity".
        residual: added before the activation; of the shape, dtype (under autocast, any) and device of ``x``, in other
            memory.  Copied once where its strides are not those of ``x``.

    Returns:
        z, of the shape, dtype and strides of ``x`` and in its memory.  Where ``x`` is neither contiguous nor
        channels_last it is copied first and left alone, and z is contiguous.

    Kept for backward: z, 1 / sqrt(var + eps), weight, bias, residual; and for the channels with |bias| > k |weight|
    (k = 8 in half precision, 64 in fp32, 4096 in fp64) or a weight too small for the dtype, their normalised input;
    with a residual, taken to be of size 1, also for those with 1 > k |weight|.  The module keeps track of these
    channels without waiting for a GPU; this function looks at the parameters, and waits, in every call.

    ELU loses accuracy in its tail: y is rebuilt as log(1 + z / alpha), which multiplies the rounding of z by
    exp(-y).  The gradient passes through xhat only, where the tail's weight in it is small.

    Under ``torch.compile``, ``x`` is left alone, and looking at the parameters breaks the graph: compile the module,
    which does not, where ``fullgraph=True`` is wanted.

    Raises:
        ValueError: an activation that cannot be inverted (relu, or a slope <= 0), naming the module that is exact
            for it; a wrong shape; one value per channel in training; ``x`` a leaf that requires grad, overlapping
            itself, or one of several views of one call; a residual of another shape, or in the memory of ``x``.
        TypeError: an integer or complex ``x``, parameters of another dtype.
        RuntimeError: in backward, when it is differentiated itself.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """
    op = NAMES["output"]
    act = parse_invertible(op, activation, activation_param)
    passed = Passed(x, weight=weight, bias=bias, residual=residual, running_mean=running_mean, running_var=running_var)
    spec = Spec("output", act, eps=eps, momentum=momentum, own=training)
    check(op, passed, spec)
    return normalise(passed, spec, find(weight, bias, act, x.dtype, residual is not None))


def inplace_instance_norm_act(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    residual: Tensor | None = None,
) -> Tensor:
    """Instance normalisation and an invertible activation, written over ``x``: ``inplace_abn`` with a mean and a
    variance for each channel of each sample.

    Equals, with the arguments of ``torch.nn.functional.instance_norm`` in their order::

        leaky_relu(instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps), 0.01)

    Args:
        x: (N, C, *spatial), otherwise as ``inplace_abn`` has it.
        use_input_stats: statistics of the samples, whose averages move the running ones; else the running ones.

    The rest, what is returned, kept and raised is that of ``inplace_abn``; 1 / sqrt(var + eps) is (N, C).
    """
    name = "fusedseg.inplace_instance_norm_act"
    act = parse_invertible(name, activation, activation_param, "InstanceNormAct")
    passed = Passed(x, weight=weight, bias=bias, residual=residual, running_mean=running_mean, running_var=running_var)
    spec = Spec(
        "output", act, eps=eps, momentum=momentum, own=use_input_stats, kind="instance" if use_input_stats else "batch"
    )  # fmt: skip
    check(name, passed, spec)
    return normalise(passed, spec, find(weight, bias, act, x.dtype, residual is not None))


def inplace_group_norm_act(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    residual: Tensor | None = None,
) -> Tensor:
    """Group normalisation and an invertible activation, written over ``x``: ``inplace_abn`` with a mean and a variance
    for each of ``num_groups`` groups of adjacent channels of each sample.

    Equals, with the arguments of ``torch.nn.functional.group_norm`` in their order::

        leaky_relu(group_norm(x, num_groups, weight, bias, eps), 0.01)

    The rest, what is returned, kept and raised is that of ``inplace_abn``; 1 / sqrt(var + eps) is (N, num_groups).
    """
    name = "fusedseg.inplace_group_norm_act"
    act = parse_invertible(name, activation, activation_param, "GroupNormAct")
    passed = Passed(x, weight=weight, bias=bias, residual=residual)
    spec = Spec("output", act, eps=eps, kind="group", groups=num_groups)
    check(name, passed, spec)
    return normalise(passed, spec, find(weight, bias, act, x.dtype, residual is not None))


def norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float | str | None = None,
    *,
    norm: str = "batch",
    num_groups: int | None = None,
    residual: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """A normalisation, an optional residual and any activation, exact for all of them; ``x`` is left alone.

    Equals, with the arguments of ``torch.nn.functional.batch_norm`` in their order::

        y = batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        leaky_relu(y if residual is None else y + residual, 0.01)

    Args:
        x: (N, C) or (N, C, *spatial), fp16, bf16, fp32 or fp64, on any device.
        running_mean, running_var, weight, bias: (C,) or None, in the dtype of ``x``, or fp32 beside half precision.
        training: statistics of ``x``, which move the running ones by ``momentum``; else the running ones.
        eps: added to the variance.
        activation, activation_param: see ``BatchNormAct``.
        norm: "batch"; "instance", for ``instance_norm`` with ``use_input_stats=training``; or "group", for
            ``group_norm``, where the statistics are always those of ``x`` and none are running.
        num_groups: of "group".
        residual: like ``x``, or None.
        slope: of prelu, (1,) or (C,), in the dtype of ``weight``.

    Returns:
        z, of the shape, dtype and memory format of ``x``.

    Kept for backward, and raised: see ``BatchNormAct``.
    """
    op = NAMES["input"]
    act = parse_activation(op, activation, activation_param)
    if norm not in ("batch", "instance", "group"):
        raise ValueError(f"{op}: norm must be 'batch', 'instance' or 'group', got {norm!r}")
    if (norm == "group") != (num_groups is not None):
        raise ValueError(f"{op}: num_groups must be given for norm 'group' and for no other, got {num_groups!r}")
    if norm == "group" and (running_mean is not None or running_var is not None):
        raise ValueError(f"{op}: norm 'group' has no running statistics, running_mean and running_var must be None")
    own = training or norm == "group"
    passed = Passed(
        x, weight=weight, bias=bias, residual=residual, slope=slope, running_mean=running_mean, running_var=running_var
    )  # fmt: skip
    spec = Spec(
        "input", act, eps=eps, momentum=momentum, own=own, kind=norm, groups=0 if num_groups is None else num_groups
    )  # fmt: skip
    check(op, passed, spec)
    return normalise(passed, spec)


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
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    conv_backend: str = "auto",
) -> Tensor:
    """Convolution, batch normalisation and an invertible activation as one op, in two or three dimensions.

    Equals::

        y = conv2d(x, conv_weight, conv_bias, stride, padding, dilation, groups)
        leaky_relu(batch_norm(y, running_mean, running_var, weight, bias, training, momentum, eps), activation_param)

    Args:
        x: (N, C, *spatial), with two or three spatial dimensions, fp16, bf16, fp32 or fp64; or a sequence of such
            tensors, for their concatenation along the channels, which is not kept; any of them may be an
            ``Interpolated``.  Left alone.
        conv_weight: (K, C / groups, *kernel); conv_bias: (K,) or None; both in the dtype of ``x``.
        running_mean, running_var, weight, bias: (K,) or None, in the dtype of ``x``, or fp32 beside half precision.
        stride, padding, dilation, groups: as in ``torch.nn.functional.conv2d``; padding may be "same" or "valid".
        training, momentum, eps, activation, activation_param: as in ``inplace_abn``.
        conv_backend: "auto", "triton" or "aten", see ``ConvABN2d``.

    Returns:
        z, (N, K, *out), in the dtype of ``x``; channels_last where ``x`` or ``conv_weight`` is.

    Kept for backward: x, conv_weight, z, 1 / sqrt(var + eps), weight, bias, and the normalised convolution of those
    channels whose weight is too small to rebuild it (see ``inplace_abn``).  In training the gradient of ``conv_bias``
    is exactly zero, since the mean takes it along.

    Under autocast ``x``, ``conv_weight`` and ``conv_bias`` are cast as for a stock convolution.  Under
    ``torch.compile`` looking at the parameters breaks the graph: compile the module for ``fullgraph=True``.

    Raises: see ``ConvABN2d``.

    Source: see ``ConvABN2d``.
    """
    act = parse_invertible(_conv_abn.OP, activation, activation_param)
    check_conv_backend(_conv_abn.OP, conv_backend)
    sources, conv_weight, conv_bias, geometry = _joined(
        _conv_abn.OP, x, conv_weight, conv_bias, stride, padding, dilation, groups
    )
    norms = (running_mean, running_var, weight, bias)
    _conv_abn.check(sources, conv_weight, conv_bias, *norms, geometry, training, conv_backend)
    kept = find(weight, bias, act, conv_weight.dtype) if torch.is_grad_enabled() else None
    settings = _conv_abn.Settings(geometry, training, momentum, eps, act, kept, conv_backend)
    return _conv_abn.conv_abn(sources, conv_weight, conv_bias, *norms, settings)


def _joined(op, x, weight, bias, stride, padding, dilation, groups):
    """Sources, weight and bias as they are convolved, and the geometry."""
    sources = parse_sources(op, x)
    if not isinstance(weight, Tensor):
        raise TypeError(f"{op}: conv_weight must be a tensor, got {type(weight).__name__}")
    if weight.dim() not in (4, 5):
        raise ValueError(
            f"{op}: conv_weight must have shape (K, C / groups, *kernel) in two or three dimensions, "
            f"got {tuple(weight.shape)}"
        )
    sources, geometry = padded(op, sources, weight.shape[2:], stride, padding, dilation, groups)
    return *_join_conv.autocast(sources, weight, bias), geometry


def join_conv(
    x: Source | Sequence[Source],
    conv_weight: Tensor,
    conv_bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolution of a concatenation that is not kept, and if large never formed, in two or three dimensions.

    Equals ``conv2d(cat(x, dim=1), conv_weight, conv_bias, stride, padding, dilation, groups)``, where an
    ``Interpolated`` in ``x`` stands for ``interpolate`` of its tensor.

    Args:
        x: a tensor (N, C, *spatial), an ``Interpolated``, or a sequence of these, alike in all but their channels.
        conv_weight, conv_bias, stride, padding, dilation, groups: as in ``conv_abn``.

    Kept for backward: conv_weight and each source's tensor; of an ``Interpolated`` the small one.

    Raises:
        ValueError, TypeError: arguments that do not fit, as in ``conv_abn``.
        RuntimeError: in backward, when it is differentiated itself.
    """
    arguments = _joined(_join_conv.OP, x, conv_weight, conv_bias, stride, padding, dilation, groups)
    _join_conv.check(_join_conv.OP, *arguments)
    return _join_conv.join_conv(*arguments)


def max_pool(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Max-pooling in two or three dimensions that keeps one byte per output element.

    Equals ``max_pool2d`` or ``max_pool3d`` of ``torch.nn.functional`` with the same arguments, ties, NaN and windows
    partly outside ``x`` included.

    Args:
        x: (N, C, H, W) or (C, H, W), (N, C, D, H, W) or, where ``kernel_size`` has three numbers, (C, D, H, W); fp16,
            bf16, fp32 or fp64.
        kernel_size, stride, padding, dilation, ceil_mode: as in ``torch.nn.functional.max_pool2d``.

    Returns:
        z, in the dtype and memory format (contiguous or channels_last) of ``x``.

    Kept for backward: see ``MaxPool2d``.  Gradients of gradients are right.

    Raises: see ``MaxPool2d``.
    """
    op = _max_pool.OP
    if not isinstance(x, Tensor) or not 3 <= x.dim() <= 5:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(
            f"{op}: x must have shape (N, C, *spatial) or (C, *spatial), in two or three dimensions, got {came}"
        )
    dims = 3 if x.dim() == 5 or (isinstance(kernel_size, Sequence) and len(kernel_size) == 3) else 2
    pool = _max_pool.parse_pool(op, dims, kernel_size, stride, padding, dilation, ceil_mode)
    return _max_pool.pooled(op, x, dims, pool)
