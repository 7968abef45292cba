"""Tensors that a block hands over to the next one, in a recompute scope.

A tensor that is an argument of a module lives until the module returns, because the frames of Python hold it.  Without
a scope that costs nothing, because autograd keeps the tensor anyway.  In a scope, where autograd keeps a recipe, the
peak of forward would hold the tensor for nothing.  A ``Handed`` is a list from which the called module takes the
tensors.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..ops.conv.sources import concatenated
from ..ops.observer import active


class Handed(list):
    """Tensors that nobody needs after the module that gets the list."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        super().__init__(tensors)
        self.scope = active()


def handing() -> bool:
    """Whether a recompute scope keeps what this thread computes."""
    return active() is not None


def take_off(x: object) -> None:
    """Empties ``x`` if it is a ``Handed`` and its tensors may be freed.

    They may not inside a checkpoint, which calls the module again with the same list, even if a scope lies inside that
    checkpoint.
    """
    if type(x) is Handed and x.scope is not None and active() is x.scope:
        x.clear()


def cat_of(x: Handed) -> Tensor:
    """The concatenation of the sources along the channels; ``x`` is emptied as by ``take_off``."""
    # The scope does not look into a list of another class.
    whole = concatenated(list(x))
    take_off(x)
    return whole
