"""The rules of a scope with ``bits``: how each known function may read and save rounded values.

    linear     saves tensors that enter the gradient linearly: rounded values are right on average
    bending    has a derivative that jumps at 0: the sign of what it saves must be exact
    smooth     has a derivative that varies: rounding biases the gradient, so at least 8 bits are kept for it
    curved     both: at least 8 bits, and the sign must be exact
    exact      all others, such as functions whose derivative jumps away from 0: what they save is not rounded

A norm is linear, but what reads its output decides how its input is packed: with the kink of the norm for an
activation, and in 8 bits for a smooth one.  So its input is packed just before the next call of a known function, when
the network has usually let go of it.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.avg_pool import avg_pool3d
from ..ops.low_bit.kink import kink_of, of_channels
from ..ops.low_bit.spec import SMOOTH_BITS
from . import by_sign
from .offers import Linked, Offer
from .packed import UNKNOWN, PackingRegistry, Reading
from .plain import plain
from .saved import EXACT
from .stock import CONVOLUTIONS, RULES, Function
from .stock_norm import ARGUMENTS, by_statistics, statistics_of

LINEAR, BENDING, SMOOTH, CURVED, AS_IT_IS = "linear", "bending", "smooth", "curved", "exact"
NORMS = (F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm)
_ROW = {
    BENDING: (
        F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.leaky_relu, F.prelu, torch.prelu, Tensor.prelu,
    ),
    LINEAR: (
        *CONVOLUTIONS, *NORMS, F.max_pool2d, torch.max_pool2d, F.max_pool3d, torch.max_pool3d, F.dropout, F.dropout1d,
        F.dropout2d, F.dropout3d, torch.cat, torch.concat, torch.stack, F.interpolate, F.pad, F.pixel_shuffle,
        F.pixel_unshuffle, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, avg_pool3d, F.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, torch.flatten, torch.reshape, torch.clone, Tensor.flatten,
        Tensor.reshape, Tensor.clone, Tensor.contiguous, Tensor.to, Tensor.float, Tensor.half,
        Tensor.bfloat16, Tensor.double,
        *(getattr(home, name) for home in (torch, Tensor) for name in ("add", "sub", "mul")),
        *(getattr(Tensor, name) for name in ("add_", "sub_", "mul_")),
    ),
    SMOOTH: (
        F.silu, F.mish, F.gelu, F.celu, F.softplus, F.sigmoid, F.tanh,
        *(getattr(home, name) for home in (torch, Tensor) for name in ("sigmoid", "tanh", "sigmoid_", "tanh_", "div")),
        Tensor.div_,
    ),
    CURVED: (F.elu, F.selu),
}  # fmt: skip
KINDS: dict[Function, str] = dict.fromkeys(RULES, AS_IT_IS) | {func: kind for kind, of in _ROW.items() for func in of}
# The derivative of softplus jumps from sigmoid(threshold) to 1.
LEAST_THRESHOLD = 20


def _first(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor | None:
    x = args[0] if args else kwargs.get("input")
    return x if isinstance(x, Tensor) else None


def _settle(registry: PackingRegistry, kind: str, x: Tensor | None) -> bool:
    """Packs what is pending before a call of a function that reads ``x``.

    Returns whether the function reads the output of a norm whose input is packed with the kink now.
    """
    pending, registry.pending = registry.pending, []
    exact = False
    for data in pending:
        reads = x is not None and plain(x) and data.output is not None and data.output() is x.untyped_storage()
        kink = data.kink_of_norm() if reads and kind != LINEAR and data.kink_of_norm is not None else None
        exact |= kink is not None
        data.settle(max(data.bits, SMOOTH_BITS) if reads and kind in (SMOOTH, CURVED) else data.bits, kink)
    return exact


def _threshold(input: Tensor, beta: float = 1, threshold: float = 20) -> float:  # noqa: A002
    return threshold


def _reading(registry: PackingRegistry, func: Function, kind: str, args: tuple, kwargs: Any) -> Reading | None:
    """What the call may read and how it may save; None if the signs of its argument are kept (``by_sign.py``)."""
    x = _first(args, kwargs)
    exact = _settle(registry, kind, x) if registry.pending else False
    bits = registry.rounding.bits
    if kind == AS_IT_IS or (func is F.softplus and _threshold(*args, **kwargs) < LEAST_THRESHOLD):
        return UNKNOWN
    if kind == SMOOTH or (kind == CURVED and exact):
        return Reading(SMOOTH_BITS, SMOOTH_BITS)
    if kind == CURVED:
        return Reading(EXACT, SMOOTH_BITS, sides=True)
    if kind == BENDING and not exact and x is not None and registry.rounded_steps(x) is not None:
        if by_sign.wanted(registry, func, x):
            return None
        return Reading(EXACT, bits, sides=True)
    spared = None
    if func in CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        spared = weight if isinstance(weight, Tensor) and plain(weight) else None
    return Reading(0, bits, defers=func in NORMS, spared=spared)


def _rule(
    registry: PackingRegistry,
    func: Function,
    args: tuple[object, ...],
    kwargs: object,
    *,
    stock: Callable[..., Any],
    kind: str,
) -> Any:
    with _torch.DisableTorchFunction():
        reading = _reading(registry, func, kind, args, kwargs)
    if reading is None:
        return by_sign.run(registry, func, args, kwargs)
    with registry.allowing(reading):
        out = stock(registry, func, args, kwargs)
    if kind in (SMOOTH, CURVED, AS_IT_IS):
        with _torch.DisableTorchFunction():
            _withdraw_rounded(registry, out)
    if registry.pending and func in ARGUMENTS:
        with _torch.DisableTorchFunction():
            after_norm(registry, out, partial(_kink_of_stock, registry.collected, func, args, kwargs))
    return out


def _withdraw_rounded(registry: PackingRegistry, out: Tensor) -> None:
    """Drops the recipe of a function that is not linear, if its argument has fewer than 8 bits.

    A function that overwrites its argument saves a copy of it, and its recipe reads the argument's own recipe.
    """
    known = registry.known(out) if isinstance(out, Tensor) else None
    if isinstance(known, Offer) and _bits_of(known) < SMOOTH_BITS:
        registry.withdraw(out, known)


def _bits_of(source: Any) -> int:
    """The fewest bits among what a recipe reads now.  Norms are packed later than their recipe is offered."""
    if isinstance(source, Offer):
        return min((_bits_of(of) for of, _ in source.inputs), default=EXACT)
    found = source._source() if isinstance(source, Linked) else source
    return EXACT if found is None else found.bits


def after_norm(registry: PackingRegistry, out: Tensor, kink: Callable[[], Tensor | None]) -> None:
    """Notes what a norm has returned, for the tensors that it has saved."""
    for data in registry.pending:
        data.output, data.kink_of_norm = weakref.ref(out.untyped_storage()), kink


def _kink_of_stock(collected: list[Tensor], func: Function, args: tuple[object, ...], kwargs: Any) -> Tensor | None:
    """The kink of ``F.batch_norm`` or ``F.instance_norm``; None if its statistics are not at hand."""
    x, mean, var, weight, bias, own, _, eps = ARGUMENTS[func](*args, **kwargs)
    if own:
        found = statistics_of(collected, x.shape[1] * (x.shape[0] if func is F.instance_norm else 1))
    else:
        # Instance norm saves a view with a channel for each channel of each sample.
        samples = x.shape[0] if func is F.instance_norm else 1
        found = mean.repeat(samples), (var + eps).rsqrt().repeat(samples)
    return None if found is None else kink_of(*found, weight, bias, x.shape)


def _group_norm(registry: PackingRegistry, func: Function, args: tuple[object, ...], kwargs: Any) -> Any:
    """The rule of ``F.group_norm``: it is rebuilt from its statistics.

    Those of rounded values would move its kink, and many rounded values lie next to the kink.
    """
    out = func(*args, **kwargs)
    named = dict(zip(("input", "num_groups", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = named["input"], named.get("weight"), named.get("bias")
    node = out.grad_fn
    if node is None or node.name() != "NativeGroupNormBackward0":
        return out
    mean, rstd = (of_channels(v, x.shape) for v in (node._saved_result1, node._saved_result2))
    registry.offer(out, by_statistics(x, weight, bias, mean, rstd, instance=True), [x])
    after_norm(registry, out, partial(kink_of, mean, rstd, weight, bias, x.shape))
    return out


PACKING_RULES: dict[Function, Any] = {
    func: partial(_rule, stock=stock, kind=KINDS[func]) for func, stock in (RULES | {F.group_norm: _group_norm}).items()
}
