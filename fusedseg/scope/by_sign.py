"""ReLU and LeakyReLU of a tensor that a scope with ``bits`` would rebuild from rounded values, such as a sum.

The sign of a rounded sum is not certain.  So one bit a value is kept, which is exact, and the activation is linear:

    what its backward reads    1 where the argument is above 0, otherwise 0 or -1
    its output                 where(above, x, slope x), with the rebuilt x: right on average
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.low_bit.signs import pack_signs, parts_with_signs
from ..ops.low_bit.spec import is_dense
from ..ops.observer import MAX_STEPS
from . import recipes
from .packed import PackingRegistry, Reading
from .plain import Place, plain
from .saved import OFF, Handle, Recipe

Function = Callable[..., Any]
RELU = (F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
IN_PLACE = (torch.relu_, Tensor.relu_)
FUNCTIONS: tuple[Function, ...] = (*RELU, F.leaky_relu)


def wanted(registry: PackingRegistry, func: Function, x: Tensor) -> bool:
    """Whether the signs of ``x`` are kept, because ``x`` would be rebuilt from rounded values.

    At the end of a long chain of recipes the output is kept by itself, which needs no signs.
    """
    if func not in FUNCTIONS or registry.spares or not x.requires_grad or not is_dense(x.shape, x.stride()):
        return False
    steps = registry.rounded_steps(x)
    return steps is not None and 0 < steps < MAX_STEPS


def run(registry: PackingRegistry, func: Function, args: Any, kwargs: Any) -> Any:
    """The rule of these functions, for an argument ``x`` that is ``wanted``."""
    names = ("input", "inplace") if func in RELU else ("input", "negative_slope", "inplace")
    named = dict(zip(names, args, strict=False)) | kwargs
    x, slope = named["input"], 0.0 if func in RELU else named.get("negative_slope", 0.01)
    in_place = func in IN_PLACE or bool(named.get("inplace"))
    with _torch.DisableTorchFunction():
        at, signs = Place.of(x), pack_signs(x.detach())
        kept = registry.keep(signs)
        source = kept, Place.of(signs)
        rebuild = partial(_side, at=at, below=0.0 if func in RELU else -1.0)
        side = Recipe(at, x.device, rebuild, None, OFF, [source])

    def saved(t: Tensor) -> Handle | None:
        # Either function saves one tensor: its argument or its result.
        return Handle(side, at) if plain(t) and Place.of(t).layout() == at.layout() else None

    again, overwrite = partial(_apart, slope=slope), partial(_over, slope=slope)

    def call(*args: Any, **kwargs: Any) -> Any:
        with recipes.claimed(registry, saved):
            return func(*args, **kwargs)

    # What the output is rebuilt from may be rounded.
    with registry.allowing(Reading(0, registry.rounding.bits)):
        if in_place:
            return recipes.overwritten(registry, call, args, kwargs, (x, signs), again, overwrite)
        out = call(*args, **kwargs)
        with _torch.DisableTorchFunction():
            registry.offer(out, again, (x, signs), overwrite)
        return out


def _side(signs: Tensor, at: Place, below: float) -> Tensor:
    side = torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=signs.device)
    for part, above in parts_with_signs(side, signs):
        part.copy_(above)
        if below:
            part.mul_(1.0 - below).add_(below)
    return side


def _over(x: Tensor, signs: Tensor, slope: float) -> Tensor:
    for part, above in parts_with_signs(x, signs):
        if slope:
            torch.where(above, part, part * slope, out=part)
        else:
            part.masked_fill_(above.logical_not_(), 0.0)
    return x


def _apart(x: Tensor, signs: Tensor, slope: float) -> Tensor:
    return _over(x.clone(), signs, slope)
