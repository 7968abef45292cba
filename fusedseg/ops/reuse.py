"""Writes a gradient over the kept output, which saves one full tensor at the peak of a backward pass.

The user must switch this on.  The output is overwritten only if no other tensor shares its memory.  A tensor that a
module, a hook, the saved tensors of another op or the caller still holds is never overwritten.  A second backward over
an overwritten output (``retain_graph=True``) raises an error, as after any change of a saved tensor.

One case cannot be detected: another library that was given only the address of the memory, by ``data_ptr()``.
"""

import functools

import torch
from torch import Tensor

from .. import _torch
from .double_backward import batched

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
    if batched((dz,)):
        return None
    if _holders(z) > _holders_of_what_only_autograd_keeps(probe):
        return None
    # The version tells autograd that the tensor has changed, so that it cannot be unpacked again.
    torch.autograd.graph.increment_version(z)
    return z.detach()
