"""Fused norms step aside where their hooks, or a forward that was replaced, would see other tensors than before.

The output of a fused norm is activated already, and a norm in place writes over the output of the convolution.  So if
a module that gets or returns one of these tensors has a hook, the norm and its activation run as the stock modules do.
The root of the model looks for hooks before each forward (``wiring.py``), and decides for the whole forward: a hook may
remove itself between a norm and its activation.
"""

from typing import Any

from torch import nn

from ..nn.stock_norm import Aside


def share(norms_and_acts: list[tuple[nn.Module, ...]]) -> dict[nn.Module, Aside]:
    """One ``Aside`` for all norms and activations that belong together: a shared activation joins its norms."""
    asides: dict[nn.Module, Aside] = {}
    for modules in norms_and_acts:
        known = {asides[module] for module in modules if module in asides}
        one = Aside()
        asides |= {module: one for module, aside in asides.items() if aside in known}
        asides |= dict.fromkeys(modules, one)
    return asides


def is_watched_now(watched: list[tuple[nn.Module, Any]]) -> bool:
    """Whether a module has hooks, or another forward of its own than at the conversion."""
    for module, forward in watched:
        own = module.__dict__
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
            or own.get("forward") != forward
        ):
            return True
    return False
