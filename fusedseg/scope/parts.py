"""Recipes of concatenations.

A large concatenation is rebuilt part by part, so that only one source lies beside the result at a time.  A part is a
source, or a slab of samples of a source that was enlarged by ``interpolate``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.conv.slabs import slabs
from .calls import Function, Replay
from .plain import Place
from .saved import InParts, Recipe


class Joined(Replay, InParts):
    """A call of ``torch.cat`` along the dimension ``dim``."""

    __slots__ = ("dim",)

    def __init__(self, func: Function, args: object, kwargs: dict[str, Any], dim: int) -> None:
        super().__init__(func, args, kwargs)
        self.dim = dim

    def in_parts(self, recipe: Recipe, order: int) -> Tensor:
        """The result of ``recipe``, with the bits of the call.  Each part is freed before the next is made.

        The first part is made before the memory of the result is allocated.
        """
        at, start, out = recipe.at, 0, None
        for i, (_, place) in enumerate(recipe.inputs):
            # torch.cat leaves out empty tensors of one dimension.
            if len(place.size) != len(at.size):
                continue
            for n, part in _parts_of(recipe, i, order):
                with torch.no_grad(), _torch.DisableTorchFunction():
                    if out is None:
                        out = torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=recipe.device)
                    out.narrow(self.dim, start, place.size[self.dim])[n].copy_(part)
                # The next part needs the memory.
                del part
            start += place.size[self.dim]
        assert out is not None
        return out


def _parts_of(recipe: Recipe, i: int, order: int) -> Iterator[tuple[Any, Tensor]]:
    """The parts of an input, with their places in it.  The values of a sample depend on no other sample."""
    source, place = recipe.inputs[i]
    ranges = slabs(place.size[0], place.nbytes)
    if len(ranges) > 1 and isinstance(source, Recipe) and _enlarges(source, place, order):
        small = source._input(0, order)[0]
        with torch.no_grad(), _torch.DisableTorchFunction():
            for n in ranges:
                yield n, source.rebuild(small[n])
    else:
        yield ..., recipe._input(i, order)[0]


def _enlarges(source: Recipe, place: Place, order: int) -> bool:
    """Whether a source is the whole result of ``interpolate``, and nobody else will ask for it soon."""
    if len(source.inputs) != 1 or source.at != place:
        return False
    if type(source.rebuild) is not Replay or source.rebuild.func is not F.interpolate:
        return False
    casts = source.autocast.enabled or _torch.is_any_autocast_enabled()
    return not casts and source.held is None and not source.near(order)


def joined(again: Replay, args: tuple[object, ...], kwargs: dict[str, Any]) -> Joined:
    """``again``, a call of ``torch.cat`` with these arguments, as a ``Joined``."""
    dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
    return Joined(again.func, again.args, again.kwargs, dim)
