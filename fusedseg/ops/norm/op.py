"""Norm, residual and activation in one op: z = phi(weight * (x - mean) * rstd + bias [+ residual]).

A mean and a variance belong to a channel (BatchNorm, Ioffe and Szegedy 2015), to a channel of one sample (InstanceNorm,
Ulyanov et al. 2016), to a group of one sample's channels (GroupNorm, Wu and He 2018), or to a channel over the batches
of several processes (``sync.py``).  ``Spec.keep`` says which tensors are kept for backward beside the parameters:

    "output"   z, which is written over x, rstd, and xhat of the kept channels (``kept.py``).  Source: Rota Bulo,
               Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
               equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm.
    "input"    x and two vectors of statistics, and the residual if there is an activation.

Eager calls go through ``NormFunction``.  Autograd cannot be registered on an op that overwrites its input.  So under
``torch.compile`` the functional op ``fusedseg::norm`` runs, which does not change x.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ...activation import TABLE, Activation
from .. import double_backward, reuse, unfused
from ..double_backward import batched, differentiated_once
from ..layout import dense, like
from ..recompute import recipes
from ..recompute.codes import with_codes
from . import coded, packed
from .kept import Kept
from .passes import again_in_place, backward, fits, forward, offer_output
from .spec import Normalised, Passed, Saved, Spec, Wanted, move_running, of_inputs, statistics_count, stats_dtype


class NormFunction(torch.autograd.Function):
    """The autograd function of the norm op.  It keeps the tensors of ``Saved``.

    ``call`` holds ``Passed``, the layout of x or None, ``Spec``, the kept channels, ``done``, ``saved`` and ``copy``.
    A layout says that x is dense.  If a convolution has computed the output already, x is that output, and ``done``
    holds rstd and xhat of the kept channels; otherwise ``done`` is None.  ``saved`` is None, or a list to which the
    call appends a ``Saved``, from which other code may rebuild z.  ``copy`` is None, or the ``Copy`` (``coded.py``)
    that forward writes if it can.
    ``tensors`` are x, weight and bias, followed by residual and slope unless both are None.  They are passed once more
    because autograd sees only tensors that are arguments themselves.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        passed, layout, spec, kept, done, for_others, copy = call
        x, weight, bias, residual, slope, _, _, batches = passed
        in_place = spec.keep == "output"
        source, layout = dense(x) if layout is None else (x, layout)
        if spec.kind != "batch":
            layout = spec.layout(source, layout)
        laid = None if residual is None else like(residual, source)
        if source is not x or laid is not residual:
            passed = passed._replace(x=source, residual=laid)
        mean = share = None
        if done is not None:
            z, (second, xhat) = source, done
        else:
            given = passed, spec, layout, kept, source if in_place else None
            found = (None if copy is None else coded.forward(*given, copy)) or forward(*given)
            z, mean, second, xhat, total, share, counted = found
            if total is not None:
                move_running(passed, spec, found, 0)
                second = torch.rsqrt(second + spec.eps) if in_place else second
            if batches is not None and not counted:
                batches.add_(1)
        passed_on = residual is not None and TABLE[spec.act.name].identity
        ctx.call = spec, layout, kept, passed_on, in_place and reuse.wanted(), copy is not None and copy.is_read
        if in_place:
            residual, mean = laid, None
            if source is x:
                ctx.mark_dirty(x)
            source = z
        elif passed_on:
            # The identity activation needs no output in backward, so the residual is not kept.
            residual = None
        saved = Saved(source, weight, bias, residual, slope, mean, second, xhat, share=share)
        ctx.save_for_backward(*saved)
        if spec.process_group is None:
            # As in the stock functions, a missing gradient of the output gives no gradients of the inputs.  An
            # optimizer would treat zeros as a gradient.  Processes that share their statistics must all take part in
            # backward, so they get zeros in place of a missing gradient.
            ctx.set_materialize_grads(False)
        if for_others is not None:
            for_others.append(saved)
        return z

    @staticmethod
    def backward(ctx, dz):
        if dz is None:
            return (None,) * len(ctx.needs_input_grad)
        # The reader must be asked first, because reading the saved tensors may drop the rebuilt output.
        reader = getattr(ctx, "reader", None)
        output = None if reader is None else reader.take()
        spec, layout, kept, passed_on, reused, is_coded = ctx.call
        recorded = torch.is_grad_enabled()
        codes = None
        if is_coded and not (recorded or batched((dz,))):
            tensors, codes = with_codes(ctx)
        else:
            tensors = list(ctx.saved_tensors)
        # Residual and slope are not among the arguments if both are None.
        _, need_x, need_weight, need_bias, *more = ctx.needs_input_grad
        need_residual, need_slope = more or (False, False)
        into = reuse.take(tensors[0], dz) if reused and not recorded else None
        if into is None and reuse.is_large(dz):
            if fits(dz, tensors[0], spec) and reuse.alone([dz], 0, gradient=True):
                into = dz
            elif codes is None and spec.keep == "output" and reuse.alone(tensors, 0):
                into = tensors[0].detach()
        rebuilt = None if output is None else [output]
        del output  # so that the code that takes it off the list frees it
        wanted = Wanted(need_weight or need_bias, need_residual and not passed_on, into, None, rebuilt)
        if recorded or batched((dz,)):
            # All saved tensors are passed, because the graph of the gradients must lead back to each of them.
            grads = differentiated_once(
                spec.name, lambda dz, *tensors: backward(dz, Saved(*tensors), spec, layout, kept, wanted), dz, *tensors
            )
        elif codes is not None:
            grads = coded.backward(dz, codes, Saved(*tensors), spec, layout, kept, wanted)
        else:
            grads = backward(dz, Saved(*tensors), spec, layout, kept, wanted)
        needs = need_x, need_weight, need_bias, need_residual, need_slope
        return None, *of_inputs(grads, dz if passed_on else None, needs)


