"""Weights in the dtype of autocast: what is kept for backward is the parameter, which is there anyway, not its copy."""

from typing import Any

import torch
from torch import Tensor

VERSION = "fusedseg.version"


def _node(t: Tensor, parameter: Tensor | None = None) -> Any:
    """Of the graph, that has cast a parameter, or the one that is given, to make ``t``."""
    node = t.grad_fn
    if node is None or t._version or node.name() != "ToCopyBackward0":
        return None
    found = getattr(node.next_functions[0][0], "variable", None)
    return None if found is None or (parameter is not None and found is not parameter) else node


def cast(w: Tensor, dtype: torch.dtype) -> Tensor:
    """``w.to(dtype)``, of which ``uncast`` knows what it was."""
    t = w.to(dtype)
    if not torch.compiler.is_compiling():
        is_cast(t, w)
    return t


def is_cast(t: Tensor, parameter: Tensor, first_node: int = 0) -> bool:
    """Whether ``parameter.to(t.dtype)`` gives the values of ``t``.

    Autocast keeps what it casts for later calls, so ``t`` may be older than the values of the parameter.  This is known
    for a cast that was seen here before, and for one whose node in the graph has the number ``first_node`` or a higher
    one, which is to say that the cast was made just now.  Any other cast is not vouched for.
    """
    node = _node(t, parameter)
    if node is None or (VERSION not in node.metadata and node._sequence_nr() < first_node):
        return False
    return node.metadata.setdefault(VERSION, parameter._version) == parameter._version


def uncast(w: Tensor) -> Tensor:
    """What to keep of ``w``, which ``.to(w.dtype)`` gives again: the parameter that ``cast`` has made it of."""
    node = _node(w)
    if node is None or VERSION not in node.metadata:
        return w
    parameter = node.next_functions[0][0].variable
    return parameter if node.metadata[VERSION] == parameter._version else w
