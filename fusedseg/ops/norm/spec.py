"""The description of a norm op, and named tuples of the tensors that it receives, finds, keeps and returns.

A module builds a ``Spec`` and a ``Passed`` once.  The checks, the op and the backends take these objects.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation import Activation
from ..layout import Layout

# The names of the ops in errors.
NAMES = {"output": "fusedseg.inplace_abn", "input": "fusedseg.norm_act"}

# A function that a backward pass calls with the sums of g and of g * xhat.  It returns the sums to use instead, such as
# the sums over all processes.
Exchange = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Spec(NamedTuple):
    """The description of what a norm op computes and keeps.

    ``keep`` is "output" or "input".  The output is written over x and inverted in backward; from the input, the output
    is computed again.  ``kind`` says which values share a mean and a variance: the values of a channel ("batch"), of a
    channel of one sample ("instance"), or of one of ``groups`` equal groups of a sample's channels ("group").  If
    ``own`` is True, the statistics are those of x, and the running statistics, if given, move towards them by
    ``momentum``; otherwise the running statistics are used.  ``process_group`` is the name of the group whose processes
    share their statistics, or None.
    """

    keep: str
    act: Activation
    eps: float = 1e-5
    momentum: float = 0.0
    own: bool = True
    kind: str = "batch"
    groups: int = 0
    process_group: str | None = None

    def of_given(self) -> "Spec":
        """The spec as that of a batch norm if statistics are passed in, because they are the same for every sample."""
        if self.own or self.kind == "batch":
            return self
        # See ``Passed.with_x``.
        return Spec(self.keep, self.act, self.eps, self.momentum, self.own, "batch", 0, self.process_group)

    @property
    def name(self) -> str:
        """The name of the op in errors."""
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

    ``slope`` is the slope of prelu.  ``batches`` is the number of batches, to which the call adds 1; with None, the
    call counts no batch.
    """

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    slope: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    batches: Tensor | None = None

    # The compiler before PyTorch 2.10 cannot follow ``_replace``.
    def with_x(self, x: Tensor) -> "Passed":
        _, weight, bias, residual, slope, mean, var, batches = self
        return Passed(x, weight, bias, residual, slope, mean, var, batches)

    def with_residual(self, residual: Tensor) -> "Passed":
        x, weight, bias, _, slope, mean, var, batches = self
        return Passed(x, weight, bias, residual, slope, mean, var, batches)


class Normalised(NamedTuple):
    """The results of a forward pass.

    ``mean`` and ``second`` have one value for every statistics group: (C,), (N C,) or (N groups,).  ``second`` is
    1 / sqrt(variance + eps).  It is the variance instead if the op keeps its input and uses running statistics, and if
    the statistics are those of all processes.  For statistics of all processes, ``total``, (C,), counts the values of
    all processes, and ``share``, (C,), is the fraction of them that this process has.  ``mean`` is None if nothing
    needs it.  ``xhat`` is the normalised input of the kept channels, flat, or None.  ``counted`` says whether the
    backend has added 1 to ``Passed.batches``.
    """

    z: Tensor
    mean: Tensor | None
    second: Tensor
    xhat: Tensor | None = None
    total: Tensor | None = None
    share: Tensor | None = None
    counted: bool = False


class Saved(NamedTuple):
    """The tensors that a backward pass receives.

    ``source`` is the tensor from which xhat is computed again: the output or the input, as ``Spec.keep`` says.  If the
    output is kept, ``mean`` is None.  ``second`` is the variance if ``Spec.keeps_variance`` is True, otherwise
    1 / sqrt(variance + eps).
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
    """The gradients that a backward pass must compute.

    ``affine`` asks for the gradients of weight and bias, ``residual`` for the gradient of the residual.  ``into`` is
    memory for dx, namely the memory of the kept output or of dz, or None.  ``exchange`` is an ``Exchange``, or None.
    """

    affine: bool
    residual: bool
    into: Tensor | None = None
    exchange: Exchange | None = None


class Gradients(NamedTuple):
    """The gradients of a norm op.

    None stands for a gradient that does not exist or is not wanted.  A gradient that is not wanted may be present.
    """

    dx: Tensor
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dresidual: Tensor | None = None
    dslope: Tensor | None = None


def of_inputs(
    grads: Sequence[Tensor | None], passed_on: Tensor | None, needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight, bias, residual and slope, or None for each that ``needs`` does not ask for.

    ``grads`` has the fields of ``Gradients``.  ``passed_on`` is the gradient of the residual if it equals dz, otherwise
    None.
    """
    dx, dweight, dbias, dresidual, dslope = grads
    dresidual = dresidual if passed_on is None else passed_on
    return (
        dx if needs[0] else None,
        dweight if needs[1] else None,
        dbias if needs[2] else None,
        dresidual if needs[3] else None,
        dslope if needs[4] else None,
    )


