"""Norm, residual and activation in one op: z = phi(weight * (x - mean) * rstd + bias [+ residual]).

Mean and variance are those of a channel (BatchNorm), of a channel of one sample (InstanceNorm) or of a group of one
sample's channels (GroupNorm): Ioffe and Szegedy 2015, Ulyanov et al. 2016, Wu and He 2018; or those of a channel over
the batches of several processes (``sync.py``).  ``Spec.keep`` says what is kept for backward beside the parameters:

    "output"   z, which is written over x, and rstd; and xhat of the kept channels (``kept.py``).  Source: Rota Bulo,
               Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
               equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm.
    "input"    x and two vectors of statistics; and the residual, where there is an activation.

Eager calls go through ``NormFunction``.  Autograd cannot be registered on an op that overwrites its input, so under
``torch.compile`` the functional op ``fusedseg::norm`` runs, which leaves x alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...activation import Activation
from .. import double_backward, reuse, unfused
from ..double_backward import differentiated_once
from ..layout import Layout, dense, layout_of, like
from ..recompute import recipes
from . import sync
from .backend import backend_of
from .kept import Kept
from .spec import (
    Gradients,
    Normalised,
    Passed,
    Saved,
    Spec,
    Statistics,
    Wanted,
    move_running,
    statistics_count,
    stats_dtype,
)


def forward(passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
    """The forward pass on a dense x; z is written into ``out`` by an op that keeps its output.

    Moves the running statistics, except towards those of all processes.
    """
    x = passed.x
    if spec.process_group is not None:
        # before anything is written: a collective that fails leaves all as it was
        joint = sync.joint_moments(x, layout, spec.process_group)
        given = passed._replace(running_mean=joint.mean, running_var=joint.second)
        found = forward(given, spec._replace(own=False, process_group=None), layout, kept, out)
        return found._replace(stats=joint)
    if x.numel() == 0:
        zeros = torch.zeros(2, statistics_count(x, spec), dtype=stats_dtype(x), device=x.device)
        return Normalised(torch.empty_like(x) if out is None else out, Statistics(zeros[0], zeros[1]))
    return backend_of(x, spec.act).forward(passed, spec, layout, kept, out)


def rebuild(saved: Saved, spec: Spec) -> Tensor:
    """z of an op that keeps its input, with the bits that it had."""
    x = saved.source
    if x.numel() == 0:
        return torch.empty_like(x)
    if saved.residual is not None:
        saved = saved._replace(residual=like(saved.residual, x))
    layout = layout_of(x)
    assert layout is not None
    return backend_of(x, spec.act).rebuild(saved, spec, spec.layout(x, layout))


def backward(dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted) -> Gradients:
    """The gradients, in the dtypes of the parameters.  ``saved.source`` is dense, and ``layout`` is its layout."""
    source = saved.source
    if saved.share is not None:
        assert spec.process_group is not None
        exchanged = sync.exchange(saved.share, spec.process_group)
        wanted = wanted._replace(exchange=exchanged)
        if source.numel() == 0:
            # the others wait for this one
            exchanged(torch.zeros_like(saved.second), torch.zeros_like(saved.second))
    if source.numel() == 0:
        vectors = (saved.weight, saved.bias) if wanted.affine else (None, None)
        dweight, dbias, dslope = (None if v is None else torch.zeros_like(v) for v in (*vectors, saved.slope))
        return Gradients(
            torch.empty_like(source), dweight, dbias, torch.empty_like(source) if wanted.residual else None, dslope
        )
    if saved.residual is not None:
        saved = saved._replace(residual=like(saved.residual, source))
    return backend_of(source, spec.act).backward(like(dz, source), saved, spec, layout, kept, wanted)


def _saved(found: Normalised, passed: Passed, spec: Spec) -> Saved:
    """What is kept for backward."""
    stats = found.stats
    if spec.keep == "input":
        # behind the identity the residual's gradient is dz, and nothing is computed again
        residual = None if spec.act.name == "identity" else passed.residual
        source, mean, second = passed.x, stats.mean, stats.second
        return Saved(source, passed.weight, passed.bias, residual, passed.slope, mean, second, None, stats.share)
    second = stats.second if stats.total is None else torch.rsqrt(stats.second + spec.eps)
    return Saved(found.z, passed.weight, passed.bias, passed.residual, None, None, second, found.xhat, stats.share)


class Call(NamedTuple):
    """What ``NormFunction`` is given beside tensors that have gradients.

    ``done``: rstd and xhat of the kept channels, where x is the output already, as a convolution has left it.
    ``found``: a list to leave the statistics in, for whoever else may rebuild z.
    """

    spec: Spec
    kept: Kept | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    done: Sequence[Tensor | None] | None = None
    found: list[Saved] | None = None


class NormFunction(torch.autograd.Function):
    """Keeps what ``_saved`` says."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, slope, call):
        spec, in_place = call.spec, call.spec.keep == "output"
        source, layout = dense(x)
        ctx.layout = layout = spec.layout(source, layout)
        laid = None if residual is None else like(residual, source)
        passed = Passed(source, weight, bias, laid, slope, call.running_mean, call.running_var)
        if call.done is not None:
            rstd, xhat = call.done
            found = Normalised(source, Statistics(rstd, rstd), xhat)
        else:
            found = forward(passed, spec, layout, call.kept, source if in_place else None)
            if found.stats.total is not None:
                move_running(passed, spec, found.stats, 0)
        ctx.has_residual, ctx.reuse = residual is not None, False
        if in_place:
            ctx.reuse = reuse.wanted()
            if source is x:
                ctx.mark_dirty(x)
        elif laid is not residual:
            # of other strides than x, it is kept as it is rather than a copy of it
            passed = passed._replace(residual=residual)
        saved = _saved(found, passed, spec)
        ctx.spec, ctx.kept = spec, call.kept
        ctx.save_for_backward(*saved)
        if call.found is not None:
            call.found.append(saved)
        return found.z

    @staticmethod
    def backward(ctx, dz):
        saved, needs, spec = ctx.saved_tensors, ctx.needs_input_grad, ctx.spec
        passed_on = ctx.has_residual and spec.act.name == "identity"
        into = reuse.take(saved[0], dz) if ctx.reuse and not torch.is_grad_enabled() else None
        wanted = Wanted(needs[1] or needs[2], ctx.has_residual and needs[3] and not passed_on, into)
        # flat, since a graph of the gradients leads back to each of these tensors
        rest = spec, ctx.layout, ctx.kept, wanted
        grads = differentiated_once(spec.name, _backward_of_flat, dz, *saved, rest)
        return *_of_inputs(grads, dz if passed_on else None, needs), None


