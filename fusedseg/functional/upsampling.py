"""The functional form of linear upsampling."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from ..ops.check import check_dtype, check_tensor
from ..ops.upsample import MODES, eager

OP = "fusedseg.upsample"
Number = TypeVar("Number", int, float)


def _per_axis(name: str, given: Number | Sequence[Number], dims: int) -> list[Number]:
    values = list(given) if isinstance(given, Sequence) else [given] * dims
    if len(values) != dims or min(values) <= 0:
        raise ValueError(f"{OP}: {name} must be positive, one number or {dims}, got {given!r}")
    return values


def upsample(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    *,
    align_corners: bool = False,
) -> Tensor:
    """Linear, bilinear or trilinear interpolation, whose gradient is deterministic on a GPU.

    Equals ``torch.nn.functional.interpolate(x, size, scale_factor, mode, align_corners)`` up to rounding.  The mode is
    "linear", "bilinear" or "trilinear" for one, two or three spatial dimensions.  Half precision is summed in fp32.

    Args:
        x: (N, C, *spatial), with one to three spatial dimensions; fp16, bf16, fp32 or fp64.
        size, scale_factor: the spatial size of the result, or the factor by which the size grows.  One of them must be
            given.  A single number stands for all dimensions.
        align_corners: as in ``torch.nn.functional.interpolate``.

    Returns:
        (N, C, *size), in the dtype and memory format (contiguous or channels_last) of ``x``.

    Only sizes are kept for backward.  It can be differentiated twice.  PyTorch's kernels run where Triton's do not
    serve ``x`` (on a CPU, for example), and where more than 64 results read a value along one axis.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: ``x`` has another number of dimensions; not exactly one of ``size`` and ``scale_factor`` is given,
            or it has the wrong length or is not positive.
    """
    check_tensor(OP, x)
    check_dtype(OP, "x", x.dtype)
    dims = x.dim() - 2
    if dims not in MODES:
        raise ValueError(
            f"{OP}: x must have shape (N, C, *spatial) with 1 to 3 spatial dimensions, got {tuple(x.shape)}"
        )
    if (size is None) == (scale_factor is None):
        raise ValueError(f"{OP}: one of size and scale_factor must be given, got {size!r} and {scale_factor!r}")
    mode = MODES[dims]
    if size is not None:
        return eager(x, _per_axis("size", size, dims), None, mode, align_corners)
    assert scale_factor is not None
    factors = [float(factor) for factor in _per_axis("scale_factor", scale_factor, dims)]
    return eager(x, None, factors, mode, align_corners)
