"""The average pool of volumes that keeps channels_last: PyTorch's copies its input to contiguous.

It pools the planes of each slice, and then the slices, by PyTorch's 2D pool, which keeps the format.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import is_rows

Size = int | list[int] | tuple[int, ...]


def avg_pool3d(
    input: Tensor,  # noqa: A002
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """``F.avg_pool3d``, which keeps the format of windows without padding."""
    kernel = (kernel_size,) * 3 if isinstance(kernel_size, int) else tuple(kernel_size)
    steps = kernel if not stride else (stride,) * 3 if isinstance(stride, int) else tuple(stride)
    simple = padding in (0, (0, 0, 0), [0, 0, 0]) and not ceil_mode and divisor_override is None
    # PyTorch takes a tuple of one number too.
    if not simple or not len(kernel) == len(steps) == 3 or input.dim() != 5 or not is_rows(input):
        return F.avg_pool3d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    if kernel != steps or torch.compiler.is_compiling():
        return _pooled(input, kernel, steps)
    return _Pool.apply(input, kernel)


def _pooled(x: Tensor, kernel: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    N, _, D = x.shape[:3]
    planes = F.avg_pool2d(x.transpose(1, 2).flatten(0, 1), kernel[1:], steps[1:]).unflatten(0, (N, D))
    slices = planes.movedim(2, -1)
    pooled = F.avg_pool2d(slices.flatten(2).unsqueeze(1), (kernel[0], 1), (steps[0], 1))
    return pooled.squeeze(1).unflatten(2, slices.shape[2:]).movedim(-1, 1)


class _Pool(torch.autograd.Function):
    """Windows that lie side by side.  Backward needs the size of the input alone; PyTorch's pools keep the input."""

    @staticmethod
    def forward(ctx, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
        ctx.kernel, ctx.size = kernel, x.shape[2:]
        return _pooled(x, kernel, kernel)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (N, C, d, h, w), (kd, kh, kw) = grad.shape, ctx.kernel
        each = (grad / (kd * kh * kw)).movedim(1, -1).reshape(N, d, 1, h, 1, w, 1, C)
        dx = each.expand(N, d, kd, h, kh, w, kw, C).reshape(N, d * kd, h * kh, w * kw, C).movedim(-1, 1)
        beside = [have - size for have, size in zip(ctx.size, dx.shape[2:], strict=True)]
        return (F.pad(dx, (0, beside[2], 0, beside[1], 0, beside[0])) if any(beside) else dx), None