def _backward_of_flat(dz: Tensor, *flat) -> Gradients:
    *saved, rest = flat
    return backward(dz, Saved(*saved), *rest)


def _of_inputs(grads, passed_on: Tensor | None, needs) -> tuple[Tensor | None, ...]:
    """The gradients that autograd asks for, in the order of the op's tensors: x, weight, bias, residual and slope.

    ``passed_on``: the gradient of the residual, where that is dz.
    """
    dx, dweight, dbias, dresidual, dslope = grads
    if passed_on is not None:
        dresidual = passed_on
    five = dx, dweight, dbias, dresidual, dslope
    return tuple(grad if need else None for grad, need in zip(five, needs, strict=False))


@torch.library.custom_op("fusedseg::norm", mutates_args=())
def norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    slots: Tensor | None,
    kept_count: int,
    keep: str,
    activation: str,
    activation_param: float,
    eps: float,
    own: bool,
    kind: str,
    groups: int,
    process_group: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The functional op: z, the vectors of ``Statistics`` in one tensor, and xhat of the kept channels (flat, empty if
    there are none).  Moves no running statistics; ``mean`` and ``var`` are used where ``own`` is False."""
    spec = spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group)
    source, layout = dense(x)
    residual = None if residual is None else like(residual, source)
    passed = Passed(source, weight, bias, residual, slope, mean, var)
    out = torch.empty_like(source) if keep == "output" else None
    found = forward(passed, spec, spec.layout(source, layout), _kept_of(slots, kept_count), out)
    stats = found.stats
    if mean is not None and keep == "output":
        # the backend need not return what it was given
        stats = stats._replace(mean=mean.to(stats.second.dtype))
    rows = [v for v in stats if v is not None]
    return found.z, torch.stack(rows), x.new_empty(0) if found.xhat is None else found.xhat


@norm_op.register_fake
def _(x, weight, bias, residual, slope, mean, var, slots, kept_count, *flat_spec):
    x, _ = dense(x)
    spec = spec_of(*flat_spec)
    rows = 2 if spec.process_group is None else len(Statistics._fields)
    stats = x.new_empty((rows, statistics_count(x, spec)), dtype=stats_dtype(x))
    return torch.empty_like(x), stats, x.new_empty(0 if slots is None else x.numel() // x.shape[1] * kept_count)


@torch.library.custom_op("fusedseg::norm_backward", mutates_args=())
def norm_backward_op(
    dz: Tensor,
    source: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    stats: Tensor,
    xhat: Tensor | None,
    slots: Tensor | None,
    kept_count: int,
    affine_wanted: bool,
    residual_wanted: bool,
    keep: str,
    activation: str,
    activation_param: float,
    eps: float,
    own: bool,
    kind: str,
    groups: int,
    process_group: str | None,
) -> list[Tensor]:
    """dx, dweight, dbias, dresidual, dslope; empty where a gradient is not wanted."""
    spec = spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group)
    source, layout = dense(source)
    mean, second, *of_all = stats
    share = of_all[1] if of_all else None
    if of_all and keep == "output":
        second = torch.rsqrt(second + eps)
    kept = _kept_of(slots, kept_count)
    saved = Saved(
        source, weight, bias, residual, slope, mean if keep == "input" else None, second,
        None if kept is None else xhat, share,
    )  # fmt: skip
    wanted = Wanted(affine_wanted, residual_wanted)
    grads = backward(dz, saved, spec, spec.layout(source, layout), kept, wanted)
    if not residual_wanted:
        grads = grads._replace(dresidual=None)
    return [source.new_empty(0) if v is None else v for v in grads]


@norm_backward_op.register_fake
def _(dz, source, weight, bias, residual, slope, stats, xhat, slots, kept_count, affine, residual_wanted, *flat_spec):
    source, _ = dense(source)
    vectors = (weight, bias) if affine else (None, None)
    like_each = (source, *vectors, source if residual_wanted else None, slope)
    return [source.new_empty(0) if v is None else torch.empty_like(v) for v in like_each]


def spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group) -> Spec:
    """The spec of the ops' flat arguments, which ``flat`` makes."""
    return Spec(keep, Activation(activation, activation_param), eps, 0.0, own, kind, groups, process_group)


