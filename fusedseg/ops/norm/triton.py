"""The norm op on Triton kernels, which are in ``kernels/norm_act.py`` and ``kernels/norm_act_bwd.py``."""

import functools
from types import ModuleType

import torch
from torch import Tensor

from ..._backend import launching
from ..at_size import checked
from ..layout import Layout, layout_of, pitch_of
from . import exact
from .call import Exchange, Gradients, Needs, Norm, Operands, OutputGradient, Statistics, move_running, variance_of
from .kept import Kept


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of the kernels, which the first call imports."""
    # An import statement would look the modules up in every call.
    from ...kernels import norm_act, norm_act_bwd

    return norm_act, norm_act_bwd


def _layout(x: Tensor, norm: Norm) -> Layout:
    """How a dense x lies in memory, and the values of a statistic."""
    layout = layout_of(x)
    assert layout is not None
    return norm.over.by_sample(layout, x) if norm.over.of_samples else layout


@checked("norm", exact.forward_kind, exact.forward, exact.before_forward)
def forward(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Tensor, Statistics]:
    norm_act, _ = _kernels()
    x, weight, bias, residual, _, running_mean, running_var, batches = given
    own, layout = norm.own, _layout(x, norm)
    # Kernels move the running statistics of a batch only.
    of_batch = not norm.over.of_samples or (norm.keep == "output" and layout.I * layout.D == 1)
    if not of_batch:
        running_mean = running_var = None
    counted = batches if own and running_mean is not None and _can_count(batches, x) else None
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        mean, rstd, xhat = norm_act.norm_act_fwd(
            x, z, layout, weight, bias, running_mean=running_mean, running_var=running_var, training=own,
            momentum=norm.momentum, eps=norm.eps, act=norm.act,
            kept=None if kept is None else (kept.slots, kept.count), residual=residual,
            batches=counted,
            # An op that writes over x keeps no mean.  The means of samples are needed to move running statistics.
            keep_mean=own and (out is not x or not of_batch),
        )  # fmt: skip
    if counted is not None:
        torch.autograd.graph.increment_version(counted)
    elif batches is not None:
        batches.add_(1)
    if not own and norm.keep == "input":
        assert running_mean is not None
        mean = running_mean.to(rstd.dtype, copy=True)
    if own and not of_batch and given.running_mean is not None:
        move_running(given, norm, mean, variance_of(rstd, norm), layout.N * layout.S)
    return z, Statistics(mean, rstd, xhat)


@checked("norm", exact.recompute_kind, exact.recompute, exact.before_recompute)
def recompute(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None) -> Tensor:
    norm_act, _ = _kernels()
    x = given.x
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        norm_act.norm_act_rebuild(
            x, z, _layout(x, norm), given.weight, given.bias, mean=stats.mean, rstd=stats.rstd, act=norm.act,
            residual=given.residual,
        )  # fmt: skip
    return z


@checked("norm", exact.backward_kind, exact.backward, exact.before_backward)
def backward(
    incoming: OutputGradient,
    given: Operands,
    stats: Statistics,
    norm: Norm,
    kept: Kept | None,
    needs: Needs,
    exchange: Exchange | None,
) -> Gradients:
    _, kernels = _kernels()
    source, weight, bias, residual = given[:4]
    _, need_weight, need_bias, writes_g, _ = needs
    if norm.keep == "input":
        # The kernels of an op that keeps its input write g whenever there is a residual.
        writes_g = residual is not None
    (dz, into, also, spare), layout = incoming, _layout(source, norm)
    pitch = dresidual = None
    if writes_g:
        over = also is not None and spare and also.stride() == source.stride()
        dresidual = also if over else torch.empty_like(source)
    if also is not None:
        pitch = _pitch(also, source, layout)
        if pitch is None:
            dz, also = torch.add(dz, also, out=into) if into is dz else dz + also, None
    parameter = None if not (need_weight or need_bias) else bias if weight is None else weight
    tensors = dz, source, layout, weight, bias, stats.rstd, stats.xhat
    options = {
        "kept": None if kept is None else (kept.slots, kept.count),
        "act": norm.act,
        "dparam_dtype": None if parameter is None else parameter.dtype,
        "dx": into,
        "mean": stats.mean,
        "residual": residual,
        "dresidual": dresidual,
    }
    with launching(source):
        if exchange is None:
            dx, dweight, dbias = kernels.norm_act_bwd(
                *tensors, training=norm.own, also=also, pitch=pitch, **options
            )  # fmt: skip
        else:
            dx, dweight, dbias = kernels.norm_act_bwd_of_all_processes(*tensors, exchange=exchange, **options)
    return Gradients(dx, dweight, dbias, dresidual)


def _pitch(also: Tensor, x: Tensor, layout: Layout) -> int | None:
    """How far the rows of a second gradient are apart, or the number of channels; None if no kernel reads it."""
    if also.stride() == x.stride():
        return layout.C
    pitch = pitch_of(also) if layout.rows else None
    return pitch if pitch is not None and pitch * also.element_size() % 16 == 0 else None


@checked("norm", exact.moments_kind, exact.moments)
def moments(x: Tensor) -> Tensor:
    from ...kernels.norm_stats import few, norm_stats

    layout = layout_of(x)
    assert layout is not None
    with launching(x):
        return few(norm_stats(x, layout), layout.C).transpose(0, 1)


def _can_count(batches: Tensor | None, x: Tensor) -> bool:
    """Whether a kernel can add to ``batches``: it must be one int64 on the device of ``x``, as in the stock norm."""
    return batches is not None and batches.dtype == torch.int64 and batches.numel() == 1 and batches.device == x.device
