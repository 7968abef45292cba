"""Norm, residual and activation in one op: z = phi(weight * (x - mean) * rstd + bias [+ residual]).

A mean and a variance belong to a channel (BatchNorm, Ioffe and Szegedy 2015), to a channel of one sample (InstanceNorm,
Ulyanov et al. 2016), to a group of one sample's channels (GroupNorm, Wu and He 2018), or to a channel over the batches
of several processes (``sync.py``).  ``Spec.keep`` says which tensors are kept for backward beside the parameters:

    "output"   z, which is written over x, rstd, and xhat of the kept channels (``kept.py``).  Source: Rota Bulo,
               Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
               equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm.
    "input"    x and two vectors of statistics, and the residual if there is an activation.

Eager calls go through ``NormFunction`` of ``eager.py``.  Autograd cannot be registered on an op that overwrites its
input.  So under ``torch.compile`` there is the functional op ``fusedseg::norm`` of this file, which does not change x.
It keeps its output.  A norm that keeps its input is stock functions there (``stock.py``), unless its statistics are
those of all processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...activation import TABLE, Activation
from .. import double_backward, unfused
from ..layout import dense, like
from . import stock
from .eager import normalise_eagerly
from .kept import Kept
from .passes import backward, forward
from .spec import (
    Normalised,
    Passed,
    Saved,
    Spec,
    Wanted,
    move_running,
    of_inputs,
    statistics_count,
    stats_dtype,
)
from .stock import norm_act

# The fields of a ``Spec`` in the schemas of both ops, in the order of ``flat``.
_SPEC = (
    "str keep, str activation, float activation_param, float eps, bool own, str kind, SymInt groups, str? process_group"
)


def flat(spec: Spec) -> tuple:
    """The fields of a spec as arguments of the ops.

    The momentum is left out, because the ops move no running statistics.
    """
    return spec.keep, *spec.act, spec.eps, spec.own, spec.kind, spec.groups, spec.process_group


def _spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group) -> Spec:
    """Builds a spec from the arguments that ``flat`` lists."""
    act = Activation(activation, activation_param)
    return Spec(keep, act, eps=eps, own=own, kind=kind, groups=groups, process_group=process_group)


def spec_of_call(call: Sequence[Any]) -> Spec:
    """The spec of a call of ``norm_op``, from all its arguments."""
    return _spec_of(*call[9:])


def _kept_of(slots: Tensor | None, count: int) -> Kept | None:
    return None if slots is None else Kept(slots, count)


@torch.library.custom_op(
    "fusedseg::norm",
    mutates_args=(),
    schema="(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? slope, Tensor? mean, Tensor? var, "
    f"Tensor? slots, SymInt kept_count, {_SPEC}) -> (Tensor, Tensor, Tensor)",
)
def norm_op(*call):
    """The functional op.  It moves no running statistics, and uses ``mean`` and ``var`` if ``own`` is False.

    Returns z, the statistics of ``Normalised`` in one tensor, and xhat of the kept channels (flat, empty if there are
    none).
    """
    passed, kept, spec = Passed(*call[:7]), _kept_of(*call[7:9]), _spec_of(*call[9:])
    source, layout = dense(passed.x)
    passed = passed._replace(x=source, residual=None if passed.residual is None else like(passed.residual, source))
    out = torch.empty_like(source) if spec.keep == "output" else None
    z, found, second, xhat, total, share, _ = forward(passed, spec, spec.layout(source, layout), kept, out)
    # A backend need not return the mean that was passed to it.
    if passed.running_mean is not None and spec.keep == "output":
        found = passed.running_mean.to(second.dtype)
    assert found is not None
    rows = [found, second] if total is None or share is None else [found, second, total, share]
    return z, torch.stack(rows), source.new_empty(0) if xhat is None else xhat


@norm_op.register_fake
def _(*call):
    x, _ = dense(call[0])
    slots, kept_count, spec = *call[7:9], _spec_of(*call[9:])
    rows = 2 if spec.process_group is None else 4
    stats = x.new_empty((rows, statistics_count(x, spec)), dtype=stats_dtype(x))
    return torch.empty_like(x), stats, x.new_empty(0 if slots is None else x.numel() // x.shape[1] * kept_count)


@torch.library.custom_op(
    "fusedseg::norm_backward",
    mutates_args=(),
    schema="(Tensor dz, Tensor source, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? slope, Tensor stats, "
    "Tensor? xhat, Tensor? slots, SymInt kept_count, bool affine_wanted, bool residual_wanted, "
    f"{_SPEC}) -> Tensor[]",
)
def norm_backward_op(dz, *call):
    """dx, dweight, dbias, dresidual and dslope.  An empty tensor stands for a gradient that is not wanted."""
    exists, (stats, xhat), kept, spec = call[:5], call[5:7], _kept_of(*call[7:9]), _spec_of(*call[11:])
    wanted = Wanted(*call[9:11])
    source, layout = dense(exists[0])
    mean, second, *of_all = stats
    share = of_all[1] if of_all else None
    if of_all and spec.keep == "output":
        second = torch.rsqrt(second + spec.eps)
    mean, xhat = mean if spec.keep == "input" else None, xhat if kept is not None else None
    saved = Saved._make((source, *exists[1:], mean, second, xhat, share))
    grads = backward(dz, saved, spec, spec.layout(source, layout), kept, wanted)
    asked = True, wanted.affine, wanted.affine, wanted.residual, True
    return [
        source.new_empty(0) if grad is None or t is None or not ask else grad
        for grad, t, ask in zip(grads, exists, asked, strict=True)
    ]


@norm_backward_op.register_fake
def _(dz, source, weight, bias, residual, slope, *rest):
    source, _ = dense(source)
    affine, residual_wanted = rest[4:6]
    vectors = (weight, bias) if affine else (None, None)
    like_each = (source, *vectors, source if residual_wanted else None, slope)
    return [source.new_empty(0) if v is None else torch.empty_like(v) for v in like_each]


def as_stock(*call):
    """The functional op as stock functions with their own backward, which keeps the input in place of the output."""
    passed, slots, spec = Passed(*call[:7]), call[7], _spec_of(*call[9:])
    if not stock.serves(passed.x, spec, slots):
        return norm_op(*call)
    z, stats = stock.forward(passed, spec)
    return z, stats.detach(), z.new_empty(0)


def _op_setup_context(ctx, inputs, output):
    x, weight, bias, residual, slope, _, _, slots, kept_count, *flat_spec = inputs
    z, stats, xhat = output
    spec = _spec_of(*flat_spec)
    ctx.mark_non_differentiable(stats, xhat)
    ctx.spec, ctx.kept_count = spec, kept_count
    ctx.passed_on = residual is not None and TABLE[spec.act.name].identity
    if spec.keep == "output":
        ctx.save_for_backward(z, weight, bias, residual, None, stats, xhat, slots)
    else:
        residual = None if ctx.passed_on else residual
        ctx.save_for_backward(x, weight, bias, residual, slope, stats, None, None)


def _op_backward(ctx, dz, *unused):
    needs, spec = ctx.needs_input_grad, ctx.spec
    affine, residual = needs[1] or needs[2], needs[3] and not ctx.passed_on
    grads = norm_backward_op(dz, *ctx.saved_tensors, ctx.kept_count, affine, residual, *flat(spec))
    return *of_inputs(grads, dz if ctx.passed_on else None, needs), *(None,) * 12


def _op_backward_setup_context(ctx, inputs, output):
    ctx.name = _spec_of(*inputs[-len(Spec._fields) :]).name


def _op_backward_twice(ctx, *grads):
    raise RuntimeError(double_backward.message(ctx.name))


norm_op.register_autograd(_op_backward, setup_context=_op_setup_context)
norm_backward_op.register_autograd(_op_backward_twice, setup_context=_op_backward_setup_context)


def normalise(passed: Passed, spec: Spec, kept: Kept | None = None) -> Tensor:
    """The op on checked arguments.

    In eager mode an op that keeps its output overwrites x.  Under ``torch.compile`` it does not change x, and x is
    freed because no graph saves it.
    """
    x, residual, batches = passed.x, passed.residual, passed.batches
    if residual is not None and residual.dtype != x.dtype:
        passed = passed.with_residual(residual.to(x.dtype))
    exported = spec.process_group is None and unfused.wanted()
    if not exported and not torch.compiler.is_compiling():
        return normalise_eagerly(passed, spec, kept)
    # A list of kept channels changes during training, and would compile the op anew.
    keeps_input = spec.process_group is None and (spec.keep == "input" or kept is not None)
    stock_functions = exported or keeps_input
    z = norm_act(passed, spec) if stock_functions else _functional(passed, spec.of_given(), kept)
    if batches is not None:
        batches.add_(1)
    return z


def _functional(passed: Passed, spec: Spec, kept: Kept | None) -> Tensor:
    """Calls the functional op, and moves the running statistics."""
    x, *more, running_mean, running_var, _ = passed
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    running = (None, None) if spec.own else (running_mean, running_var)
    z, stats, _ = norm_op(x, *more, *running, slots, count, *flat(spec))
    if spec.own:
        values = x.numel() // statistics_count(x, spec) if x.numel() else 0
        used, second, *of_all = stats
        move_running(passed, spec, Normalised(z, used, second, None, *of_all), values)
    return z
