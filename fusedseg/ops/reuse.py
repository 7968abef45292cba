"""Writing a gradient over the output that was kept: one full tensor less at the peak of a backward pass.  Opt-in.

It happens only where nothing else can see the output's memory: no tensor shares it but the one that was kept.  What a
module, a hook, another op's saved tensors or the caller still hold is left alone.  A second backward over what was
overwritten (``retain_graph=True``) raises, as after any change of a saved tensor.

What cannot be seen is an address: memory that was handed to another library by ``data_ptr()`` alone.
"""

import functools

import torch
from torch import Tensor

from .double_backward import batched

_enabled = False


def get() -> bool:
    return _enabled


def set(value: bool) -> None:
    global _enabled
    if not isinstance(value, bool):
        raise TypeError(f"fusedseg.reuse_output must be True or False, got {value!r}")
    _enabled = value


def _holders(t: Tensor) -> int:
    return torch._C._storage_Use_Count(t.untyped_storage()._cdata)


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


@functools.cache
def _holders_of_what_only_autograd_keeps() -> int:
    """Counted, as it is a matter of the version of torch."""
    found: list[int] = []
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        _Probe.apply(x * 1, found).sum().backward()
    return found[0]


def wanted() -> bool:
    """Asked in forward: whether backward may try.  With saved-tensor hooks what is unpacked is theirs."""
    if not _enabled or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return False
    return _holders_of_what_only_autograd_keeps() > 0


def take(z: Tensor, dz: Tensor) -> Tensor | None:
    """Asked in backward: the memory of ``z``, an unpacked output, to write over.

    None where somebody else sees it, and where its gradient ``dz`` is a batch of gradients, each of which needs ``z``.
    """
    if batched((dz,)):
        return None
    if _holders(z) > _holders_of_what_only_autograd_keeps():
        return None
    # whoever unpacks it again is told that it has changed
    torch.autograd.graph.increment_version(z)
    return z.detach()
