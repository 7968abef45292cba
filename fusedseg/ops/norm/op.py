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
from typing import Any

import torch
from torch import Tensor

from ...activation import Activation
from .. import double_backward, reuse, unfused
from ..double_backward import differentiated_once
from ..layout import dense, like
from ..recompute import recipes
from .backend import backend_of
from .kept import Kept
from .passes import backward, forward, rebuild
from .spec import Normalised, Passed, Saved, Spec, Wanted, move_running, statistics_count, stats_dtype


class NormFunction(torch.autograd.Function):
    """Keeps the tensors of ``Saved``.

    ``call``: the tensors that are passed, the spec, the kept channels, ``done`` and ``saved``.  ``done`` is rstd and
    xhat of the kept channels where x is the output already, as a convolution has left it, else None.  ``saved`` is a
    list to leave a ``Saved`` in, for whoever else may rebuild z, or None.  ``tensors``: x, weight and bias of those
    passed, and residual and slope unless both are None; autograd sees only what it is given so.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        passed, spec, kept, done, for_others = call
        x, weight, bias, residual, slope, _, _ = passed
        in_place = spec.keep == "output"
        source, layout = dense(x)
        if spec.kind != "batch":
            layout = spec.layout(source, layout)
        laid = None if residual is None else like(residual, source)
        if source is not x or laid is not residual:
            passed = passed._replace(x=source, residual=laid)
        mean, share = None, None
        if done is not None:
            z, (second, xhat) = source, done
        else:
            found = forward(passed, spec, layout, kept, source if in_place else None)
            z, mean, second, xhat, total, share = found
            if total is not None:
                move_running(passed, spec, found, 0)
                second = torch.rsqrt(second + spec.eps) if in_place else second
        ctx.spec, ctx.layout, ctx.kept = spec, layout, kept
        ctx.passed_on = residual is not None and spec.act.name == "identity"
        if in_place:
            residual, mean = laid, None
            if source is x:
                ctx.mark_dirty(x)
            source = z
        elif ctx.passed_on:
            # nothing is computed again behind the identity
            residual = None
        ctx.reuse = in_place and reuse.wanted()
        ctx.reader = None
        ctx.save_for_backward(source, weight, bias, residual, slope, mean, second, xhat, share)
        if for_others is not None:
            for_others.append(Saved(source, weight, bias, None, slope, mean, second))
        return z

    @staticmethod
    def backward(ctx, dz):
        # before the saved tensors: asking for one may drop what is held
        output = ctx.reader.take() if ctx.reader is not None else None
        saved, spec = ctx.saved_tensors, ctx.spec
        # residual and slope are not among the arguments where both are None
        needs = *ctx.needs_input_grad[1:], False, False
        into = reuse.take(saved[0], dz) if ctx.reuse and not torch.is_grad_enabled() else None
        rebuilt = None if output is None else [output]
        del output
        wanted = Wanted(needs[1] or needs[2], needs[3] and not ctx.passed_on, into, rebuilt=rebuilt)
        grads = differentiated_once(spec.name, backward, dz, *saved, (spec, ctx.layout, ctx.kept, wanted))
        return None, *_of_inputs(grads, dz if ctx.passed_on else None, needs)


def _of_inputs(grads, passed_on: Tensor | None, needs) -> tuple[Tensor | None, ...]:
    """The gradients that autograd asks for: those of x, weight, bias, residual and slope, of which ``needs`` says
    which are needed.

    ``passed_on``: the gradient of the residual, where that is dz.
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
    """The functional op: z, the statistics of ``Normalised`` in one tensor, and xhat of the kept channels (flat, empty
    if there are none).  Moves no running statistics; ``mean`` and ``var`` are used where ``own`` is False."""
    spec = spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group)
    source, layout = dense(x)
    residual = None if residual is None else like(residual, source)
    passed = Passed(
        source, weight=weight, bias=bias, residual=residual, slope=slope, running_mean=mean, running_var=var
    )
    out = torch.empty_like(source) if keep == "output" else None
    kept = _kept_of(slots, kept_count)
    z, used, second, xhat, total, share = forward(passed, spec, spec.layout(source, layout), kept, out)
    if mean is not None and keep == "output":
        # the backend need not return what it was given
        used = mean.to(second.dtype)
    rows = [used, second] if total is None or share is None else [used, second, total, share]
    return z, torch.stack(rows), x.new_empty(0) if xhat is None else xhat


