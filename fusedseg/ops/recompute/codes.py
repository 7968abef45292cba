"""Saved tensors of ops that read the codes of a packed tensor, and do not need the tensor itself.

The hook that autograd calls for a saved tensor must return a tensor, so it returns a meta tensor inside ``with_codes``.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ..low_bit.spec import Packed
from .packed import PackedData
from .saved import Handle, latest


class _Thread(threading.local):
    """The codes that ``with_codes`` has found so far in this thread; None outside of it."""

    found: list[Packed] | None = None


_thread = _Thread()


class CodesHandle(Handle):
    """A saved tensor whose op reads its codes.  No unpacked tensor is held for it, since it is not in the orders."""

    __slots__ = ("data",)

    def __init__(self, data: PackedData) -> None:
        self.recipe = self.data = data
        self.at, self.order = data.at, latest()

    def load(self) -> Tensor:
        if _thread.found is None:
            return super().load()
        with _torch.DisableTorchFunction():
            _thread.found.append(self.data.packed())
            size, stride, _, dtype = self.at
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def with_codes(ctx: Any) -> tuple[list[Tensor], Packed | None]:
    """The saved tensors of a node, and the codes of the one that has a ``CodesHandle``, which is a meta tensor.

    Without such a handle there are no codes.
    """
    found: list[Packed] = []
    _thread.found = found
    try:
        tensors = list(ctx.saved_tensors)
    finally:
        _thread.found = None
    return tensors, found[0] if found else None
