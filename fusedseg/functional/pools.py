"""The functional form of max-pooling."""

from collections.abc import Sequence

from torch import Tensor

from ..ops.check import check_tensor
from ..ops.max_pool import pool as _max_pool


def max_pool(
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Max-pooling in two or three dimensions that keeps one byte per output element.

    Equals ``max_pool2d`` or ``max_pool3d`` of ``torch.nn.functional`` with the same arguments, including ties, NaN and
    windows that lie partly outside ``x``.

    Args:
        x: (N, C, H, W), (C, H, W) or (N, C, D, H, W), or (C, D, H, W) if ``kernel_size`` has three numbers; fp16, bf16,
            fp32 or fp64.
        kernel_size, stride, padding, dilation, ceil_mode: as in ``torch.nn.functional.max_pool2d``.

    Returns:
        z, (N, C, *out) or (C, *out), in the dtype and memory format (contiguous or channels_last) of ``x``.

    It can be differentiated twice.  ``MaxPool2d`` says what is kept for backward and which errors are raised.
    """
    check_tensor(_max_pool.OP, x)
    dims = 3 if x.dim() == 5 or (isinstance(kernel_size, Sequence) and len(kernel_size) == 3) else 2
    pool = _max_pool.parse_pool(_max_pool.OP, dims, kernel_size, stride, padding, dilation, ceil_mode)
    return _max_pool.pooled(_max_pool.OP, x, pool)
