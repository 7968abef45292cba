"""Which tensors the recompute scope can tell apart by their memory, and the places of tensors in memory."""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch

_KINDS = (torch.nn.Parameter, torch.nn.Buffer)
_is_wrapped = _torch.is_functorch_wrapped_tensor


def plain(t: Tensor) -> bool:
    """Whether the memory of ``t`` holds exactly its values, and its version counts every change of them.

    Subclasses, tensors inside ``torch.func`` transforms, nested tensors and inference tensors are not plain.
    """
    kind = type(t)
    if kind is not Tensor and kind not in _KINDS and kind.__module__ != "torch._subclasses.fake_tensor":
        return False
    strided = t.layout == torch.strided and not (t.is_nested or t.is_inference() or _is_wrapped(t))
    return strided and not (t.is_conj() or t.is_neg() or t.is_quantized)


def is_trained_leaf(t: Tensor) -> bool:
    """Whether ``t`` is a parameter, or an input whose gradient is wanted."""
    try:
        return t.requires_grad and t.is_leaf
    except RuntimeError:
        # Autograd cannot tell this for a view that was made without grad mode and whose base was changed afterwards.
        return False


class Place(NamedTuple):
    """The place of a tensor in its storage: size, stride, offset and dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> "Place":
        # PyTorch's types allow a symbolic offset.
        return cls(t.size(), t.stride(), t.storage_offset(), t.dtype)  # type: ignore[arg-type]

    def layout(self) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
        """Everything except the offset."""
        return self.size, self.stride, self.dtype

    @property
    def nbytes(self) -> int:
        return self.size.numel() * self.dtype.itemsize

    def end(self) -> int:
        return self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True)) + 1

    def _dense(self) -> bool:
        """Whether the tensor shows every element between its first and its last one exactly once."""
        expected = 1
        for step, n in sorted(zip(self.stride, self.size, strict=True)):
            if n != 1:
                if step != expected:
                    return False
                expected *= n
        return True

    def holds(self, other: "Place") -> bool:
        """Whether a tensor at this place has all elements of a tensor at ``other``."""
        if self == other:
            return True
        if self.dtype != other.dtype or 0 in self.size or 0 in other.size:
            return False
        return self.offset <= other.offset and other.end() <= self.end() and self._dense()


NOWHERE = Place(torch.Size(), (), 0, torch.float32)


def seen_as(t: Tensor, have: Place, want: Place) -> Tensor:
    """The tensor at ``want``, as a view of ``t``; ``t`` has the values of the tensor at ``have``."""
    if have == want:
        return t
    if t.stride() != have.stride:
        # Hooks around the scope may return the tensor with other strides.
        t = torch.empty_strided(have.size, have.stride, dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided(want.size, want.stride, t.storage_offset() + want.offset - have.offset)
