"""The geometry of a convolution: its arguments, their checks, and the shape and memory format of the result."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..check import check_device, check_dtype, check_positive, check_transforms
from ..layout import FORMATS, suggests_channels_last


class Geometry(NamedTuple):
    """Stride, padding and dilation for each spatial dimension, and groups.  Zeros pad both sides equally."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def output_shape(self, x: torch.Size, w: torch.Size) -> torch.Size:
        size = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(x[2:], w[2:], self.stride, self.padding, self.dilation, strict=True)
        ]
        return torch.Size([x[0], w[0], *size])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What aten's convolution takes behind the tensors, and its gradient behind the sizes of the bias too."""
        return self.stride, self.padding, self.dilation, False, (0,) * len(self.stride), self.groups


class RawGeometry(NamedTuple):
    """The arguments of a convolution as a stock function or module takes them.

    Unless ``mode`` is "zeros", the input is padded by ``torch.nn.functional.pad`` with this mode and the widths
    ``pads``.
    """

    kernel: Sequence[int]
    stride: int | Sequence[int] = 1
    padding: int | str | Sequence[int] = 0
    dilation: int | Sequence[int] = 1
    groups: int = 1
    mode: str = "zeros"
    pads: Sequence[int] = ()


def per_dimension(op: str, name: str, value: int | Sequence[int], dims: int, least: int) -> tuple[int, ...]:
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) != dims or not all(isinstance(v, int) and v >= least for v in values):
        raise ValueError(f"{op}: {name} must be an integer >= {least}, or {dims} of them, got {value!r}")
    return values


def parse_geometry(op: str, raw: RawGeometry) -> tuple[Geometry, list[int]]:
    """The geometry, and the widths for ``torch.nn.functional.pad`` of zeros that must be added before.

    The second result is empty unless "same" needs different padding on the two sides.
    """
    kernel, padding, groups, dims = raw.kernel, raw.padding, raw.groups, len(raw.kernel)
    stride = per_dimension(op, "stride", raw.stride, dims, 1)
    dilation = per_dimension(op, "dilation", raw.dilation, dims, 1)
    check_positive(op, "groups", groups)
    uneven: list[int] = []
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"{op}: padding must be integers, 'same' or 'valid', got {padding!r}")
        total = (0,) * dims
        if padding == "same":
            if set(stride) != {1}:
                raise ValueError(f"{op}: padding='same' needs a stride of 1, got {stride}")
            total = tuple(d * (k - 1) for d, k in zip(dilation, kernel, strict=True))
        if any(t % 2 for t in total):
            uneven = [zeros for t in reversed(total) for zeros in (0, t % 2)]
        padding = tuple(t // 2 for t in total)
    return Geometry(stride, per_dimension(op, "padding", padding, dims, 0), dilation, groups), uneven


def check_convolution(
    op: str,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    w: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
) -> torch.Size:
    """The shape of the result.

    Raises ValueError or TypeError if the convolution does not fit a tensor of this shape, dtype and device.
    """
    check_transforms(op)
    dims = w.dim() - 2
    if len(shape) != w.dim():
        raise ValueError(f"{op}: x must have shape (N, C) with {dims} spatial dimensions after it, got {tuple(shape)}")
    check_dtype(op, "x", dtype)
    groups = geometry.groups
    if w.shape[0] % groups:
        raise ValueError(f"{op}: groups={groups} must divide the output channels, got {w.shape[0]}")
    if shape[1] != w.shape[1] * groups:
        raise ValueError(
            f"{op}: x must have {w.shape[1] * groups} channels for a weight of shape {tuple(w.shape)} and "
            f"groups={groups}, got {shape[1]} in {tuple(shape)}"
        )
    for name, t in (("conv_weight", w), ("conv_bias", bias)):
        if t is not None and t.dtype != dtype:
            raise TypeError(f"{op}: {name} must be {dtype}, the dtype of x, got {t.dtype}")
        if t is not None:
            check_device(op, name, t, device, "x")
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"{op}: conv_bias must have shape ({w.shape[0]},), got {tuple(bias.shape)}")
    result = geometry.output_shape(shape, w.shape)
    if min(result[2:]) < 1:
        raise ValueError(
            f"{op}: the kernel, {tuple(w.shape[2:])} with dilation {geometry.dilation}, does not fit in x "
            f"{tuple(shape)} with padding {geometry.padding}"
        )
    return result


def output_format(x: Tensor, w: Tensor) -> torch.memory_format:
    """The memory format of the result: channels_last if x or w is, as in aten's convolutions; otherwise contiguous."""
    return FORMATS[x.dim()] if suggests_channels_last(x) or suggests_channels_last(w) else torch.contiguous_format
