"""The passes of the norm op, which its autograd Function and its ops for the compiler share."""

import torch
from torch import Tensor

from ...activation import TABLE
from ..layout import Layout, like
from . import sync
from .backend import backend_of
from .kept import Kept
from .spec import (
    Gradients,
    Normalised,
    Passed,
    Saved,
    Spec,
    Wanted,
    adjacent,
    move_running,
    on_adjacent,
    statistics_count,
    stats_dtype,
)


def forward(passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
    """The forward pass on a dense x.  An op that keeps its output writes z into ``out``.

    It moves the running statistics, unless the statistics are those of all processes; then the caller moves them.
    """
    x = passed.x
    if spec.process_group is not None:
        # The collective runs before anything is written, so that a failure changes no tensor.
        mean, var, total, share = sync.joint_moments(x, layout, spec.process_group)
        given = passed._replace(running_mean=mean, running_var=var)
        found = forward(given, spec._replace(own=False, process_group=None), layout, kept, out)
        return Normalised(found.z, mean, var, found.xhat, total, share)
    if x.numel() == 0:
        zeros = torch.zeros(2, statistics_count(x, spec), dtype=stats_dtype(x), device=x.device)
        return Normalised(torch.empty_like(x) if out is None else out, zeros[0], zeros[1])
    run = backend_of(x, spec.act).forward
    if adjacent(passed.weight, passed.bias, passed.running_mean, passed.running_var):
        return run(passed, spec, layout, kept, out)
    return on_adjacent(passed, spec.own, lambda passed: run(passed, spec, layout, kept, out))


def statistics(
    x: Tensor, spec: Spec, layout: Layout, running_mean: Tensor | None, running_var: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The mean and 1 / sqrt(var + eps) of a batch norm of a dense x; it moves the running statistics."""
    count, mean, m2 = sync.merge(sync.local_moments(x, layout))
    rstd = (m2 / count.clamp(min=1) + spec.eps).rsqrt()
    passed = Passed(x, None, None, None, None, running_mean, running_var)
    move_running(passed, spec, Normalised(x, mean, rstd), x.numel() // x.shape[1])
    return mean, rstd


def rebuild(saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
    """z of an op that keeps its input, with the same bits as in the forward pass; it may be written over the input."""
    x = saved.source
    if x.numel() == 0:
        return torch.empty_like(x)
    if saved.residual is not None:
        saved = saved._replace(residual=like(saved.residual, x))
    saved = saved if adjacent(saved.weight, saved.bias) else _adjacent(saved)
    return backend_of(x, spec.act).recompute(saved, spec, out)


def _adjacent(saved: Saved) -> Saved:
    """``saved`` with weight and bias whose elements are adjacent in memory, which are copies where they are not."""
    weight, bias = (None if v is None else v.contiguous() for v in (saved.weight, saved.bias))
    return saved._replace(weight=weight, bias=bias)


def backward(dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted) -> Gradients:
    """The gradients, in the dtypes of the parameters.  ``layout`` is the layout of ``saved.source``, which is dense."""
    source = saved.source
    if saved.share is not None:
        assert spec.process_group is not None
        exchanged = sync.exchange(saved.share, spec.process_group)
        wanted = wanted._replace(exchange=exchanged)
        if source.numel() == 0:
            # The other processes wait for the sums of this process.
            exchanged(torch.zeros_like(saved.second), torch.zeros_like(saved.second))
    if source.numel() == 0:
        vectors = (saved.weight, saved.bias) if wanted.affine else (None, None)
        dweight, dbias, dslope = (None if v is None else torch.zeros_like(v) for v in (*vectors, saved.slope))
        return Gradients(
            torch.empty_like(source), dweight, dbias, torch.empty_like(source) if wanted.residual else None, dslope
        )
    if saved.residual is not None:
        saved = saved._replace(residual=like(saved.residual, source))
    if not adjacent(saved.weight, saved.bias):
        saved = _adjacent(saved)
    return backend_of(source, spec.act).backward(like(dz, source), saved, spec, layout, kept, wanted)


def fits(dz: Tensor, source: Tensor, spec: Spec) -> bool:
    """Whether dx can be written over ``dz``.  The identity activation has g = dz, which is read after dx is written."""
    alike = dz.dtype == source.dtype and dz.stride() == source.stride()
    return alike and not TABLE[spec.act.name].identity
