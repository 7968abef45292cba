"""Saved tensors of ops that read the codes of a packed tensor, and do not need the tensor itself.

The hook that autograd calls for a saved tensor must return a tensor, so it returns a meta tensor inside ``with_codes``.
"""

import torch
from torch import Tensor

from .. import _torch
from ..ops.norm.coded import found_codes
from .packed import PackedData
from .saved import Handle, latest


class CodesHandle(Handle):
    """A saved tensor whose op reads its codes.  No unpacked tensor is held for it, since it is not in the orders."""

    __slots__ = ("data",)

    def __init__(self, data: PackedData) -> None:
        self.recipe = self.data = data
        self.at, self.order = data.at, latest()

    def load(self) -> Tensor:
        found = found_codes()
        if found is None:
            return super().load()
        with _torch.DisableTorchFunction():
            found.append(self.data.packed())
            size, stride, _, dtype = self.at
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
