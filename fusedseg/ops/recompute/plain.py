"""Which tensors the recompute scope can tell apart by their memory."""

import torch
from torch import Tensor

_KINDS = (torch.nn.Parameter, torch.nn.Buffer)
# which sets of dispatch keys plain tensors have, found as they are met
_plain_keys: dict[int, bool] = {}
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def plain(t: Tensor) -> bool:
    """Whether the values of ``t`` are exactly what lies in its memory, and its version counts every change of them.

    Subclasses, tensors inside ``torch.func`` transforms, nested tensors and inference tensors are not plain.
    """
    kind = type(t)
    if kind is not Tensor and kind not in _KINDS and kind.__module__ != "torch._subclasses.fake_tensor":
        return False
    # The dispatch keys of a tensor tell all of this, and one look at them takes less time than seven questions.
    keys = torch._C._dispatch_keys(t).raw_repr()
    known = _plain_keys.get(keys)
    if known is None:
        strided = t.layout == torch.strided and not (t.is_nested or t.is_inference() or _is_wrapped(t))
        known = _plain_keys[keys] = strided and not (t.is_conj() or t.is_neg() or t.is_quantized)
    return known


def unwrapped(t: Tensor) -> Tensor:
    """The tensor inside the wrappers of ``torch.func`` transforms."""
    while _is_wrapped(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def is_trained_leaf(t: Tensor) -> bool:
    """Whether ``t`` is a parameter, or an input whose gradient is wanted."""
    try:
        return t.is_leaf and t.requires_grad
    except RuntimeError:
        # Autograd does not say it of a view that was made without grad mode and whose base was changed since.
        return False
