"""Checks of the arguments of the norm op, with the errors that users see."""

import math

import torch
from torch import Tensor

from ... import _torch
from ...activation import check_slope_given
from ..check import check_channel_vector, check_device, check_dtype, check_input, check_tensor
from ..layout import memory_of
from .call import Norm, Operands


def check(op: str, given: Operands, norm: Norm) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take.  Error texts begin with ``op``."""
    x = given.x
    check_input(op, x)
    check_norm(op, given, norm, x.shape, x)
    if given.residual is not None:
        _check_residual(op, given.residual, x, norm)
    if norm.keep == "output" and not torch.compiler.is_compiling():
        _check_writable(op, x, norm)


def check_norm(op: str, given: Operands, norm: Norm, shape: torch.Size, like: Tensor, of: str = "x") -> None:
    """Checks parameters and running statistics for a tensor of this shape, with the dtype and device of ``like``.

    Error texts call the tensor ``of``.
    """
    C = shape[1]
    _, weight, bias, _, slope, running_mean, running_var, _ = given
    check_slope_given(op, norm.act, slope)
    if slope is not None:
        check_tensor(op, slope, "slope")
    # There is one slope for all channels, or one slope per channel.
    slopes = C if slope is None or slope.shape != (1,) else 1
    vectors = (("weight", weight, C), ("bias", bias, C), ("running_mean", running_mean, C),
               ("running_var", running_var, C), ("slope", slope, slopes))  # fmt: skip
    for name, v, count in vectors:
        check_channel_vector(op, name, v, count, like.dtype, like.device, of)
    if (running_mean is None) != (running_var is None):
        raise ValueError(f"{op}: running_mean and running_var must be given together, got one of them")
    if not norm.own and running_mean is None:
        raise ValueError(f"{op}: running_mean and running_var are needed when training is False, got None")
    if norm.process_group is None:
        _check_values(op, norm, shape)


def _check_values(op: str, norm: Norm, shape: torch.Size) -> None:
    """Raises ValueError if a statistic of x would be computed from a single value.

    An empty batch passes, as in the stock norms.
    """
    if not norm.over.of_samples:
        # ``own`` comes first, because an exported program in eval mode must not depend on the number of samples that it
        # was traced with.  ``shape.numel()`` would make constants of symbolic sizes.
        if not (norm.own and shape[1] and math.prod(shape) == shape[1]):
            return
        raise ValueError(f"{op}: expected more than 1 value per channel when training, got input size {tuple(shape)}")
    if not norm.over.is_grouped:
        if norm.own and math.prod(shape[2:]) == 1:
            raise ValueError(f"{op}: expected more than 1 spatial element when training, got input size {tuple(shape)}")
        return
    groups = norm.over.groups
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or shape[1] % groups:
        raise ValueError(f"{op}: num_groups must divide the number of channels, {shape[1]}, got {groups!r}")
    # As nn.GroupNorm does, this accepts several samples whose groups have one value each.
    if math.prod(shape) == groups:
        raise ValueError(f"{op}: expected more than 1 value per group when training, got input size {tuple(shape)}")


def _check_residual(op: str, residual: Tensor, x: Tensor, norm: Norm) -> None:
    """Raises an error unless ``residual`` can be added to ``x`` and shares no memory that the op overwrites."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op}: residual must be a tensor or None, got {type(residual).__name__}")
    if residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    check_device(op, "residual", residual, x.device, "x")
    if residual.dtype != x.dtype:
        check_dtype(op, "residual", residual.dtype)
        if not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{op}: residual must be {x.dtype}, the dtype of x (autocast casts it), got {residual.dtype}"
            )
    if norm.keep == "input" or torch.compiler.is_compiling() or not x.numel():
        return
    if memory_of(residual) == memory_of(x):
        raise ValueError(f"{op}: residual shares memory with x, which is overwritten; pass residual.clone()")


def _check_writable(op: str, x: Tensor, norm: Norm) -> None:
    """Raises ValueError unless ``x`` can be overwritten without losing a gradient."""
    if not x.is_contiguous() and _torch.debug_has_internal_overlap(x) == 1:
        raise ValueError(
            f"{op}: x must not overlap itself, since it is overwritten, got shape {tuple(x.shape)} with strides "
            f"{x.stride()}; pass x.contiguous()"
        )
    if not (torch.is_grad_enabled() and x.requires_grad):
        return
    if x.is_leaf:
        raise ValueError(
            f"{op}: x is a leaf that requires grad and would be overwritten; pass a result, such as a convolution's "
            "output, or x.clone()"
        )
    if x._is_view() and not _torch.is_plain_view(x):
        raise ValueError(
            f"{op}: x is one of several views made by one call (chunk, split, unbind, ...) or was made under "
            "no_grad, and autograd cannot follow a write into it; pass x.clone()"
        )
    # A call in eval mode may have no backward.  With one, autograd raises an error there.
    if norm.own and _torch.saves_result(x.grad_fn):
        raise ValueError(
            f"{op}: x is the output of {type(x.grad_fn).__name__}, which reads it in backward, and would be "
            "overwritten; pass x.clone(), or use a norm that keeps its input, such as fusedseg.BatchNormAct"
        )
