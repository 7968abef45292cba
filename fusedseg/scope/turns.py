"""The order in which the inputs of a recipe are rebuilt."""

from collections.abc import Sequence
from typing import Any

from .plain import Place


def turns(inputs: Sequence[tuple[Any, Place]], overwrites: bool) -> tuple[Sequence[int], int]:
    """``turns_of`` the inputs of a recipe."""
    if len(inputs) > 1:
        # A comprehension would be one more call for each recipe.
        needs = []
        for source, _ in inputs:
            needs.append(source.needs)
        return turns_of(needs, overwrites)
    first = inputs[0][0].needs if inputs else 0
    return (0,), (first if first > 1 or (first and overwrites) else 1 + (first > 0))


def turns_of(needs: Sequence[int], overwrites: bool) -> tuple[Sequence[int], int]:
    """The order in which to rebuild the inputs of a recipe, and the most tensors that live at once then.

    ``needs`` has the tensors that live at once while each input is rebuilt; 0 for data.  The input that needs most is
    the first, because inputs that are rebuilt before another one lie beside it.

    Source: Sethi and Ullman, "The Generation of Optimal Code for Arithmetic Expressions", 1970.
    """
    count = len(needs) - needs.count(0)
    # The sort keeps the order of equal inputs.
    order = sorted(range(len(needs)), key=needs.__getitem__, reverse=True)
    most = count + (not (overwrites and count))
    before = 0
    for i in order:
        most = max(most, needs[i] + before)
        before += needs[i] > 0
    return order, most
