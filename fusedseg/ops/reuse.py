"""Tells backward which large tensors nobody else sees: it writes over them, or frees them before it ends.

``alone`` finds gradients, and saved tensors that were rebuilt or unpacked for this call.  It needs no permission,
because nobody can tell the difference.

``take`` finds kept outputs, over which a gradient is written.  The user must switch this on.  The output is overwritten
only if no other tensor shares its memory.  A tensor that a module, a hook, the saved tensors of another op or the
caller still holds is never overwritten.  A second backward over an overwritten output (``retain_graph=True``) raises an
error, as after any change of a saved tensor.

One case cannot be detected: another library that was given only the address of the memory, by ``data_ptr()``.
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

_enabled = False


def get() -> bool:
    return _enabled


def set(value: bool) -> None:
    global _enabled
    if not isinstance(value, bool):
        raise TypeError(f"fusedseg.reuse_output must be True or False, got {value!r}")
    if value:
        _torch.check_reuse()
    _enabled = value


def _holders(t: Tensor) -> int:
    return _torch.storage_use_count(t.untyped_storage()._cdata)


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found):
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.found = found
        return x

    @staticmethod
    def backward(ctx, dx):
        (x,) = ctx.saved_tensors
        ctx.found.append(_holders(x))
        return dx, None


class _InputProbe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found):
        ctx.save_for_backward(released(x))
        ctx.found = found
        return x.sum()

    @staticmethod
    def backward(ctx, dx):
        (x,) = ctx.saved_tensors
        ctx.found.append(_holders(x))
        return dx.expand(x.shape), None


@functools.cache
def _holders_of_what_only_autograd_keeps(probe: type[torch.autograd.Function] = _Probe) -> int:
    """The number of holders of a storage that only autograd keeps, measured because it depends on torch's version."""
    found: list[int] = []
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        probe.apply(x * 1, found).sum().backward()
    return found[0]


def released(x: Tensor) -> Tensor:
    """The tensor to save for ``x``, an input, if backward may write over it.

    Autograd saves an input itself, which the caller may hold too.  The detached tensor is another holder of the memory,
    so that backward can count them.
    """
    return x.detach()


def wanted() -> bool:
    """Whether backward may try to reuse an output; forward asks this.

    Under saved-tensor hooks it may not, because the hooks own the tensors that they unpack.
    """
    if not _enabled or _torch.top_saved_tensors_default_hooks(True) is not None:
        return False
    return _holders_of_what_only_autograd_keeps() > 0


def take_input(x: Tensor, dz: Tensor) -> Tensor | None:
    """``take`` for an input that was saved as ``released``."""
    return take(x, dz, _InputProbe)


def take(z: Tensor, dz: Tensor, probe: type[torch.autograd.Function] = _Probe) -> Tensor | None:
    """The memory of an unpacked output ``z``, to write over; backward asks for it.

    The result is None if another tensor shares this memory.  It is also None if ``dz`` is a batch of gradients, because
    each gradient of the batch needs ``z``.
    """
    if is_batch(dz):
        return None
    if _holders(z) > _holders_of_what_only_autograd_keeps(probe):
        return None
    # The version tells autograd that the tensor has changed, so that it cannot be unpacked again.
    torch.autograd.graph.increment_version(z)
    return z.detach()


def _counts(tensors: list[Tensor], i: int) -> tuple[int, int, int]:
    """The numbers of references to ``tensors[i]`` from Python, of references from C++, and of holders of its memory."""
    t: Any = tensors[i]
    return sys.getrefcount(t), t._use_count(), _holders(t)


class _AloneProbe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found):
        ctx.save_for_backward(x)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        saved = list(ctx.saved_tensors)
        ctx.found.append(_counts(saved, 0))
        ctx.found.append(_counts([dx], 0))
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


def alone(tensors: list[Tensor], i: int, gradient: bool = False) -> bool:
    """Whether ``tensors[i]``, in backward, is large and seen by nobody but the caller.

    The caller may then free it, or write over it.

    Args:
        tensors: the only references of the caller, made by ``list(ctx.saved_tensors)``; or, for a gradient, a list of
            the argument of backward.
        gradient: whether the tensor is the argument of backward.
    """
    t = tensors[i]
    if t.nbytes < LEAST_BYTES or not (type(t) is Tensor or type(t) is FakeTensor) or torch.is_grad_enabled():
        return False
    if not _torch.counts_holders:
        return False
    del t
    with _torch.DisableTorchFunction():
        if any(isinstance(t, Tensor) and is_batch(t) for t in tensors):
            return False
        if not tensors[i].untyped_storage().resizable():
            return False
        most = _counts_if_alone()[gradient]
        return all(count <= limit for count, limit in zip(_counts(tensors, i), most, strict=True))
