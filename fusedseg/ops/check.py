"""Checks of arguments.  Errors name the op, the argument, the expected value and the given value."""

import torch
from torch import Tensor

from .. import _backend, _torch
from .._torch import FakeTensor, forward_ad

HALF = (torch.float16, torch.bfloat16)
ACTIVATION_DTYPES = (*HALF, torch.float32, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an op computes with tensors of a dtype: float64 for float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_values(t: Tensor) -> bool:
    """Whether a tensor has values; fake tensors and those of the device "meta" have none."""
    return not isinstance(t, FakeTensor) and not t.is_meta


def is_computed(t: Tensor, family: str) -> bool:
    """Whether there is something to compute, or a launch to list.  Of symbolic sizes nothing is asked."""
    return (has_values(t) or _backend.lists_launches(t, family)) and t.numel() > 0


def autocast_dtype(*tensors: Tensor) -> torch.dtype | None:
    """The dtype to which autocast casts the tensors of a convolution, on the device of the first one; None if not."""
    kind = tensors[0].device.type
    # Meta tensors have no autocast, and a question about it raises an error.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    casts = all(t.is_floating_point() and t.dtype != torch.float64 for t in tensors)
    return torch.get_autocast_dtype(kind) if casts else None


def check_choice(op: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{op}: {name} must be one of {', '.join(choices)}, got {value!r}")


def check_positive(op: str, name: str, value: object) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{op}: {name} must be an integer >= 1, got {value!r}")


def check_tensor(op: str, x: object, name: str = "x") -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {dtype}")


def check_device(op: str, name: str, t: Tensor, device: torch.device, of: str) -> None:
    if t.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, the device of {of}, got {t.device}")


def check_transforms(op: str) -> None:
    """Raises RuntimeError inside a transform of ``torch.func``, which cannot follow overwritten or rebuilt tensors."""
    if _torch.are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use the unfused modules there"
        )


def check_tangents(op: str, *tensors: Tensor) -> None:
    """Raises RuntimeError for a dual tensor of forward-mode differentiation, whose tangent would be lost."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use the unfused modules there")


def check_input(op: str, x: Tensor) -> None:
    """Raises an error unless ``x`` is an activation tensor (N, C, *spatial)."""
    check_transforms(op)
    check_tensor(op, x)
    check_tangents(op, x)
    check_dtype(op, "x", x.dtype)
    if x.layout is not torch.strided and not torch.compiler.is_compiling():
        raise TypeError(f"{op}: x must be dense, with layout torch.strided, got {x.layout}; pass x.to_dense()")
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have shape (N, C) or (N, C, *spatial), got {tuple(x.shape)}")


def check_channel_vector(
    op: str, name: str, v: Tensor | None, C: int, dtype: torch.dtype, device: torch.device, of: str
) -> None:
    """Raises an error unless ``v`` is None, or has one value for each of C channels of a tensor.

    Errors call this tensor ``of``.  ``v`` must have its dtype; fp32 is accepted too if the tensor is in half precision.
    """
    if v is None:
        return
    if not isinstance(v, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or None, got {type(v).__name__}")
    # Fast check, which nearly every vector passes.
    if v.shape == (C,) and v.dtype == dtype and v.device == device:
        return
    if v.dim() != 1 or v.shape[0] != C:
        raise ValueError(f"{op}: {name} must have shape ({C},), one value per channel of {of}, got {tuple(v.shape)}")
    if v.dtype != dtype and not (v.dtype == torch.float32 and dtype in HALF):
        or_fp32 = " or torch.float32" if dtype in HALF else ""
        raise TypeError(f"{op}: {name} must be {dtype}{or_fp32} for {of} of {dtype}, got {v.dtype}")
    check_device(op, name, v, device, of)