def flat(spec: Spec) -> tuple:
    """A spec as the ops take it.  The momentum is missing: the ops move nothing."""
    return spec.keep, *spec.act, spec.eps, spec.own, spec.kind, spec.groups, spec.process_group


def _kept_of(slots: Tensor | None, count: int) -> Kept | None:
    return None if slots is None else Kept(slots, count)


def _op_setup_context(ctx, inputs, output):
    x, weight, bias, residual, slope, _, _, slots, kept_count, *flat_spec = inputs
    z, stats, xhat = output
    spec = spec_of(*flat_spec)
    ctx.mark_non_differentiable(stats, xhat)
    ctx.spec, ctx.kept_count, ctx.has_residual = spec, kept_count, residual is not None
    if spec.keep == "output":
        ctx.save_for_backward(z, weight, bias, residual, None, stats, xhat, slots)
    else:
        residual = None if spec.act.name == "identity" else residual
        ctx.save_for_backward(x, weight, bias, residual, slope, stats, None, None)


def _op_backward(ctx, dz, *unused):
    needs, spec = ctx.needs_input_grad, ctx.spec
    passed_on = ctx.has_residual and spec.act.name == "identity"
    wanted = needs[1] or needs[2], ctx.has_residual and needs[3] and not passed_on
    grads = norm_backward_op(dz, *ctx.saved_tensors, ctx.kept_count, *wanted, *flat(spec))
    return *_of_inputs(grads, dz if passed_on else None, needs), *(None,) * 12


def _op_backward_setup_context(ctx, inputs, output):
    ctx.name = spec_of(*inputs[-len(Spec._fields) :]).name


def _op_backward_twice(ctx, *grads):
    raise RuntimeError(double_backward.message(ctx.name))


norm_op.register_autograd(_op_backward, setup_context=_op_setup_context)
norm_backward_op.register_autograd(_op_backward_twice, setup_context=_op_backward_setup_context)


def normalise(passed: Passed, spec: Spec, kept: Kept | None = None) -> Tensor:
    """The op on checked arguments.

    In eager mode an op that keeps its output overwrites x.  Under ``torch.compile`` it leaves x alone, which is freed
    there because nobody saves it.
    """
    x, weight, bias, residual, slope, running_mean, running_var = passed
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
        passed = passed._replace(residual=residual)
    if spec.process_group is None and unfused.wanted():
        return unfused.norm_act(passed, spec)
    if not spec.own and spec.kind != "batch":
        # statistics that came from elsewhere are the same for every sample
        spec = spec._replace(kind="batch", groups=0)
    if not torch.compiler.is_compiling():
        if spec.keep == "output":
            recipes.changing(x)
            return NormFunction.apply(x, weight, bias, residual, None, Call(spec, kept, running_mean, running_var))
        x, _ = dense(x)
        found: list[Saved] | None = None if recipes.active() is None else []
        call = Call(spec, None, running_mean, running_var, None, found)
        z = NormFunction.apply(x, weight, bias, residual, slope, call)
        if found:
            _offer(z, found[0]._replace(residual=residual), spec)
        return z
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    mean, var = (None, None) if spec.own else (running_mean, running_var)
    z, stats, _ = norm_op(x, weight, bias, residual, slope, mean, var, slots, count, *flat(spec))
    if spec.own:
        values = x.numel() // statistics_count(x, spec) if x.numel() else 0
        move_running(passed, spec, Statistics(*stats), values)
    return z


def _offer(z: Tensor, saved: Saved, spec: Spec) -> None:
    """Lets whoever saves z rebuild it from x and the residual instead."""
    if recipes.active() is None:
        return
    # of parameters, copies, since an optimizer may change them before backward
    vectors = saved.weight, saved.bias, saved.slope
    weight, bias, slope = (None if v is None else v.detach().clone() for v in vectors)
    mean, second = saved.mean, saved.second

    # it holds neither x nor the residual
    def again(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return rebuild(Saved(x, weight, bias, residual, slope, mean, second), spec)

    recipes.offer(z, again, *(t for t in (saved.source, saved.residual) if t is not None))
