"""Recipes of several calls: two calls of which the second overwrites the result of the first, and concatenations.

A large concatenation is rebuilt part by part, so that only one source lies beside the result at a time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from .calls import Function, Replay
from .plain import Place

# A smaller concatenation is rebuilt in one call, which takes less time.
LEAST_BYTES = 2**20


class Chain:
    """Calls ``first`` with the first ``count`` tensors, and then ``then`` with the result and the other tensors.

    at: the place of the result of ``first`` in forward, whose strides ``then`` gets.
    """

    __slots__ = ("at", "count", "first", "then")

    def __init__(self, first: Callable[..., Tensor], count: int, at: Place, then: Callable[..., Tensor]) -> None:
        self.first, self.count, self.at, self.then = first, count, at, then

    def __call__(self, *tensors: Tensor) -> Tensor:
        count, at = self.count, self.at
        x = self.first(*tensors[:count])
        if x.stride() != at.stride:
            x = torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=x.device).copy_(x)
        return self.then(x, *tensors[count:])


class Joined(Replay):
    """A call of ``torch.cat`` along the dimension ``dim``."""

    __slots__ = ("dim",)

    def __init__(self, func: Function, args: Any, kwargs: dict[str, Any], dim: int) -> None:
        super().__init__(func, args, kwargs)
        self.dim = dim

    def in_parts(self, at: Place, device: torch.device, load: Callable[[int], Tensor]) -> Tensor:
        """The result, with the bits of the call.  ``load(i)`` makes source i, which is freed before the next is made.

        The first source is made before the memory of the result is allocated.
        """
        source: Tensor | None = load(0)
        with torch.no_grad(), _torch.DisableTorchFunction():
            out = torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=device)
            start = i = 0
            while start < at.size[self.dim]:
                source = load(i) if source is None else source
                i += 1
                # torch.cat leaves out empty tensors of one dimension.
                if source.dim() == out.dim():
                    out.narrow(self.dim, start, source.shape[self.dim]).copy_(source)
                    start += source.shape[self.dim]
                source = None
        return out


def in_parts(rebuild: Any, at: Place) -> bool:
    """Whether the result of a recipe with this place is rebuilt part by part."""
    return type(rebuild) is Joined and at.size.numel() * at.dtype.itemsize >= LEAST_BYTES


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


def joined(again: Replay, args: Any, kwargs: dict[str, Any]) -> Joined:
    """``again``, a call of ``torch.cat`` with these arguments, as a ``Joined``."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    return Joined(again.func, again.args, again.kwargs, dim)
