"""The average pool of volumes that keeps channels_last: PyTorch's copies its input to contiguous.

It pools the planes of each slice, and then the slices, by PyTorch's 2D pool, which keeps the format.  Only graphs of
the backend call these two ops, for windows that lie side by side (``is_simple``).  They take the arguments of aten's
ops, and read only the size of the window.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .registry import graph_op


def is_simple(kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil: bool, divisor: Any) -> bool:
    """Whether the windows of a pool of aten lie side by side, without padding, and are divided by their size."""
    sizes, steps, beside = tuple(kernel), tuple(stride), tuple(padding)
    # The tracer keeps one number that stands for three.
    simple = len(sizes) == 3 and steps in ((), sizes) and not any(beside)
    return simple and not ceil and divisor is None


def forward(x: Tensor, kernel_size: Sequence[int], *window: Any) -> Tensor:
    """The pool of a volume in channels_last."""
    N, _, D = x.shape[:3]
    planes = F.avg_pool2d(x.transpose(1, 2).flatten(0, 1), tuple(kernel_size[1:])).unflatten(0, (N, D))
    slices = planes.movedim(2, -1)
    pooled = F.avg_pool2d(slices.flatten(2).unsqueeze(1), (kernel_size[0], 1))
    return _laid_out(pooled.squeeze(1).unflatten(2, slices.shape[2:]).movedim(-1, 1))


def backward(dy: Tensor, x: Tensor, kernel_size: Sequence[int], *window: Any) -> Tensor:
    """The gradient of the input ``x``; only the size of ``x`` is read."""
    (N, C, d, h, w), (kd, kh, kw) = dy.shape, kernel_size
    each = (dy / (kd * kh * kw)).movedim(1, -1).reshape(N, d, 1, h, 1, w, 1, C)
    dx = each.expand(N, d, kd, h, kh, w, kw, C).reshape(N, d * kd, h * kh, w * kw, C).movedim(-1, 1)
    beside = [have - size for have, size in zip(x.shape[2:], dx.shape[2:], strict=True)]
    if any(beside):
        dx = F.pad(dx, (0, beside[2], 0, beside[1], 0, beside[0]))
    return _laid_out(dx)


def _laid_out(y: Tensor) -> Tensor:
    """A result that is no view, in channels_last."""
    y = y.contiguous(memory_format=torch.channels_last_3d)
    return y.data if y._is_view() else y


_WINDOW = (
    "int[] kernel_size, int[] stride, int[] padding, bool ceil_mode, bool count_include_pad, int? divisor_override"
)


def _fake(x, kernel_size, *window):
    shape = *x.shape[:2], *(n // k for n, k in zip(x.shape[2:], kernel_size, strict=True))
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)


def _fake_backward(dy, x, *window):
    return torch.empty(x.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last_3d)


avg_pool3d_op = graph_op(
    f"avg_pool3d(Tensor x, {_WINDOW}) -> Tensor", forward, _fake, row={"reads": "first", "layout": "keeps"}
)
avg_pool3d_backward_op = graph_op(
    f"avg_pool3d_backward(Tensor dy, Tensor x, {_WINDOW}) -> Tensor",
    backward,
    _fake_backward,
    row={"reads": "first", "cheap": False, "layout": "keeps"},
)
