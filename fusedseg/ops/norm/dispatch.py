"""Forward and backward of the norm op, and the choice of who computes them: ``triton.py`` or ``aten_norms.py``.

The autograd Function of eager mode, and the ops of compiled graphs, call ``forward`` and ``backward`` (``eager.py``).

Both implementations have the same functions.  All tensors that these get are dense and not empty, the residual and the
gradient of z have the strides of x, and the elements of vectors are adjacent.  They ignore ``norm.process_group``,
because the statistics of all processes are passed to them as running statistics.
"""

from types import ModuleType

import torch
from torch import Tensor

from ... import _backend
from ...activation import TABLE, Activation
from ..layout import like
from . import aten_norms, sync, triton
from .call import BackwardCall, Gradients, Norm, Operands, Statistics, adjacent, move_running, on_adjacent, stats_dtype
from .kept import Kept


def implementation_of(x: Tensor, act: Activation | None = None) -> ModuleType:
    """The module that serves ``x``.  ``act=None`` asks without an activation."""
    # No kernel computes the gradient of a learned slope.
    learned = act is not None and TABLE[act.name].learned
    return aten_norms if learned or not _backend.use_triton(x, triton.FAMILY) else triton


def forward(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Tensor, Statistics]:
    """The forward pass on a dense x.  An op that keeps its output writes z into ``out``.

    It moves the running statistics, and counts the batch, where they are given.
    """
    x = given.x
    if norm.process_group is not None:
        return _forward_of_all_processes(given, norm, norm.process_group, kept, out)
    if x.numel() == 0:
        if given.batches is not None:
            given.batches.add_(1)
        zeros = torch.zeros(2, norm.over.count(x), dtype=stats_dtype(x), device=x.device)
        return torch.empty_like(x) if out is None else out, Statistics(zeros[0], zeros[1])
    run = implementation_of(x, norm.act).forward
    if adjacent(given.weight, given.bias, given.running_mean, given.running_var):
        return run(given, norm, kept, out)
    return on_adjacent(given, norm.own, lambda given: run(given, norm, kept, out))


def _forward_of_all_processes(
    given: Operands, norm: Norm, group: str, kept: Kept | None, out: Tensor | None
) -> tuple[Tensor, Statistics]:
    # The collective runs before anything is written, so that a failure changes no tensor.
    mean, var, total, share = sync.joint_moments(_moments(given.x), group)
    alone = given._replace(running_mean=mean, running_var=var, batches=None)
    z, (_, rstd, xhat, _) = forward(alone, norm._replace(own=False, process_group=None), kept, out)
    if not given.x.numel():
        rstd = torch.rsqrt(var + norm.eps)
    move_running(given, norm, mean, var, total)
    if given.batches is not None:
        given.batches.add_(1)
    return z, Statistics(mean, rstd, xhat, share)


def _moments(x: Tensor) -> Tensor:
    """(count, mean, M2) of each part of the values of a dense x: (parts, 3, C)."""
    if x.numel() == 0:
        return torch.zeros(1, 3, x.shape[1], dtype=stats_dtype(x), device=x.device)
    return implementation_of(x).moments(x)


def statistics(x: Tensor, norm: Norm, running_mean: Tensor | None, running_var: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean and 1 / sqrt(var + eps) of a batch norm of a dense x; it moves the running statistics."""
    count, mean, m2 = sync.merge(_moments(x))
    var = m2 / count.clamp(min=1)
    given = Operands(x, running_mean=running_mean, running_var=running_var)
    move_running(given, norm, mean, var, x.numel() // x.shape[1])
    return mean, (var + norm.eps).rsqrt()


def recompute(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None = None) -> Tensor:
    """z of an op that keeps its input, with the same bits as in the forward pass; it may be written over the input."""
    if given.x.numel() == 0:
        return torch.empty_like(given.x)
    return implementation_of(given.x, norm.act).recompute(_prepared(given), stats, norm, out)


def _prepared(given: Operands) -> Operands:
    """The operands with a residual that has the strides of x, and with weight and bias that lie adjacent in memory."""
    if given.residual is not None and given.residual.stride() != given.x.stride():
        given = given._replace(residual=like(given.residual, given.x))
    if adjacent(given.weight, given.bias):
        return given
    weight, bias = (None if v is None else v.contiguous() for v in (given.weight, given.bias))
    return given._replace(weight=weight, bias=bias)


def backward(call: BackwardCall) -> Gradients:
    """The gradients, in the dtypes of the parameters.  ``given.x`` is the tensor that was kept, which is dense."""
    dz, given, stats, norm, _, needs, *_ = call
    x, exchange = given.x, None
    if stats.share is not None:
        assert norm.process_group is not None
        exchange = sync.exchange(stats.share, norm.process_group)
    if x.numel() == 0:
        if exchange is not None:
            # The other processes wait for the sums of this process.
            exchange(torch.zeros_like(stats.rstd), torch.zeros_like(stats.rstd))
        zeros = (None if v is None else torch.zeros_like(v) for v in (given.weight, given.bias, given.slope))
        dweight, dbias, dslope = zeros
        return Gradients(torch.empty_like(x), dweight, dbias, torch.empty_like(x) if needs[3] else None, dslope)
    run, prepared = implementation_of(x, norm.act).backward, _prepared(given)
    if exchange is not None or prepared is not given or dz.stride() != x.stride():
        call = call._replace(dz=like(dz, x), given=prepared, exchange=exchange)
    return run(call)


def backward_of_sums(call: BackwardCall, sums: Tensor) -> Gradients:
    """The gradients of a norm that keeps its input from g, the gradient behind the activation, and its two sums.

    ``call.dz`` is g.  ``sums`` are those of g and of g * xhat, (2, values of a statistic).  dx is written over g.
    """
    x = call.given.x
    prepared = call._replace(dz=like(call.dz, x), given=_prepared(call.given))
    return implementation_of(x).backward_of_sums(prepared, sums)


def fits(dz: Tensor, source: Tensor, norm: Norm) -> bool:
    """Whether dx can be written over ``dz``.  The identity activation has g = dz, which is read after dx is written."""
    alike = dz.dtype == source.dtype and dz.stride() == source.stride()
    return alike and not TABLE[norm.act.name].identity
