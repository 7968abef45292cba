"""Checks of the arguments of norm_act, with the errors users see."""

from torch import Tensor

from ..activation import Activation
from .check import check_batch_norm, check_channel_vector, check_input
from .norm_act import Settings


def check(
    op: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    settings: Settings,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    norm, own, _, _, act = settings
    check_input(op, x)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    N, C = x.shape[:2]
    if norm.kind == "batch":
        check_batch_norm(op, vectors, own, x.shape, x.dtype, x.device)
    else:
        for name, v in vectors.items():
            check_channel_vector(op, name, v, C, x.dtype, x.device, "x")
    if norm.kind == "instance":
        _check_instances(op, vectors, own, x)
    if norm.kind == "group":
        if norm.groups < 1 or C % norm.groups:
            raise ValueError(f"{op}: num_groups must divide the {C} channels of x, got {norm.groups}")
        if x.numel() and x.numel() == N * norm.groups:
            raise ValueError(f"{op}: expected more than 1 value per group, got input size {tuple(x.shape)}")
    check_activation(op, x, residual, slope, act)


def check_activation(op: str, x: Tensor, residual: Tensor | None, slope: Tensor | None, act: Activation) -> None:
    """Of what comes after the norm."""
    if residual is not None:
        if not isinstance(residual, Tensor):
            raise TypeError(f"{op}: residual must be a tensor or None, got {type(residual).__name__}")
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            raise ValueError(
                f"{op}: residual must be like x, {tuple(x.shape)} of {x.dtype} on {x.device}, got "
                f"{tuple(residual.shape)} of {residual.dtype} on {residual.device}"
            )
    if (slope is None) == (act.name == "prelu"):
        raise ValueError(
            f"{op}: slope must be given for activation 'prelu' and for no other, got activation {act.name!r}"
        )
    if slope is not None:
        _check_slope(op, slope, x)


def _check_instances(op: str, vectors: dict[str, Tensor | None], own: bool, x: Tensor) -> None:
    if (vectors["running_mean"] is None) != (vectors["running_var"] is None):
        raise ValueError(f"{op}: running_mean and running_var must be given together, got one of them")
    if not own and vectors["running_mean"] is None:
        raise ValueError(f"{op}: running_mean and running_var are needed when training is False, got None")
    if x.dim() < 3:
        raise ValueError(f"{op}: instance norm takes x of shape (N, C, *spatial), got {tuple(x.shape)}")
    if own and x.numel() and x.numel() == x.shape[0] * x.shape[1]:
        raise ValueError(
            f"{op}: expected more than 1 spatial element where statistics are those of x, got input size "
            f"{tuple(x.shape)}"
        )


def _check_slope(op: str, slope: Tensor, x: Tensor) -> None:
    if not isinstance(slope, Tensor):
        raise TypeError(f"{op}: slope must be a tensor, got {type(slope).__name__}")
    if slope.numel() == 1 and slope.dim() == 1:
        # one slope for all channels
        check_channel_vector(op, "slope", slope, 1, x.dtype, x.device, "x")
    else:
        check_channel_vector(op, "slope", slope, x.shape[1], x.dtype, x.device, "x")
