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


def with_strides(t: torch.Tensor, how: str) -> torch.Tensor:
    """The values of ``t`` in memory with other strides."""
    if how == "permuted":
        last = t.dim() - 1
        return t.transpose(0, last).contiguous().transpose(0, last)
    hole = torch.nan if t.is_floating_point() else 1
    if how == "sliced":
        big = t.new_full([2 * n + 1 for n in t.shape], hole)
        view = big[tuple(slice(1, None, 2) for _ in t.shape)]
    elif how == "padded":
        # Inductor rounds the strides of rows up.
        big = t.new_full((*t.shape[:-1], t.shape[-1] + 3), hole)
        view = big[..., : t.shape[-1]]
    else:
        return t[:1].expand(t.shape) if t.dim() == 1 else t[:, :1].expand(t.shape)
    return view.copy_(t)


WAYS = ("permuted", "sliced", "padded", "expanded")