@norm_op.register_fake
def _(x, weight, bias, residual, slope, mean, var, slots, kept_count, *flat_spec):
    x, _ = dense(x)
    spec = spec_of(*flat_spec)
    rows = 2 if spec.process_group is None else 4
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
    mean_kept, xhat = mean if keep == "input" else None, xhat if kept is not None else None
    rest = spec, spec.layout(source, layout), kept, Wanted(affine_wanted, residual_wanted)
    grads = backward(dz, source, weight, bias, residual, slope, mean_kept, second, xhat, share, rest)
    asked = True, affine_wanted, affine_wanted, residual_wanted, True
    exists = source, weight, bias, residual, slope
    return [
        source.new_empty(0) if grad is None or t is None or not ask else grad
        for grad, t, ask in zip(grads, exists, asked, strict=True)
    ]


@norm_backward_op.register_fake
def _(dz, source, weight, bias, residual, slope, stats, xhat, slots, kept_count, affine, residual_wanted, *flat_spec):
    source, _ = dense(source)
    vectors = (weight, bias) if affine else (None, None)
    like_each = (source, *vectors, source if residual_wanted else None, slope)
    return [source.new_empty(0) if v is None else torch.empty_like(v) for v in like_each]


def spec_of(keep, activation, activation_param, eps, own, kind, groups, process_group) -> Spec:
    """The spec of the ops' flat arguments, which ``flat`` makes."""
    act = Activation(activation, activation_param)
    return Spec(keep, act, eps=eps, own=own, kind=kind, groups=groups, process_group=process_group)


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
    ctx.spec, ctx.kept_count = spec, kept_count
    ctx.passed_on = residual is not None and spec.act.name == "identity"
    if spec.keep == "output":
        ctx.save_for_backward(z, weight, bias, residual, None, stats, xhat, slots)
    else:
        residual = None if ctx.passed_on else residual
        ctx.save_for_backward(x, weight, bias, residual, slope, stats, None, None)


def _op_backward(ctx, dz, *unused):
    needs, spec = ctx.needs_input_grad, ctx.spec
    affine, residual = needs[1] or needs[2], needs[3] and not ctx.passed_on
    grads = norm_backward_op(dz, *ctx.saved_tensors, ctx.kept_count, affine, residual, *flat(spec))
    return *_of_inputs(grads, dz if ctx.passed_on else None, needs), *(None,) * 12


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
        saved: list[Saved] | None = None
        if spec.keep == "output":
            recipes.changing(x)
        else:
            x, _ = dense(x)
            passed = passed if x is passed.x else passed._replace(x=x)
            saved = None if recipes.active() is None else []
        call = passed, spec, kept, None, saved
        # autograd's own work grows with the number of arguments
        more = () if residual is None and slope is None else (residual, slope)
        z = NormFunction.apply(call, x, weight, bias, *more)
        if saved:
            _offer(z, saved[0], residual, spec)
        return z
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    mean, var = (None, None) if spec.own else (running_mean, running_var)
    z, stats, _ = norm_op(x, weight, bias, residual, slope, mean, var, slots, count, *flat(spec))
    if spec.own:
        values = x.numel() // statistics_count(x, spec) if x.numel() else 0
        used, second, *of_all = stats
        move_running(passed, spec, Normalised(z, used, second, None, *of_all), values)
    return z


def after_convolution(passed: Passed, spec: Spec, kept: Kept | None, done: Sequence[Tensor | None]) -> Tensor:
    """``passed.x``, which a convolution has normalised and activated already, as the result of this op.

    ``done``: rstd, and xhat of the kept channels or None.
    """
    return NormFunction.apply((passed, spec, kept, done, None), passed.x, passed.weight, passed.bias)


def _offer(z: Tensor, saved: Saved, residual: Tensor | None, spec: Spec) -> None:
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

    reader = None
    # the context of ``NormFunction.backward``; None where nothing requires a gradient
    node: Any = z.grad_fn
    if node is not None and backend_of(saved.source, spec.act).reads_output(saved.source, spec.act):
        node.reader = reader = recipes.Reader()
    recipes.offer(z, again, *(t for t in (saved.source, residual) if t is not None), reader=reader)
