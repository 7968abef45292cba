"""Casts weights to the dtype of autocast, and keeps the parameter itself for backward instead of the cast copy."""

from typing import Any

import torch
from torch import Tensor

VERSION = "fusedseg.version"


def _node(t: Tensor, parameter: Tensor | None = None) -> Any:
    """The node of the graph that has cast a parameter to ``t``; None if ``t`` is not a cast of a parameter.

    If ``parameter`` is given, the node must have cast this parameter.
    """
    node = t.grad_fn
    if node is None or t._version or node.name() != "ToCopyBackward0":
        return None
    found = getattr(node.next_functions[0][0], "variable", None)
    return None if found is None or (parameter is not None and found is not parameter) else node


def cast(w: Tensor, dtype: torch.dtype) -> Tensor:
    """``w.to(dtype)``, marked so that ``uncast`` finds ``w``."""
    t = w.to(dtype)
    if not torch.compiler.is_compiling():
        is_cast(t, w)
    return t


def is_cast(t: Tensor, parameter: Tensor, first_node: int = 0) -> bool:
    """Whether ``parameter.to(t.dtype)`` gives the values of ``t``.

    Autocast keeps its casts for later calls, so ``t`` may be older than the values of the parameter.  The answer is
    certain for a cast that was seen here before, and for a cast that was made just now: its node in the graph has the
    number ``first_node`` or a higher one.  For any other cast the result is False.
    """
    node = _node(t, parameter)
    if node is None or (VERSION not in node.metadata and node._sequence_nr() < first_node):
        return False
    return node.metadata.setdefault(VERSION, parameter._version) == parameter._version


def uncast(w: Tensor) -> Tensor:
    """The tensor to keep instead of ``w``: the parameter from which ``cast`` made it, or ``w`` itself.

    ``.to(w.dtype)`` of the result gives the values of ``w`` again.
    """
    node = _node(w)
    if node is None or VERSION not in node.metadata:
        return w
    parameter = node.next_functions[0][0].variable
    return parameter if node.metadata[VERSION] == parameter._version else w
