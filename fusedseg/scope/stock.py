"""The rules by which PyTorch's own functions offer recipes inside the scope.

This table shows what aten saves for backward, and what is saved inside the scope:

    function                                 aten saves            the scope saves
    batch, instance, group and layer norm    the input             the input; the output is rebuilt from it
    relu, leaky_relu_, elu_, relu6_, ...     the result            a recipe, also for the form that overwrites its input
    leaky_relu, elu, gelu, prelu, ...        the input             the input, or a recipe if it has one
    silu_, mish_, hardswish_                 a copy of the input   a recipe
    sigmoid, tanh                            the result            a recipe
    cat, interpolate, pad, add               nothing               nothing; readers of the output save a recipe
    mul, div                                 both inputs           the inputs or their recipes; the output has a recipe
    convolutions under autocast              the cast weight       the parameter
    dropout                                  a mask of floats      a mask of one byte per element; it is drawn once
    max_pool                                 input, int64 indices  one byte per element (``ops/max_pool``), and no input

A tensor of a quarter of its input or less, such as a pool's output, is kept if the input would have to be rebuilt
first.  All other functions run as they are; ``watch.py`` tells the registry about those that write in place.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.avg_pool import avg_pool3d
from ..ops.cast import is_cast
from ..ops.max_pool import op as max_pool
from ..rules import FLAG, ROWS
from . import recipes
from .calls import Args, Kwargs, replay
from .joins import note_cat, note_interpolated, noted
from .offers import Held, Input, Offer
from .parts import joined
from .plain import Place, plain
from .registry import Registry
from .saved import OFF, Autocast, Data, Handle, Recipe
from .stock_conv import convolution

Function = Callable[..., Any]


def _offer(
    registry: Registry, out: Any, rebuild: Function, tensors: Sequence[Tensor], overwrite: Function | None = None
) -> None:
    if isinstance(out, Tensor) and tensors:
        registry.offer(out, rebuild, tensors, overwrite)


def _call(
    registry: Registry, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor], rebuild: Function,
    overwrite: Function | None,
) -> Any:  # fmt: skip
    """Calls a function that writes to none of its arguments, and offers the recipe ``rebuild``."""
    if func not in SAVE_RESULT:
        out = func(*args, **kwargs)
        _offer(registry, out, rebuild, tensors, overwrite)
        return out

    def offered(t: Tensor) -> None:
        # Such a function saves one tensor, the one that it is about to return.
        _offer(registry, t, rebuild, tensors, overwrite)

    with recipes.claimed(registry, offered):
        return func(*args, **kwargs)


def _pure(registry: Registry, func: Function, args: Args, kwargs: Kwargs, inplace: Function | None = None) -> Any:
    """The rule of functions that write to none of their arguments.

    ``inplace`` is the function that writes the same result over its first argument, if there is one.
    """
    again, tensors = replay(func, args, kwargs)
    overwrite = None if inplace is None else again.by(inplace)
    return _call(registry, func, args, kwargs, tensors, again, overwrite)


def _overwriting(registry: Registry, func: Function, args: Args, kwargs: Kwargs, pure: Function) -> Any:
    """The rule of functions that overwrite their first argument; ``pure`` computes the same into new memory."""
    x = args[0] if args else kwargs["input"]
    if not x.is_floating_point():
        # The argument is no activation.
        registry.before_change(x)
        return func(*args, **kwargs)
    again, tensors = replay(func, args, kwargs)
    return recipes.overwritten(registry, func, args, kwargs, tensors, Rounded(again.by(pure)), again)


class Rounded:
    """A call whose result has the dtype of its first argument, although another argument may have more precision."""

    __slots__ = ("call",)

    def __init__(self, call: Function) -> None:
        self.call = call

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.call(x, *others).to(x.dtype)


def _flagged(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of functions of ``torch.nn.functional`` that have the option ``inplace``."""
    again, tensors = replay(func, args, kwargs)
    apart, overwrite = again.by(func, inplace=False), again.by(func, inplace=True)
    if not kwargs.get("inplace"):
        return _call(registry, func, args, kwargs, tensors, apart, overwrite)
    return recipes.overwritten(registry, func, args, kwargs, tensors, apart, overwrite)


