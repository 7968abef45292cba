"""What a norm op is, and the tensors that it is given, has found, keeps and returns, by name.

A module builds a ``Spec`` and a ``Passed`` once; the checks, the op and the backends take these objects as they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation import Activation
from ..layout import Layout

# how errors call the op that keeps its output, and the op that keeps its input
NAMES = {"output": "fusedseg.inplace_abn", "input": "fusedseg.norm_act"}

# What a backward pass does with the sums of g and of g * xhat before it uses them: it replaces them by others, such as
# the sums over all processes.
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Spec(NamedTuple):
    """What a norm op computes and keeps.

    ``keep``: "output", which is written over x and inverted in backward, or "input", from which the output is computed
    again.  ``kind``: the values that share a mean and a variance are those of a channel ("batch"), of a channel of one
    sample ("instance"), or of one of ``groups`` equal groups of a sample's channels ("group").  ``own``: the statistics
    are those of x, and the running ones, where given, move towards them by ``momentum``; otherwise the running ones are
    used.  ``process_group``: the name of the group whose processes share their statistics, or None.
    """

    keep: str
    act: Activation
    eps: float = 1e-5
    momentum: float = 0.0
    own: bool = True
    kind: str = "batch"
    groups: int = 0
    process_group: str | None = None

    @property
    def name(self) -> str:
        """How errors call the op."""
        return NAMES[self.keep] if self.process_group is None else f"{NAMES[self.keep]}_sync"

    @property
    def keeps_variance(self) -> bool:
        """Whether ``Saved.second`` is the variance; otherwise it is 1 / sqrt(variance + eps)."""
        return self.keep == "input" and (not self.own or self.process_group is not None)

    def layout(self, x: Tensor, layout: Layout) -> Layout:
        """The layout of a dense ``x`` with the statistics of this op."""
        if self.kind == "batch":
            return layout
        return layout.by_sample(x.shape[0], x.shape[1] if self.kind == "instance" else self.groups)


class Passed(NamedTuple):
    """The tensors that an op is called with.

    ``slope`` is that of prelu.  ``batches`` is the number of batches, to which a call adds 1; None where it adds none.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    slope: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    batches: Tensor | None = None


class Normalised(NamedTuple):
    """What a forward pass has found.

    ``mean`` and ``second``, 1 / sqrt(variance + eps), have one value for every statistics group: (C,), (N C,) or
    (N groups,).  ``xhat`` is the normalised input of the kept channels, flat, or None.  ``second`` is the variance
    instead for an op that keeps its input and uses running statistics, and for the values of all processes: ``total``
    then counts these values, (C,), and ``share`` is the fraction of them that this process has, (C,).  ``mean`` is None
    where nothing needs it.  ``counted``: the backend has added 1 to ``Passed.batches``.
    """

    z: Tensor
    mean: Tensor | None
    second: Tensor
    xhat: Tensor | None = None
    total: Tensor | None = None
    share: Tensor | None = None
    counted: bool = False


class Saved(NamedTuple):
    """The tensors that a backward pass is given.

    ``source`` is the tensor from which xhat is computed again: the output or the input, as ``Spec.keep`` says.  Where
    the output is kept, ``mean`` is None.  ``second`` is 1 / sqrt(variance + eps), or the variance where
    ``Spec.keeps_variance`` says so.
    """

    source: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    slope: Tensor | None
    mean: Tensor | None
    second: Tensor
    xhat: Tensor | None = None
    share: Tensor | None = None


class Wanted(NamedTuple):
    """What a backward pass is asked for.

    ``affine``: the gradients of weight and bias.  ``residual``: the gradient of the residual.  ``into``: memory for dx,
    that of the kept output.  ``rebuilt``: the output in a list, where an op that keeps its input has it at hand; who
    uses it takes it off the list, so that it can be freed.
    """

    affine: bool
    residual: bool
    into: Tensor | None = None
    exchange: Exchange | None = None
    rebuilt: list[Tensor] | None = None


class Gradients(NamedTuple):
    """None stands for a gradient that does not exist, or is not wanted; one that is not wanted may be there."""

    dx: Tensor
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dresidual: Tensor | None = None
    dslope: Tensor | None = None


def stats_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the statistics of ``x`` are computed and kept."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics_count(x: Tensor, spec: Spec) -> int:
    """How many means ``x`` has."""
    if spec.kind == "batch":
        return x.shape[1]
    return x.shape[0] * (x.shape[1] if spec.kind == "instance" else spec.groups)


def like_parameters(grads: Gradients, saved: Saved) -> Gradients:
    """The gradients of weight, bias and slope in the dtypes of these; None where there is no such parameter."""
    pairs = ((saved.weight, grads.dweight), (saved.bias, grads.dbias), (saved.slope, grads.dslope))
    dweight, dbias, dslope = (None if v is None or d is None else d.to(v.dtype) for v, d in pairs)
    return Gradients(grads.dx, dweight, dbias, grads.dresidual, dslope)


def move_running(passed: Passed, spec: Spec, found: Normalised, count: int) -> None:
    """Moves the running statistics towards those of x, or towards the averages of those of its samples.

    ``count``: the number of values behind one mean, unless ``found`` counts them.  No values move nothing.
    """
    running_mean, running_var = passed.running_mean, passed.running_var
    if running_mean is None or running_var is None or (count == 0 and found.total is None):
        return
    assert found.mean is not None
    with torch.no_grad():
        weight: Any = spec.momentum
        if found.total is None:
            var = (found.second**-2 - spec.eps).clamp_min(0.0) * (count / (count - 1))
        else:
            weight = (found.total > 0).to(running_mean.dtype) * weight
            var = found.second * (found.total / (found.total - 1).clamp(min=1))
        mean, var = (v.view(-1, running_mean.shape[0]).mean(0) for v in (found.mean, var))
        running_mean.lerp_(mean.to(running_mean.dtype), weight)
        running_var.lerp_(var.to(running_var.dtype), weight)
