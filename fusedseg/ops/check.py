"""Checks of arguments, with the errors users see: op, argument, what was expected, what came."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

HALF = (torch.float16, torch.bfloat16)
ACTIVATION_DTYPES = (*HALF, torch.float32, torch.float64)


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in ACTIVATION_DTYPES:
        raise TypeError(f"{op}: {name} must be float16, bfloat16, float32 or float64, got {dtype}")


def check_transforms(op: str) -> None:
    """No transform of ``torch.func`` is active: it would see neither what is overwritten nor what is rebuilt."""
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"{op}: torch.func transforms (grad, vmap, jvp, ...) are not supported; use the unfused modules there"
        )


def check_tangents(op: str, *tensors: Tensor) -> None:
    """None of them is a dual tensor of forward-mode differentiation: its tangent would be lost."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(f"{op}: forward-mode differentiation is not supported; use the unfused modules there")


def check_input(op: str, x: Tensor) -> None:
    """``x`` is an activation tensor (N, C, *spatial)."""
    check_transforms(op)
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: x must be a tensor, got {type(x).__name__}")
    check_tangents(op, x)
    check_dtype(op, "x", x.dtype)
    if x.dim() < 2:
        raise ValueError(f"{op}: x must have shape (N, C) or (N, C, *spatial), got {tuple(x.shape)}")


def _is_channel_vector(v: Tensor, C: int, dtype: torch.dtype, device: torch.device) -> bool:
    """In short; which of it is not so, errors say."""
    if not isinstance(v, Tensor) or v.shape != (C,) or v.device != device:
        return False
    return v.dtype == dtype or (v.dtype == torch.float32 and dtype in HALF)


def check_channel_vector(
    op: str, name: str, v: Tensor | None, C: int, dtype: torch.dtype, device: torch.device, of: str
) -> None:
    """``v`` is None, or one value for each of C channels of what ``of`` names, in its dtype, or in fp32 beside half
    precision."""
    if v is None or _is_channel_vector(v, C, dtype, device):
        return
    if not isinstance(v, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor or None, got {type(v).__name__}")
    if v.dim() != 1 or v.shape[0] != C:
        raise ValueError(f"{op}: {name} must have shape ({C},), one value per channel of {of}, got {tuple(v.shape)}")
    if v.dtype != dtype and not (v.dtype == torch.float32 and dtype in HALF):
        or_fp32 = " or torch.float32" if dtype in HALF else ""
        raise TypeError(f"{op}: {name} must be {dtype}{or_fp32} for {of} of {dtype}, got {v.dtype}")
    if v.device != device:
        raise ValueError(f"{op}: {name} must be on {device}, the device of {of}, got {v.device}")


def check_parameters(
    op: str,
    vectors: dict[str, Tensor | None],
    C: int,
    dtype: torch.dtype,
    device: torch.device,
    of: str = "x",
) -> None:
    """``vectors`` are weight, bias, running_mean and running_var, for C channels of what ``of`` names."""
    for name, v in vectors.items():
        check_channel_vector(op, name, v, C, dtype, device, of)
    if (vectors["running_mean"] is None) != (vectors["running_var"] is None):
        raise ValueError(f"{op}: running_mean and running_var must be given together, got one of them")


def check_batch_norm(
    op: str,
    vectors: dict[str, Tensor | None],
    training: bool,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    of: str = "x",
    groups: int | None = None,
) -> None:
    """``vectors`` are weight, bias, running_mean and running_var; the rest is that of the tensor to be normalised,
    which errors call ``of``."""
    check_parameters(op, vectors, shape[1], dtype, device, of)
    if not training and vectors["running_mean"] is None:
        raise ValueError(f"{op}: running_mean and running_var are needed when training is False, got None")
    if groups is not None:
        check_groups(op, training, shape, groups)
        return
    # statistics of a batch need two values; an empty batch passes, as in ``nn.BatchNorm``
    if training and shape[1] and shape.numel() == shape[1]:
        raise ValueError(f"{op}: expected more than 1 value per channel when training, got input size {tuple(shape)}")


def check_groups(op: str, training: bool, shape: torch.Size, groups: int) -> None:
    """``groups`` of channels of a sample, of more than one value in all, as in ``nn.GroupNorm``."""
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1 or shape[1] % groups:
        raise ValueError(f"{op}: num_groups must divide the number of channels, {shape[1]}, got {groups!r}")
    if training and shape.numel() == groups:
        raise ValueError(f"{op}: expected more than 1 value per group when training, got input size {tuple(shape)}")


def check_spatial(op: str, shape: torch.Size) -> None:
    """Statistics of a channel of a sample need two values, as in ``nn.InstanceNorm3d``."""
    if shape[2:].numel() == 1:
        raise ValueError(f"{op}: expected more than 1 spatial element when training, got input size {tuple(shape)}")


def check_residual(op: str, residual: Tensor, x: Tensor) -> None:
    """``residual`` can be added to ``x``, and is not overwritten with it."""
    if not isinstance(residual, Tensor):
        raise TypeError(f"{op}: residual must be a tensor or None, got {type(residual).__name__}")
    if residual.shape != x.shape:
        raise ValueError(f"{op}: residual must have the shape of x, {tuple(x.shape)}, got {tuple(residual.shape)}")
    if residual.device != x.device:
        raise ValueError(f"{op}: residual must be on {x.device}, the device of x, got {residual.device}")
    if residual.dtype != x.dtype:
        check_dtype(op, "residual", residual.dtype)
        if not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{op}: residual must be {x.dtype}, the dtype of x (autocast casts it), got {residual.dtype}"
            )
    if torch.compiler.is_compiling() or not x.numel():
        return
    if residual.untyped_storage()._cdata == x.untyped_storage()._cdata:
        raise ValueError(f"{op}: residual shares memory with x, which is overwritten; pass residual.clone()")


def check_writable(op: str, x: Tensor) -> None:
    """``x`` may be overwritten without losing a gradient."""
    if not x.is_contiguous() and torch._debug_has_internal_overlap(x) == 1:
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
    meta = torch._C._autograd
    if x._is_view() and meta._get_creation_meta(x) != meta.CreationMeta.DEFAULT:
        raise ValueError(
            f"{op}: x is one of several views made by one call (chunk, split, unbind, ...) or was made under "
            "no_grad, and autograd cannot follow a write into it; pass x.clone()"
        )
