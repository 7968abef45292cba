"""``MaxPool2d`` and ``MaxPool3d`` that keep one byte per output element."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..ops.max_pool import pool as op
from .unscriptable import Unscriptable


class _MaxPool(Unscriptable, nn.Module):
    """The base class of ``MaxPool2d`` and ``MaxPool3d``; it stands before the stock module."""

    dims: int

    def __init__(
        self,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        return_indices: bool = False,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, dilation, return_indices, ceil_mode)
        self._parsed()

    # The stock modules store and print the values as they were given.
    def _parsed(self: Any) -> op.Pool:
        name = f"fusedseg.MaxPool{self.dims}d"
        if self.return_indices:
            raise ValueError(
                f"{name}: return_indices must be False, got True; use torch.nn.MaxPool{self.dims}d for indices"
            )
        return op.parse_pool(
            name, self.dims, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        # The attributes of a stock module may be set, so every call parses them.
        return op.pooled(f"fusedseg.MaxPool{self.dims}d", input, self._parsed())


class MaxPool2d(_MaxPool, nn.MaxPool2d):
    """Max-pooling over (N, C, H, W) or (C, H, W) that keeps one byte per output element.

    Equals ``nn.MaxPool2d`` with the same arguments, including ties (the first position wins), NaN (the last NaN wins),
    ``ceil_mode`` and windows partly outside the input.  The stock module keeps its input and an int64 index per output
    element.

    Shapes: (N, C, H, W) to (N, C, OH, OW), or both without N, in fp16, bf16, fp32 or fp64.

    Args:
        kernel_size, stride, padding, dilation, ceil_mode: as in ``nn.MaxPool2d``.
        return_indices: must be False.

    Kept for backward: one uint8 per output element, which is the position of the maximum within its window; nothing if
    no gradient is needed.  The output has the memory format of the input, contiguous or channels_last; an input with
    other strides is copied once.

    Raises:
        ValueError: ``return_indices`` is True; the window has more than 256 positions, which one byte cannot tell apart
            (use ``nn.MaxPool2d``); the padding is over half of the window; the output would be empty; the input is
            empty beyond its batch; a window steps over the whole input (dilation > 1 in an input narrower than the
            window), for which the stock module returns -inf and an index outside the input.
        TypeError: the input is integer, boolean or complex.

    Source: Jain et al., "Gist: Efficient Data Encoding for Deep Neural Network Training", ISCA 2018, keeps a small
    number per window too.
    """

    dims = 2


class MaxPool3d(_MaxPool, nn.MaxPool3d):
    """Max-pooling over (N, C, D, H, W) or (C, D, H, W) that keeps one byte per output element.

    Equals ``nn.MaxPool3d`` with the same arguments.  Bytes kept for backward and errors are as in ``MaxPool2d``.
    """

    dims = 3