# ``Function.apply`` first looks for transforms of ``torch.func`` and their tensors, which the checks refuse.
_apply = super(torch.autograd.Function, NormFunction).apply


def _packing(call, x: Tensor, *others: Tensor | None) -> Tensor:
    """``_apply`` where a scope with ``bits`` may pack what the op saves."""
    registry = recipes.packing()
    if registry is None:
        return _apply(call, x, *others)
    return packed.recorded(registry, lambda copy: _apply((*call[:-1], copy), x, *others), x, call)


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
    given = passed.running_mean is not None and spec.keep == "output"
    used: Any = passed.running_mean.to(second.dtype) if given else found  # type: ignore[union-attr]
    rows = [used, second] if total is None or share is None else [used, second, total, share]
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
    exported = spec.process_group is None and unfused.wanted()
    if not exported and not torch.compiler.is_compiling():
        return normalise_eagerly(passed, spec, kept)
    x, residual, batches = passed.x, passed.residual, passed.batches
    if residual is not None and residual.dtype != x.dtype:
        passed = passed.with_residual(residual.to(x.dtype))
    z = unfused.norm_act(passed, spec) if exported else _compiled(passed, _of_given(spec), kept)
    if batches is not None:
        batches.add_(1)
    return z


def normalise_eagerly(passed: Passed, spec: Spec, kept: Kept | None = None) -> Tensor:
    """``normalise`` for a call that is neither compiled, nor exported, nor traced."""
    x, weight, bias, residual, slope, _, _, _ = passed
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
        passed = passed._replace(residual=residual)
    spec = spec if spec.own or spec.kind == "batch" else _of_given(spec)
    saved: list[Saved] | None = None
    registry = layout = None
    again: Any = None
    if spec.keep == "output":
        if _torch.len_torch_function_stack():
            # A rebuild must not wait for other processes.
            if recipes.BUDGETED and spec.process_group is None and recipes.has_recipe(x):
                again = again_in_place(passed, spec)
            else:
                recipes.changing(x)
    else:
        x, layout = dense(x)
        passed = passed if x is passed.x else passed._replace(x=x)
        registry = recipes.active()
        saved = None if registry is None else []
    call = passed, layout, spec, kept, None, saved, None
    # The work of autograd grows with the number of arguments.
    more = () if residual is None and slope is None else (residual, slope)
    if again is not None:
        # A convolution that runs twice has computed x.  What this op saves is rebuilt from that convolution.
        with _torch.DisableTorchFunction(), recipes.rewriting(x, again[0], *again[2], overwrite=again[1]):
            return _apply(call, x, weight, bias, *more)
    bare = None if registry is None or more else registry.bares(x)
    if registry is not None and bare is not None:
        z, _ = registry.call_bare(bare, _apply, (call, x, weight, bias))
    else:
        z = (_packing if recipes.PACKING else _apply)(call, x, weight, bias, *more)
    if saved:
        offer_output(z, saved[0], residual, spec, registry)
    return z


def _of_given(spec: Spec) -> Spec:
    """The spec of the call as a batch norm if statistics are passed in, because they are the same for every sample."""
    return spec if spec.own or spec.kind == "batch" else spec.as_batch_norm()


def _compiled(passed: Passed, spec: Spec, kept: Kept | None) -> Tensor:
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


def after_convolution(passed: Passed, spec: Spec, kept: Kept | None, done: Sequence[Tensor | None]) -> Tensor:
    """Makes ``passed.x``, which a convolution has normalised and activated already, the result of this op.

    ``done`` holds rstd, and xhat of the kept channels or None.
    """
    record = _packing if recipes.PACKING else _apply
    return record((passed, None, spec, kept, done, None, None), passed.x, passed.weight, passed.bias)
