"""Which tensors the recompute scope can tell apart by their memory, and the places of tensors in memory."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch

_KINDS = (torch.nn.Parameter, torch.nn.Buffer)
# For each set of dispatch keys that was met so far: whether tensors with this set are plain.
_plain_keys: dict[int, bool] = {}
_is_wrapped = _torch.is_functorch_wrapped_tensor
_dispatch_keys = _torch.dispatch_keys


def plain(t: Tensor) -> bool:
    """Whether the memory of ``t`` holds exactly its values, and its version counts every change of them.

    Subclasses, tensors inside ``torch.func`` transforms, nested tensors and inference tensors are not plain.
    """
    kind = type(t)
    if kind is not Tensor and kind not in _KINDS and kind.__module__ != "torch._subclasses.fake_tensor":
        return False
    # The dispatch keys of a tensor determine the answer, and one look at them takes less time than seven questions.
    keys = _dispatch_keys(t).raw_repr()
    known = _plain_keys.get(keys)
    if known is None:
        strided = t.layout == torch.strided and not (t.is_nested or t.is_inference() or _is_wrapped(t))
        known = _plain_keys[keys] = strided and not (t.is_conj() or t.is_neg() or t.is_quantized)
    return known


def unwrapped(t: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func`` transforms."""
    while _is_wrapped(t):
        t = _torch.get_unwrapped(t)
    return t


def is_trained_leaf(t: Tensor) -> bool:
    """Whether ``t`` is a parameter, or an input whose gradient is wanted."""
    try:
        return t.requires_grad and t.is_leaf
    except RuntimeError:
        # Autograd cannot tell this for a view that was made without grad mode and whose base was changed afterwards.
        return False


_tuple: Any = tuple.__new__
# The places that were met so far.  A network has few, and each new one would be three objects that Python's garbage
# collector visits until backward.
_places: dict[Any, "Place"] = {}
MOST_PLACES = 2**12


class Place(NamedTuple):
    """The place of a tensor in its storage: size, stride, offset and dtype."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, t: Tensor) -> "Place":
        key = t.size(), t.stride(), t.storage_offset(), t.dtype
        try:
            found = _places.get(key)
        except TypeError:
            # Symbolic sizes have no hash.
            return _tuple(cls, key)
        if found is None:
            if len(_places) >= MOST_PLACES:
                _places.clear()
            found = _places[key] = _tuple(cls, key)
        return found

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
        if self is other or self == other:
            return True
        if self.dtype != other.dtype or 0 in self.size or 0 in other.size:
            return False
        return self.offset <= other.offset and other.end() <= self.end() and self._dense()


NOWHERE = Place(torch.Size(), (), 0, torch.float32)


def seen_as(t: Tensor, have: Place, want: Place) -> Tensor:
    """The tensor at ``want``, as a view of ``t``; ``t`` has the values of the tensor at ``have``."""
    if have is want or have == want:
        return t
    if t.stride() != have.stride:
        # Hooks around the scope may return the tensor with other strides.
        t = torch.empty_strided(have.size, have.stride, dtype=t.dtype, device=t.device).copy_(t)
    return t.as_strided(want.size, want.stride, t.storage_offset() + want.offset - have.offset)
