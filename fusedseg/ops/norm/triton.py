"""The norm op on Triton kernels, which are in ``kernels/norm_act.py`` and ``kernels/norm_act_bwd.py``."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..._backend import launching
from ..layout import Layout, dense
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted, move_running


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of the kernels, which the first call imports."""
    # An import statement would look the modules up in every call.
    from ...kernels import norm_act, norm_act_bwd

    return norm_act, norm_act_bwd


def forward(passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
    norm_act, _ = _kernels()
    x, weight, bias, residual, _, running_mean, running_var, batches = passed
    own = spec.own
    # Kernels move the running statistics of a batch only.
    of_batch = spec.kind == "batch" or (spec.keep == "output" and layout.I * layout.D == 1)
    if not of_batch:
        running_mean = running_var = None
    if not own or running_mean is None or (batches is not None and not _can_count(batches, x)):
        batches = None
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        mean, second, xhat = norm_act.norm_act_fwd(
            x, z, layout, weight, bias, running_mean=running_mean, running_var=running_var, training=own,
            momentum=spec.momentum, eps=spec.eps, act=spec.act,
            kept=None if kept is None else (kept.slots, kept.count), residual=residual, batches=batches,
            # An op that writes over x keeps no mean.  The means of samples are needed to move running statistics.
            keep_mean=out is not x or not of_batch,
        )  # fmt: skip
    if batches is not None:
        torch.autograd.graph.increment_version(batches)
    if not own and spec.keep == "input":
        # These are copies, because the buffers may change before backward runs.
        mean, second = (v.to(second.dtype, copy=True) for v in (passed.running_mean, passed.running_var))  # type: ignore[union-attr]
    found = Normalised(z, mean, second, xhat, None, None, batches is not None)
    if own and not of_batch:
        move_running(passed, spec, found, layout.N * layout.S)
    return found


def backward(dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted) -> Gradients:
    _, kernels = _kernels()
    source, weight, bias, residual, _, mean, rstd, xhat, _ = saved
    affine, writes_g, into, exchange = wanted
    if mean is not None:
        # The kernels of an op that keeps its input write g whenever there is a residual.
        writes_g = residual is not None
        rstd = (rstd + spec.eps).rsqrt() if spec.keeps_variance else rstd
    dresidual = torch.empty_like(source) if writes_g else None
    parameter = None if not affine else bias if weight is None else weight
    with launching(source):
        dx, dweight, dbias = kernels.norm_act_bwd(
            dz, source, layout, weight, bias, rstd, xhat,
            kept=None if kept is None else (kept.slots, kept.count), training=spec.own, act=spec.act,
            dparam_dtype=None if parameter is None else parameter.dtype, dx=into, mean=mean, residual=residual,
            dresidual=dresidual, exchange=exchange,
        )  # fmt: skip
    return Gradients(dx, dweight, dbias, dresidual)


def recompute(saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
    norm_act, _ = _kernels()
    x = saved.source
    layout = spec.layout(*dense(x))
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        if spec.keeps_variance:
            norm_act.norm_act_fwd(
                x, z, layout, saved.weight, saved.bias, running_mean=saved.mean, running_var=saved.second,
                training=False, momentum=0.0, eps=spec.eps, act=spec.act, kept=None, residual=saved.residual,
            )  # fmt: skip
        else:
            norm_act.norm_act_rebuild(
                x, z, layout, saved.weight, saved.bias, mean=saved.mean, rstd=saved.second, act=spec.act,
                residual=saved.residual,
            )  # fmt: skip
    return z


def moments(x: Tensor, layout: Layout) -> Tensor:
    from ...kernels.norm_stats import few, norm_stats

    with launching(x):
        return few(norm_stats(x, layout), layout.C).transpose(0, 1)


def _can_count(batches: Tensor, x: Tensor) -> bool:
    """Whether a kernel can add to ``batches``: it must be one int64 on the device of ``x``, as in the stock norm."""
    return batches.dtype == torch.int64 and batches.numel() == 1 and batches.device == x.device
