"""The recipes of PyTorch's batch and instance norm.  Rebuilding an output moves no running statistics.

On a CPU the call keeps mean and 1 / sqrt(var + eps) for its backward, and the output is rebuilt from them in one pass.
The bits are the same, because aten rounds weight / sqrt(var + eps) once in both calls.  On other devices the function
runs again, with the statistics of the batch and without running statistics.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..ops.layout import FORMATS
from .calls import replay
from .plain import Place, plain
from .registry import Registry
from .saved import OFF, Data, Handle, Recipe

Function = Callable[..., Any]
# The dtype of the statistics of an input, where aten rounds nothing.
STATISTICS = {torch.float64: torch.float64}


def _of_batch_norm(
    input,  # noqa: A002
    running_mean,
    running_var,
    weight=None,
    bias=None,
    training=False,
    momentum=0.1,
    eps=1e-5,
):
    return input, running_mean, running_var, weight, bias, training, momentum, eps


def _of_instance_norm(
    input,  # noqa: A002
    running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5,
):  # fmt: skip
    return input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps


# For each function, a function with the same signature that returns the arguments in their order: x, running mean and
# variance, weight and bias, whether the statistics of x are used, momentum and eps.
ARGUMENTS: dict[Function, Callable[..., Any]] = {F.batch_norm: _of_batch_norm, F.instance_norm: _of_instance_norm}


def norm(registry: Registry, func: Function, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """The rule of ``F.batch_norm`` and ``F.instance_norm``."""
    x, mean, var, weight, bias, own, *numbers = ARGUMENTS[func](*args, **kwargs)
    instance = func is F.instance_norm
    found, source = None, x
    bare = None if instance else registry.bares(x)
    if bare is not None:
        out, saved = registry.call_bare(bare, func, args, kwargs)
        if own and x.is_cpu:
            found = _results_of(out.grad_fn)
        # The data that was just saved needs no search.
        source = saved if type(saved) is Data else x
    elif not plain(x):
        return func(*args, **kwargs)
    else:
        out, vectors = _call_collecting(registry, func, args, kwargs, x)
        if own:
            found = _statistics_of(vectors, x.shape[1] * (x.shape[0] if instance else 1))
    if found is not None and _is_certain(x, found[0], instance):
        registry.offer(out, by_statistics(x, weight, bias, *found, instance=instance), [source])
        return out
    # These are copies, because aten moves running statistics without a new version.
    mean, var = [None if own or v is None else v.detach().clone() for v in (mean, var)]
    again, tensors = replay(func, (x, mean, var, weight, bias, own, *numbers), {})
    registry.offer(out, again, tensors)
    return out


def _call_collecting(
    registry: Registry, func: Function, args: tuple[object, ...], kwargs: dict[str, object], x: Tensor
) -> tuple[Any, list[Tensor]]:
    """Calls a norm, and returns also the vectors that it saves."""
    vectors: list[Tensor] = []
    before, registry.vectors = registry.claim, vectors
    try:
        if func is F.instance_norm:
            registry.claim = functools.partial(_laid_anew, registry, x)
        return func(*args, **kwargs), vectors
    finally:
        registry.claim, registry.vectors = before, None


def _results_of(node: Any) -> tuple[Tensor, Tensor] | None:
    """Mean and 1 / sqrt(var + eps) that the node of a batch norm on a CPU has saved."""
    try:
        return node._saved_result1, node._saved_result2
    except AttributeError:
        return None


def _statistics_of(vectors: list[Tensor], count: int) -> tuple[Tensor, Tensor] | None:
    """Mean and 1 / sqrt(var + eps) among what a norm has saved, where they come last; None if they are not there."""
    found = [v for v in vectors if v.numel() == count and v.is_floating_point()]
    return (found[-2], found[-1]) if len(found) > 1 else None


def _is_certain(x: Tensor, mean: Tensor, instance: bool) -> bool:
    """Whether ``by_statistics`` gives the same bits as the norm.

    It may not on other devices than a CPU, and if ``mean`` may be something else.  With parameters in half precision,
    aten rounds the statistics; in memory with gaps or with another order of dimensions, it multiplies in another order.
    """
    if not x.is_cpu or mean.dtype != STATISTICS.get(x.dtype, torch.float32):
        return False
    if instance or x.is_contiguous():
        return mean.numel() == x.shape[1] * (x.shape[0] if instance else 1)
    return x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]) and mean.numel() == x.shape[1]


def _of_batch(scale: Tensor, bias: Tensor | None, mean: Tensor, x: Tensor) -> Tensor:
    """Rebuilds the output of a norm from its input."""
    return torch.native_batch_norm(x, scale, bias, mean, _ones_like(mean), False, 0.0, 0.0)[0]


def _of_instances(scale: Tensor, bias: Tensor | None, mean: Tensor, x: Tensor) -> Tensor:
    """Rebuilds the output of an instance norm, as the batch norm of one sample that has the channels of all samples."""
    return _of_batch(scale, bias, mean, x.contiguous().view(1, mean.numel(), *x.shape[2:])).view(x.shape)


# Vectors of ones, to which nobody writes, by their length, dtype and device.
_ones: dict[Any, Tensor] = {}
MOST_ONES = 256


def _ones_like(mean: Tensor) -> Tensor:
    if type(mean) is not Tensor:
        return torch.ones_like(mean)
    key = mean.numel(), mean.dtype, mean.device
    ones = _ones.get(key)
    if ones is None:
        ones = torch.ones_like(mean)
        # Inside a mode or a transform it may be another kind of tensor.
        if len(_ones) < MOST_ONES and type(ones) is Tensor and plain(ones):
            _ones[key] = ones
    return ones


def by_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, instance: bool
) -> Callable[[Tensor], Tensor]:
    """A function that rebuilds the output of a norm of ``x``.

    mean, rstd: (C,), or with ``instance`` (N C,): one value for each channel, or for each channel of each sample.
    """
    scale = rstd
    # These are copies, because an optimizer may change the parameters before backward.
    with _torch.below_autograd():
        if instance:
            weight, bias = [None if v is None else v.repeat(x.shape[0]) for v in (weight, bias)]
        if weight is not None:
            scale = scale * weight
        if bias is not None:
            # ``to`` makes a copy of the same dtype too, but takes four times as long.
            bias = bias.clone() if bias.dtype == mean.dtype and not instance else bias.to(mean.dtype)
    return functools.partial(_of_instances if instance else _of_batch, scale, bias, mean)


def _laid_anew(registry: Registry, x: Tensor, t: Tensor) -> Handle | None:
    """Keeps ``x`` in place of ``t``, the contiguous copy of ``x`` that instance norm saves."""
    if t.numel() != x.numel() or not plain(t) or t.untyped_storage() is x.untyped_storage():
        return None
    if not registry.certain(x):
        return None
    size, kept = t.size(), registry.keep(x)
    kept.in_graph = False
    source = Recipe(Place.of(t), t.device, lambda x: x.contiguous().view(size), None, OFF, [(kept, kept.at)])
    return Handle(source, source.at)
