"""Functions that make tensors for the tests of several kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    """A copy whose channels are adjacent in memory, for any number of dimensions."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


class Cut(torch.autograd.Function):
    """Passes values on and stops gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def placed(x: Tensor, offset: int | None = None) -> Tensor:
    """A copy with the strides of x that begins ``offset`` elements after a multiple of 16 bytes.

    ``offset=None`` takes the distance of x from a multiple of 16 bytes.
    """
    if offset is None:
        offset = x.data_ptr() % 16 // x.element_size()
    memory = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return torch.as_strided(memory, x.shape, x.stride(), offset).copy_(x)


def empty(shape: Sequence[int], dtype: torch.dtype, rows: bool) -> Tensor:
    """Memory that nothing has touched yet: the system never commits the pages that the kernels do not touch."""
    if not rows:
        return torch.empty(*shape, dtype=dtype)
    return torch.empty(shape[0], *shape[2:], shape[1], dtype=dtype).movedim(-1, 1)


def slots_of(channels: Sequence[int], C: int, device: torch.device) -> tuple[Tensor, int]:
    """The arguments of launchers for kept channels: the slot of each channel, and the number of kept channels."""
    slots = torch.full((C,), -1, dtype=torch.int32, device=device)
    slots[channels] = torch.arange(len(channels), dtype=torch.int32, device=device)
    return slots, len(channels)
