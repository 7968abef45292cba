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

from ... import _torch
from ..layout import FORMATS
from .calls import replay
from .plain import Place, plain
from .registry import Registry
from .saved import OFF, Handle, Recipe

Function = Callable[..., Any]
_hooks, _push_hooks = _torch.top_saved_tensors_default_hooks, _torch.push_hooks
_TENSORS = ("input", "running_mean", "running_var", "weight", "bias")
# The names of the arguments, and the default of the sixth argument, which asks for the statistics of the batch.
NAMES = {
    F.batch_norm: ((*_TENSORS, "training", "momentum", "eps"), False),
    F.instance_norm: ((*_TENSORS, "use_input_stats", "momentum", "eps"), True),
}


def norm(registry: Registry, func: Function, args: Any, kwargs: Any) -> Any:
    """The rule of ``F.batch_norm`` and ``F.instance_norm``."""
    names, default = NAMES[func]
    named = dict(zip(names, args, strict=False))
    named.update(kwargs)
    x, own, instance = named["input"], named.get(names[5], default), func is F.instance_norm
    if not plain(x):
        return func(*args, **kwargs)
    vectors: list[Tensor] = []
    before, registry.vectors = registry.claim, vectors
    bare = False
    try:
        if instance:
            registry.claim = functools.partial(_laid_anew, registry, x)
            out = func(*args, **kwargs)
        else:
            out, bare = _call_bare(registry, func, args, kwargs)
    finally:
        registry.claim, registry.vectors, registry.collected = before, None, vectors
    if bare and own and x.is_cpu:
        vectors += _results_of(out.grad_fn)
    again, count = None, x.shape[1] * (x.shape[0] if instance else 1)
    if own and (registry.rounds or _is_certain(x, vectors, count, instance)):
        found = statistics_of(vectors, count)
        again = None if found is None else by_statistics(x, named.get("weight"), named.get("bias"), *found)
    if again is not None:
        registry.offer(out, again, [x])
        return out
    for name in names[1:3]:
        # These are copies, because aten moves running statistics without a new version.
        moved = named.get(name)
        named[name] = None if own or moved is None else moved.detach().clone()
    again, tensors = replay(func, (), named)
    registry.offer(out, again, tensors)
    return out


def _call_bare(registry: Registry, func: Function, args: Any, kwargs: Any) -> tuple[Any, bool]:
    """Calls a norm so that only its input passes through the hooks, and autograd itself holds the vectors.

    The hooks take most of the time of a small norm.  Returns also whether the input was saved.
    """
    if not registry.chains or registry.outer is not None or _push_hooks is None or _torch.pop_hooks is None:
        return func(*args, **kwargs), False
    hooks, registry.bare = _hooks(True), True
    try:
        out = func(*args, **kwargs)
    finally:
        saved, registry.bare = not registry.bare, False
        if saved:
            _push_hooks(*hooks)
    return out, saved


def _results_of(node: Any) -> list[Tensor]:
    """What a node of autograd has saved of the results of a norm, after the output."""
    try:
        return [node._saved_result1, node._saved_result2]
    except AttributeError:
        return []


def statistics_of(vectors: list[Tensor], count: int) -> tuple[Tensor, Tensor] | None:
    """Mean and 1 / sqrt(var + eps) among what a norm has saved, where they come last; None if they are not there."""
    found = [v for v in vectors if v.numel() == count and v.is_floating_point()]
    return (found[-2], found[-1]) if len(found) > 1 else None


def _is_certain(x: Tensor, vectors: list[Tensor], count: int, instance: bool) -> bool:
    """Whether ``by_statistics`` gives the same bits as the norm.

    It may not on other devices than a CPU, and if the vectors may be something else.  With parameters in half
    precision, aten rounds the statistics; in memory with gaps or with another order of dimensions, it multiplies in
    another order.
    """
    dense = x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))
    if len(vectors) < 2 or not x.is_cpu or not (instance or dense):
        return False
    mean = vectors[-2]
    return mean.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32) and mean.numel() == count


class ByStatistics:
    """Rebuilds the output of a norm from its input.

    Instance norm is computed as the batch norm of one sample that has the channels of all samples.
    """

    __slots__ = ("bias", "instance", "mean", "scale")

    def __init__(self, scale: Tensor, bias: Tensor | None, mean: Tensor, instance: bool) -> None:
        self.scale, self.bias, self.mean, self.instance = scale, bias, mean, instance

    def __call__(self, x: Tensor) -> Tensor:
        mean = self.mean
        problem = x.contiguous().view(1, mean.numel(), *x.shape[2:]) if self.instance else x
        z, _, _ = torch.native_batch_norm(problem, self.scale, self.bias, mean, torch.ones_like(mean), False, 0.0, 0.0)
        return z.view(x.shape) if self.instance else z


def by_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Callable[[Tensor], Tensor]:
    """A function that rebuilds the output of a norm of ``x``.

    mean, rstd: (C,) or (N C,): one value for each channel, or for each channel of each sample.
    """
    samples, channels = x.shape[:2]
    instance = mean.numel() != channels
    scale = rstd
    # These are copies, because an optimizer may change the parameters before backward.
    if weight is not None:
        weight = weight.detach()
        scale = scale * (weight.repeat(samples) if instance else weight)
    if bias is not None:
        bias = bias.detach()
        bias = bias.clone() if bias.dtype == mean.dtype else bias.to(mean.dtype)
        bias = bias.repeat(samples) if instance else bias
    return ByStatistics(scale, bias, mean, instance)


def _laid_anew(registry: Registry, x: Tensor, t: Tensor) -> Handle | None:
    """Keeps ``x`` in place of ``t``, the contiguous copy of ``x`` that instance norm saves."""
    if t.numel() != x.numel() or not plain(t) or t.untyped_storage() is x.untyped_storage():
        return None
    if not registry.certain(x):
        return None
    size, kept = t.size(), registry.keep(x)
    kept.in_recipe, kept.in_graph = True, False
    source = Recipe(Place.of(t), t.device, lambda x: x.contiguous().view(size), None, OFF, [(kept, kept.at)])
    return Handle(source, source.at)
