"""Functional forms of normalisation and activation."""

from torch import Tensor

from ..activation import parse_activation, parse_invertible
from ..ops.check import check_choice
from ..ops.norm.call import NAMES, Norm, Operands
from ..ops.norm.checks import check
from ..ops.norm.eager import normalise
from ..ops.norm.kept import find
from ..ops.norm.statistic import INSTANCE, Statistic
from ..ops.norm.stock import KINDS, KindName


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

        y = batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        leaky_relu(y, activation_param)

    Args:
        x: (N, C) or (N, C, *spatial), fp16, bf16, fp32 or fp64, on any device.  It is overwritten; use the result.
        running_mean, running_var, weight, bias: (C,) or None, in the dtype of ``x``, or fp32 if that is fp16 or bf16.
        training: True normalises with the statistics of the batch, and moves the running statistics by ``momentum``;
            False normalises with the running statistics.
        eps: added to the variance.
        activation: the name of an activation that has an inverse, one of ``fusedseg.activation.INVERTIBLE``.
        activation_param: the negative slope of leaky_relu or the alpha of elu, > 0; no other activation has one.
        residual: added before the activation.  It has the shape and device of ``x``, and its dtype; under autocast any
            dtype.  It must not share memory with ``x``.  It is copied once if its strides differ from those of ``x``.

    Returns:
        z, with the shape, dtype and strides of ``x``, in the memory of ``x``.  If ``x`` is neither contiguous nor
        channels_last, it is copied first: then ``x`` keeps its values, and z is contiguous.

    Kept for backward: z, 1 / sqrt(var + eps), weight, bias and residual.  A channel with |bias| > k |weight| (k = 8 in
    half precision, 64 in fp32, 4096 in fp64) cannot be inverted accurately, nor can a channel whose weight is too small
    for the dtype; their normalised input is kept as well.  A residual counts as values of size 1, so that channels with
    1 > k |weight| are added.  The module keeps track of these channels without waiting for a GPU.  This function reads
    the parameters, and waits for the GPU, in every call.

    ELU and SELU lose accuracy in their tail: backward rebuilds y as log(1 + z / alpha), which multiplies the rounding
    of z by exp(-y).  So the normalised input of a channel with expm1(weight^2 - bias) > k |weight| is kept as well; a
    residual adds 1 to weight^2.

    Under ``torch.compile``, ``x`` keeps its values.  Reading the parameters breaks the graph; for ``fullgraph=True``
    compile the module, which does not read them.

    Raises:
        ValueError: the activation cannot be inverted (relu, or a slope <= 0; the message names an exact module); a
            shape is wrong; there is one value per channel in training; ``x`` is a leaf that requires grad, overlaps
            itself, or is one of several views of one call; the residual has another shape, or shares memory with ``x``.
        TypeError: ``x`` is integer or complex, or a parameter has another dtype.
        RuntimeError: backward itself is differentiated.

    Source: Rota Bulo et al., "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018.
    """
    op = NAMES["output"]
    act = parse_invertible(op, activation, activation_param)
    given = Operands(x, weight=weight, bias=bias, residual=residual, running_mean=running_mean, running_var=running_var)
    return normalised(op, given, Norm("output", act, eps=eps, momentum=momentum, own=training))


def normalised(op: str, given: Operands, norm: Norm) -> Tensor:
    """The norm of unchecked arguments; an op that keeps its output reads weight and bias to find the kept channels."""
    check(op, given, norm)
    in_place, residual = norm.keep == "output", given.residual is not None
    kept = find(given.weight, given.bias, norm.act, given.x.dtype, residual) if in_place else None
    return normalise(given, norm, kept)


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
    """Instance normalisation and an invertible activation, written over ``x``.

    It is ``inplace_abn`` with a mean and a variance for each channel of each sample.

    Equals, with the arguments of ``torch.nn.functional.instance_norm`` in their order::

        y = instance_norm(x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
        leaky_relu(y, 0.01)

    Args:
        x: (N, C, *spatial); otherwise as in ``inplace_abn``.
        use_input_stats: True normalises with the statistics of each sample, and moves the running statistics by their
            averages; False normalises with the running statistics.

    Everything else is as in ``inplace_abn``, except that 1 / sqrt(var + eps) has shape (N, C).
    """
    op = "fusedseg.inplace_instance_norm_act"
    act = parse_invertible(op, activation, activation_param, "InstanceNormAct")
    given = Operands(x, weight=weight, bias=bias, residual=residual, running_mean=running_mean, running_var=running_var)
    norm = Norm("output", act, eps=eps, momentum=momentum, own=use_input_stats, over=INSTANCE)
    return normalised(op, given, norm)


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
    """Group normalisation and an invertible activation, written over ``x``.

    It is ``inplace_abn`` with a mean and a variance for each of ``num_groups`` groups of channels of each sample.

    Equals, with the arguments of ``torch.nn.functional.group_norm`` in their order::

        leaky_relu(group_norm(x, num_groups, weight, bias, eps), 0.01)

    Everything else is as in ``inplace_abn``, except that 1 / sqrt(var + eps) has shape (N, num_groups).
    """
    op = "fusedseg.inplace_group_norm_act"
    act = parse_invertible(op, activation, activation_param, "GroupNormAct")
    given = Operands(x, weight=weight, bias=bias, residual=residual)
    return normalised(op, given, Norm("output", act, eps=eps, over=Statistic(True, num_groups)))


def norm_act(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    activation: str = "leaky_relu",
    activation_param: float | str | None = None,
    norm: KindName = "batch",
    num_groups: int | None = None,
    residual: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """A normalisation, an optional residual and any activation; exact for every activation.  ``x`` keeps its values.

    Equals, with the arguments of ``torch.nn.functional.batch_norm`` in their order::

        y = batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        leaky_relu(y if residual is None else y + residual, 0.01)

    Args:
        x: as in ``inplace_abn``, but it keeps its values.
        running_mean, running_var, weight, bias, training, momentum, eps: as in ``inplace_abn``.
        activation, activation_param: see ``BatchNormAct``.
        norm: "batch"; "instance", for ``instance_norm`` with ``use_input_stats=training``; or "group", for
            ``group_norm``, which always takes the statistics of ``x`` and has no running statistics.
        num_groups: the number of groups, for "group" only.
        residual: a tensor like ``x``, or None.
        slope: the slope of prelu, (1,) or (C,), in the dtype of ``weight``.

    Returns:
        z, with the shape, dtype and memory format of ``x``.

    ``BatchNormAct`` says what is kept for backward and which errors are raised.
    """
    op = NAMES["input"]
    act = parse_activation(op, activation, activation_param)
    check_choice(op, "norm", norm, tuple(KINDS))
    kind, grouped = KINDS[norm], [name for name, kind in KINDS.items() if kind.statistic is None]
    if (norm in grouped) != (num_groups is not None):
        names = " or ".join(map(repr, grouped))
        raise ValueError(f"{op}: num_groups must be given for norm {names} and for no other, got {num_groups!r}")
    if not kind.own and (running_mean is not None or running_var is not None):
        raise ValueError(f"{op}: norm {norm!r} has no running statistics, running_mean and running_var must be None")
    own, over = training or not kind.own, kind.over(num_groups)
    of_call = Norm("input", act, eps=eps, momentum=momentum, own=own, over=over)
    given = Operands(x, weight=weight, bias=bias, residual=residual, slope=slope, running_mean=running_mean,
                    running_var=running_var)  # fmt: skip
    return normalised(op, given, of_call)
