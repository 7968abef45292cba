"""The records of the norm op: what it is, the tensors that it has, the statistics that it finds, and its gradients.

A module builds a ``Norm`` and ``Operands`` in each call.  The checks, the op and its implementations take these two,
and in backward a ``BackwardCall``, which has them too.  ``Kept`` (``kept.py``) has the channels whose normalised input
is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation import Activation
from .kept import Kept
from .statistic import BATCH, Statistic

# The names of the ops in errors.
NAMES = {"output": "fusedseg.inplace_abn", "input": "fusedseg.norm_act"}

# Whether the gradients of x, weight, bias, residual and slope are wanted.
Needs = tuple[bool, bool, bool, bool, bool]


class Exchange:
    """What a backward pass calls with the sums of g and of g * xhat.

    It returns the sums to use instead, such as the sums over all processes, and keeps them in ``sums``, because it can
    be called only once.
    """

    sums: tuple[Tensor, Tensor]

    def __init__(self, join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.join = join

    def __call__(self, s1: Tensor, s2: Tensor) -> tuple[Tensor, Tensor]:
        self.sums = self.join(s1, s2)
        return self.sums


class Norm(NamedTuple):
    """The description of what a norm op computes and keeps.

    ``keep`` is "output" or "input".  The output is written over x and inverted in backward; from the input, the output
    is computed again.  ``over`` says which values share a mean and a variance.  If ``own`` is True, the statistics are
    those of x, and the running statistics, if given, move towards them by ``momentum``; otherwise the running
    statistics are used.  ``process_group`` is the name of the group whose processes share their statistics, or None.
    """

    keep: str
    act: Activation
    eps: float = 1e-5
    momentum: float = 0.0
    own: bool = True
    over: Statistic = BATCH
    process_group: str | None = None

    def of_given(self) -> "Norm":
        """The norm as one of the batch if statistics are passed in, because they are the same for every sample."""
        if self.own or not self.over.of_samples:
            return self
        # The compiler before PyTorch 2.10 cannot follow ``_replace``.
        return Norm(self.keep, self.act, self.eps, self.momentum, self.own, BATCH, self.process_group)

    def at_once(self) -> "Norm":
        """The norm with a momentum of 1, which moves running statistics to those of x."""
        return Norm(self.keep, self.act, self.eps, 1.0, self.own, self.over, self.process_group)

    @property
    def name(self) -> str:
        """The name of the op in errors."""
        return NAMES[self.keep] if self.process_group is None else f"{NAMES[self.keep]}_sync"


class Operands(NamedTuple):
    """The tensors of a call.

    In backward, and where the output is computed again, ``x`` is the tensor that was kept: the output or the input, as
    ``Norm.keep`` says.  ``slope`` is the slope of prelu.  ``batches`` is the number of batches, to which the call adds
    1; with None, the call counts no batch.
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
    def with_x(self, x: Tensor) -> "Operands":
        _, weight, bias, residual, slope, mean, var, batches = self
        return Operands(x, weight, bias, residual, slope, mean, var, batches)

    def with_residual(self, residual: Tensor) -> "Operands":
        x, weight, bias, _, slope, mean, var, batches = self
        return Operands(x, weight, bias, residual, slope, mean, var, batches)


class Statistics(NamedTuple):
    """The statistics that a forward pass finds, and that backward reads.

    ``mean`` and ``rstd``, which is 1 / sqrt(variance + eps), have one value for every statistic: (C,), (N C,) or
    (N groups,).  They are copies, because buffers may change before backward runs.  ``mean`` is None if nothing needs
    it.  ``xhat`` is the normalised input of the kept channels, flat, or None.  For statistics of all processes,
    ``share``, (C,), is the fraction of all values that this process has.
    """

    mean: Tensor | None
    rstd: Tensor
    xhat: Tensor | None = None
    share: Tensor | None = None


class BackwardCall(NamedTuple):
    """What a backward pass is given, beside the records of the forward pass.

    The gradient of z is ``dz``, or dz + ``also``, which has the shape and the dtype of dz.  ``into`` is memory for dx,
    namely the memory of the kept output or of dz, or None.  ``over_also`` says that the gradient of the residual may be
    written over ``also``; then that has the strides of x.  A call has no two of ``also`` and ``exchange``.
    """

    dz: Tensor
    given: Operands
    stats: Statistics
    norm: Norm
    kept: Kept | None
    needs: Needs
    into: Tensor | None = None
    also: Tensor | None = None
    over_also: bool = False
    exchange: Exchange | None = None


class Gradients(NamedTuple):
    """The gradients of a norm op.

    None stands for a gradient that does not exist.  A gradient that is not wanted may be present.
    """

    dx: Tensor
    dweight: Tensor | None = None
    dbias: Tensor | None = None
    dresidual: Tensor | None = None
    dslope: Tensor | None = None

    def wanted(self, needs: Needs) -> tuple[Tensor | None, ...]:
        """The gradients, or None for each that ``needs`` does not ask for."""
        # In one call of Python; a comprehension is a second one.
        dx, dweight, dbias, dresidual, dslope = self
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


def on_adjacent(
    given: Operands, own: bool, run: Callable[[Operands], tuple[Tensor, Statistics]]
) -> tuple[Tensor, Statistics]:
    """Calls ``run`` with copies of vectors that lie otherwise, such as columns of a matrix.

    ``own`` says that ``run`` moves the running statistics.
    """
    running = {"running_mean": given.running_mean, "running_var": given.running_var}
    named = {"weight": given.weight, "bias": given.bias, **running}
    vectors = {name: v for name, v in named.items() if v is not None}
    copies = {name: v.contiguous() for name, v in vectors.items()}
    found = run(given._replace(**copies))
    for name in running if own else ():
        if name in vectors and vectors[name] is not copies[name]:
            vectors[name].copy_(copies[name])
    return found


def stats_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which the statistics of ``x`` are computed and kept."""
    # This is ``wide_dtype`` without its call, because every call of a norm asks.
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cast(v: Tensor | None, dtype: torch.dtype) -> Any:
    """``v.to(dtype)``, or None for None; the call is saved if the dtype is right already, as in nearly all cases."""
    return v if v is None or v.dtype == dtype else v.to(dtype)


def move_running(given: Operands, norm: Norm, mean: Tensor | None, var: Tensor, count: int | Tensor) -> None:
    """Moves the running statistics towards the statistics of x, or towards their averages over the samples of x.

    ``var`` is the variance without Bessel's correction.  ``count`` is the number of values behind one mean: a number,
    or a tensor (C,) for the values of all processes.  If there are no values, nothing moves.
    """
    running_mean, running_var = given.running_mean, given.running_var
    if running_mean is None or running_var is None:
        return
    assert mean is not None
    weight: float | Tensor = norm.momentum
    if isinstance(count, Tensor):
        weight = (count > 0).to(running_mean.dtype) * weight
        unbiased = var * (count / (count - 1).clamp(min=1))
    elif count == 0:
        return
    else:
        unbiased = var * (count / (count - 1))
    with torch.no_grad():
        mean, unbiased = (v.view(-1, running_mean.shape[0]).mean(0) for v in (mean, unbiased))
        running_mean.lerp_(mean.to(running_mean.dtype), weight)
        running_var.lerp_(unbiased.to(running_var.dtype), weight)