def _cat(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of ``torch.cat``, whose result is rebuilt part by part."""
    again, tensors = replay(func, args, kwargs)
    return _call(registry, func, args, kwargs, tensors, joined(again, args, kwargs), None)


def _max_pool(registry: Registry, func: Function, args: Args, kwargs: Kwargs, dims: int) -> Any:
    """The rule of max-pooling: the package's own pool, which keeps a byte per element, runs if its result is equal."""
    named = dict(kwargs)
    x, *others = args or [named.pop("input")]
    if not isinstance(x, Tensor) or not x.requires_grad or not plain(x):
        return func(*args, **kwargs)
    found = max_pool.of_stock(dims, x, others, named)
    return _pure(registry, func, args, kwargs) if found is None else max_pool.max_pool(*found)


def _offer_cast(registry: Registry, t: Tensor, parameter: Tensor) -> Handle | None:
    """What to save for ``t``, which is ``parameter`` in another dtype, because the parameter is kept anyway."""
    if not plain(t) or registry.is_exposed(parameter):
        return None
    memory, at, whole = registry._memory(t.untyped_storage()), Place.of(t), parameter.detach()
    offer = memory.offer_of(at, t._version)
    if offer is None:
        links: list[tuple[Input, Place]] = [(Held(whole, 0), Place.of(whole))]
        offer = Offer(at, t._version, t.device, functools.partial(Tensor.to, dtype=t.dtype), None, OFF, links)
        memory.offers = (offer, *memory.offers)
    recipe = offer.source(registry)
    return None if recipe is None else Handle(recipe, at)


def _convolution(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of convolutions, which save their weight.

    Under autocast the call casts the weight, or finds a cast of an earlier call in autocast's cache.
    """
    if not _torch.is_any_autocast_enabled():
        return convolution(registry, func, args, kwargs)
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, Tensor) or not Autocast.of(weight).enabled:
        return func(*args, **kwargs)
    if not (weight.is_leaf and weight.requires_grad and plain(weight)):
        return func(*args, **kwargs)
    first_node = _torch.get_sequence_nr()

    def copy_of_weight(t: Tensor) -> Handle | None:
        return _offer_cast(registry, t, weight) if is_cast(t, weight, first_node) else None

    with recipes.claimed(registry, copy_of_weight):
        return func(*args, **kwargs)


def _prelu(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of prelu.

    Under autocast the recipe gets the slopes that the call has used, which may be older than the parameter (see
    ``is_cast``).
    """
    again, tensors = replay(func, args, kwargs)
    slopes = tensors[1]
    if not Autocast.of(slopes).enabled:
        return _call(registry, func, args, kwargs, tensors, again, None)

    def used(t: Tensor) -> None:
        if t.numel() == slopes.numel() and t.dtype != slopes.dtype:
            tensors[1] = t.detach().flatten()

    with recipes.claimed(registry, used):
        out = func(*args, **kwargs)
    if tensors[1] is not slopes or not slopes.requires_grad:
        _offer(registry, out, again, tensors)
    return out


# For each norm, the name and the default of the argument that says whether the statistics of the input are used.
NORMS: dict[Function, tuple[str, bool]] = {
    F.batch_norm: ("training", False),
    F.instance_norm: ("use_input_stats", True),
}


def _norm(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of batch and instance norm.  Rebuilding an output moves no running statistics."""
    flag, default = NORMS[func]
    names = ("input", "running_mean", "running_var", "weight", "bias", flag, "momentum", "eps")
    given: dict[str, Any] = dict.fromkeys(names) | {flag: default, "momentum": 0.1, "eps": 1e-5}
    given |= dict(zip(names, args, strict=False)) | kwargs
    x, mean, var, weight, bias, own, *numbers = (given[name] for name in names)

    def laid_anew(t: Tensor) -> Handle | None:
        """Keeps ``x`` in place of ``t``, the contiguous copy of ``x`` that instance norm saves."""
        if t.numel() != x.numel() or not (plain(t) and registry.certain(x)):
            return None
        if t.untyped_storage() is x.untyped_storage():
            return None
        size, kept = t.size(), registry.keep(x)
        source = Recipe(Place.of(t), t.device, lambda x: x.contiguous().view(size), None, OFF, [(kept, kept.at)])
        return Handle(source, source.at)

    with recipes.claimed(registry, laid_anew) if func is F.instance_norm else nullcontext():
        out = func(*args, **kwargs)
    # These are copies, because aten moves running statistics without a new version.
    mean, var = [None if own or v is None else v.detach().clone() for v in (mean, var)]
    again, tensors = replay(func, (x, mean, var, weight, bias, own, *numbers), {})
    registry.offer(out, again, tensors)
    return out


def _dropout(registry: Registry, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The rule of dropout, of elements or of channels.  The function itself draws the mask, once."""
    named = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    x, p, inplace = named["input"], named.get("p", 0.5), named.get("inplace")
    drawn: list[Data | Recipe] = []

    def noise(t: Tensor) -> Data | Handle | None:
        if drawn or not plain(t) or t.untyped_storage() is x.untyped_storage():
            return None
        if t.dtype == torch.bool or t.size() != x.size():
            # This is the mask of a fused function, or one number for each channel.  Both are small enough already.
            drawn.append(kept := registry.keep(t))
            return kept
        mask, dtype, at = t != 0, t.dtype, Place.of(t)
        source = registry.keep(mask), Place.of(mask)
        made = Recipe(at, t.device, lambda m: m.to(dtype).div_(1 - p), None, Autocast.of(t), [source])
        drawn.append(made)
        return Handle(made, at)

    if inplace:
        registry.before_change(x)
    with recipes.claimed(registry, noise):
        out = func(*args, **kwargs)
    # For a tensor without a batch, the mask has one more dimension than x, and the product would have another shape.
    if drawn and not inplace and out.size() == x.size() and len(drawn[0].at.size) == x.dim():
        masked = isinstance(drawn[0], Data) and drawn[0].at.dtype == torch.bool
        registry.offer(out, functools.partial(_masked, p=p) if masked else torch.mul, [x, drawn[0]])
    return out


def _masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    # The fused function divides in the precision that it multiplies in.
    keep = torch.tensor(1 - p, dtype=torch.promote_types(x.dtype, torch.float32))
    return torch.ops.aten.native_dropout_backward(x, mask, (1 / keep).item() if p < 1 else 0.0)


Rule = Callable[[Registry, Function, Any, Any], Any]
# The rules of functions that need more than a call of the same function (``Row.again``).
OWN: dict[str, Rule] = {
    "norm": _norm,
    "convolution": _convolution,
    "prelu": _prelu,
    "dropout": _dropout,
    "max_pool2d": functools.partial(_max_pool, dims=2),
    "max_pool3d": functools.partial(_max_pool, dims=3),
    "cat": noted(_cat, note_cat),
    "interpolate": noted(_pure, note_interpolated),
}
# The functions that save the tensor that they return.
SAVE_RESULT = {call for row in ROWS if row.saves_result for call in row.calls}
CONVOLUTIONS = tuple(call for row in ROWS if row.again == "convolution" for call in row.calls)


def _rules() -> dict[Function, Rule]:
    rules: dict[Function, Rule] = {}
    for row in ROWS:
        for call, overwriting in row.calls.items():
            if row.again and row.again != "call":
                rules[call] = OWN[row.again]
            elif row.again and overwriting == FLAG:
                rules[call] = _flagged
            elif row.again:
                rules[call] = functools.partial(_pure, inplace=overwriting) if overwriting else _pure
                if overwriting:
                    rules.setdefault(overwriting, functools.partial(_overwriting, pure=call))
    # The form of a converted model (``formats.py``).
    rules[avg_pool3d] = _pure
    return rules


RULES = _rules()
