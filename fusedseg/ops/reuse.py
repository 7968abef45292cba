"""Tells backward which large tensors nobody else sees: it writes over them, or frees them before it ends.

These are gradients, and saved tensors that were rebuilt or unpacked for this call.
"""

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from .. import _torch
from .._torch import FakeTensor
from .double_backward import is_batch

# The memory of a smaller tensor is not worth the question who else sees it.
LEAST_BYTES = 2**20


def _counts(tensors: list[Tensor]) -> tuple[int, int, int]:
    """The numbers of references to ``tensors[0]`` from Python, of references from C++, and of holders of its memory."""
    t: Any = tensors[0]
    return sys.getrefcount(t), t._use_count(), _torch.storage_use_count(t.untyped_storage()._cdata)


class _AloneProbe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found):
        ctx.save_for_backward(x)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        saved = list(ctx.saved_tensors)
        ctx.found.append(_counts(saved))
        ctx.found.append(_counts([dx]))
        return dx, None


@functools.cache
def _counts_if_alone() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """``_counts`` of a saved tensor that was made when backward asked for it, and of a gradient, if they are alone.

    They are measured, because they depend on the versions of Python and torch.
    """
    found: list[tuple[int, int, int]] = []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: x.shape, torch.zeros):
        x = torch.zeros(1, requires_grad=True)
        _AloneProbe.apply(x * 1, found).mul(2).sum().backward()
    return found[0], found[1]


def is_large(t: Tensor) -> bool:
    """Whether it pays to ask for the holders of a tensor.

    False in compiled code: the compiler plans the memory itself, and that of PyTorch 2.8 cannot read ``nbytes``.
    """
    return not torch.compiler.is_compiling() and t.nbytes >= LEAST_BYTES


def alone(tensors: list[Tensor], gradient: bool = False) -> bool:
    """Whether ``tensors[0]``, in backward, is large and seen by nobody but the caller.

    The caller may then free it, or write over it.

    Args:
        tensors: the only references of the caller, made by ``list(ctx.saved_tensors)``; or, for a gradient, a list of
            the argument of backward.
        gradient: whether the tensor is the argument of backward.
    """
    t = tensors[0]
    if t.nbytes < LEAST_BYTES or not (type(t) is Tensor or type(t) is FakeTensor) or torch.is_grad_enabled():
        return False
    if not _torch.counts_holders:
        return False
    del t
    with _torch.DisableTorchFunction():
        if any(isinstance(t, Tensor) and is_batch(t) for t in tensors):
            return False
        if not tensors[0].untyped_storage().resizable():
            return False
        most = _counts_if_alone()[gradient]
        return all(count <= limit for count, limit in zip(_counts(tensors), most, strict=True))