def adjacent(*vectors: Tensor | None) -> bool:
    """Whether the elements of all vectors are adjacent in memory.

    Kernels read and write them so.  aten's batch norm of channels_last reads a strided weight so, too, and gives wrong
    gradients.
    """
    for v in vectors:  # noqa: SIM110  a generator would take twice as long, in every call
        if v is not None and not v.is_contiguous():
            return False
    return True


def on_adjacent(passed: Passed, own: bool, run: Callable[[Passed], Normalised]) -> Normalised:
    """Calls ``run`` with copies of vectors that lie otherwise, such as columns of a matrix.

    ``own`` says that ``run`` moves the running statistics.
    """
    running = {"running_mean": passed.running_mean, "running_var": passed.running_var}
    given = {"weight": passed.weight, "bias": passed.bias, **running}
    vectors = {name: v for name, v in given.items() if v is not None}
    copies = {name: v.contiguous() for name, v in vectors.items()}
    found = run(passed._replace(**copies))
    for name in running if own else ():
        if name in vectors and vectors[name] is not copies[name]:
            vectors[name].copy_(copies[name])
    return found


def stats_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the statistics of ``x`` are computed and kept."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(v: Tensor | None, dtype: torch.dtype) -> Any:
    """``v.to(dtype)``, or None for None; the call is saved if the dtype is right already, as in nearly all cases."""
    return v if v is None or v.dtype == dtype else v.to(dtype)


def statistics_count(x: Tensor, spec: Spec) -> int:
    """The number of means of ``x``."""
    if spec.kind == "batch":
        return x.shape[1]
    return x.shape[0] * (x.shape[1] if spec.kind == "instance" else spec.groups)


def like_parameters(grads: Gradients, saved: Saved) -> Gradients:
    """The gradients, with those of weight, bias and slope in the dtypes of the parameters.

    The gradient is None if there is no such parameter.
    """
    weight, bias, slope = saved.weight, saved.bias, saved.slope
    return Gradients(
        grads.dx,
        None if weight is None else cast(grads.dweight, weight.dtype),
        None if bias is None else cast(grads.dbias, bias.dtype),
        grads.dresidual,
        None if slope is None else cast(grads.dslope, slope.dtype),
    )


def move_running(passed: Passed, spec: Spec, found: Normalised, count: int) -> None:
    """Moves the running statistics towards the statistics of x, or towards their averages over the samples of x.

    ``count`` is the number of values behind one mean; it is ignored if ``found.total`` counts them.  If there are no
    values, nothing moves.
    """
    running_mean, running_var = passed.running_mean, passed.running_var
    if running_mean is None or running_var is None or (count == 0 and found.total is None):
        return
    assert found.mean is not None
    with torch.no_grad():
        weight: float | Tensor = spec.momentum
        if found.total is None:
            var = (found.second**-2 - spec.eps).clamp_min(0.0) * (count / (count - 1))
        else:
            weight = (found.total > 0).to(running_mean.dtype) * weight
            var = found.second * (found.total / (found.total - 1).clamp(min=1))
        mean, var = (v.view(-1, running_mean.shape[0]).mean(0) for v in (found.mean, var))
        running_mean.lerp_(mean.to(running_mean.dtype), weight)
        running_var.lerp_(var.to(running_var.dtype), weight)
