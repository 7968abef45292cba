"""Norm, residual and activation in one op: z = phi(weight * (x - mean) * rstd + bias [+ residual]).

A mean and a variance belong to a channel (BatchNorm, Ioffe and Szegedy 2015), to a channel of one sample (InstanceNorm,
Ulyanov et al. 2016), to a group of one sample's channels (GroupNorm, Wu and He 2018), or to a channel over the batches
of several processes (``sync.py``).  ``Spec.keep`` says which tensors are kept for backward beside the parameters:

    "output"   z, which is written over x, rstd, and xhat of the kept channels (``kept.py``).  Source: Rota Bulo,
               Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
               equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm.
    "input"    x and two vectors of statistics, and the residual if there is an activation.

Eager calls go through ``NormFunction``.  Autograd cannot be registered on an op that overwrites its input.  So under
``torch.compile`` there is the functional op ``fusedseg::norm``, which does not change x.  It keeps its output.  Both
call ``forward`` and ``backward`` of ``passes.py``.  A norm that keeps its input is stock functions under
``torch.compile`` (``stock.py``), unless its statistics are those of all processes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...activation import TABLE, Activation
from .. import double_backward, reuse, unfused
from ..double_backward import differentiated_once
from ..layout import dense, laid_out, like
from . import stock
from .call import (
    Gradients,
    Needs,
    Norm,
    Operands,
    OutputGradient,
    Statistics,
    move_running,
    statistics_count,
    stats_dtype,
    variance_of,
)
from .kept import Kept
from .passes import backward, fits, forward


class NormFunction(torch.autograd.Function):
    """The norm op in eager mode.

    ``tensors`` are x, weight and bias of ``given``, followed by residual and slope unless both are None.  They are
    passed once more because autograd sees only tensors that are arguments themselves.  ``done`` has the statistics if x
    is the output already, which a convolution has computed; otherwise it is None.
    """

    @staticmethod
    def forward(ctx, given, norm, kept, done, *tensors):
        x, weight, bias, residual, slope, *_ = given
        in_place = norm.keep == "output"
        source = x if x.is_contiguous() else dense(x)[0]
        laid = None if residual is None else like(residual, source)
        if source is not x or laid is not residual:
            given = given._replace(x=source, residual=laid)
        if done is None:
            z, stats = forward(given, norm, kept, source if in_place else None)
        else:
            z, stats = source, done
        mean, *more, _ = stats
        passed_on = residual is not None and TABLE[norm.act.name].identity
        if in_place:
            if source is x:
                ctx.mark_dirty(x)
            source, residual, mean = z, laid, None
        elif passed_on:
            # The identity activation needs no output in backward, so the residual is not kept.
            residual = None
        ctx.call = norm, source.stride(), kept, passed_on
        ctx.save_for_backward(source, weight, bias, residual, slope, mean, *more)
        if norm.process_group is None:
            # As in the stock functions, a missing gradient of the output gives no gradients of the inputs.  An
            # optimizer would treat zeros as a gradient.  Processes that share their statistics must all take part in
            # backward, so they get zeros in place of a missing gradient.
            ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx, dz):
        if dz is None:
            return (None,) * len(ctx.needs_input_grad)
        norm, stride, kept, passed_on = ctx.call
        tensors = list(ctx.saved_tensors)
        if tensors[0].stride() != stride:
            # Hooks need not keep strides: those of ``save_on_cpu(pin_memory=True)`` make all tensors contiguous.
            tensors[0] = laid_out(tensors[0], stride)
        # Residual and slope are not among the arguments if both are None.
        need_x, need_weight, need_bias, *more = ctx.needs_input_grad[4:]
        need_residual, need_slope = more or (False, False)
        into = None
        if reuse.is_large(dz):
            if fits(dz, tensors[0], norm) and reuse.alone([dz], gradient=True):
                into = dz
            elif norm.keep == "output" and reuse.alone(tensors):
                into = tensors[0].detach()
        needs = need_x, need_weight, need_bias, need_residual and not passed_on, need_slope

        def gradients(dz, *saved):
            incoming = OutputGradient(dz, into)
            return backward(incoming, Operands(*saved[:5]), Statistics(*saved[5:]), norm, kept, needs).wanted(needs)

        # All saved tensors are passed, because a graph of the gradients must lead back to each of them.
        dx, dweight, dbias, dresidual, dslope = differentiated_once(norm.name, gradients, dz, *tensors)
        if passed_on and need_residual:
            dresidual = dz
        return None, None, None, None, dx, dweight, dbias, dresidual, dslope


# ``Function.apply`` first looks for transforms of ``torch.func`` and their tensors, which the checks refuse.
_apply = super(torch.autograd.Function, NormFunction).apply


def normalise_eagerly(given: Operands, norm: Norm, kept: Kept | None = None, done: Statistics | None = None) -> Tensor:
    """``normalise`` for a call that is neither compiled, nor exported, nor traced.

    ``done`` has the statistics if a convolution has normalised and activated ``given.x`` already.
    """
    x, weight, bias, residual, slope, *_ = given
    if not norm.own:
        norm = norm.of_given()
    if norm.keep == "input" and not x.is_contiguous():
        # Autograd must see a copy, because it is kept.
        x, _ = dense(x)
        given = given.with_x(x)
    # The work of autograd grows with the number of arguments.
    more = () if residual is None and slope is None else (residual, slope)
    return _apply(given, norm, kept, done, x, weight, bias, *more)


# The fields of a ``Norm`` in the schemas of both ops, in the order of ``fields_of``.
_SPEC = (
    "str keep, str activation, float activation_param, float eps, bool own, str kind, SymInt groups, str? process_group"
)


def fields_of(norm: Norm) -> tuple:
    """The fields of a norm as arguments of the ops.

    The momentum is left out, because the ops move no running statistics.
    """
    return norm.keep, *norm.act, norm.eps, norm.own, norm.kind, norm.groups, norm.process_group


def _norm_of(keep, activation, activation_param, eps, own, kind, groups, process_group) -> Norm:
    """Builds a norm from the arguments that ``fields_of`` lists."""
    act = Activation(activation, activation_param)
    return Norm(keep, act, eps=eps, own=own, kind=kind, groups=groups, process_group=process_group)


def norm_of_call(call: Sequence[Any]) -> Norm:
    """The norm of a call of ``norm_op``, from all its arguments."""
    return _norm_of(*call[9:])


def _kept_of(slots: Tensor | None, count: int) -> Kept | None:
    return None if slots is None else Kept(slots, count)


# The arguments of the functional op.
ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? slope, Tensor? mean, Tensor? var, "
    f"Tensor? slots, SymInt kept_count, {_SPEC}"
)


@torch.library.custom_op(
    "fusedseg::norm",
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def norm_op(*call):
    """The functional op.  It moves no running statistics, and uses ``mean`` and ``var`` if ``own`` is False.

    Returns z, the statistics in one tensor, and xhat of the kept channels (flat, empty if there are none).  The rows of
    the statistics are the mean and rstd; for statistics of all processes, ``share`` and ``total`` follow.
    """
    given, kept, norm = Operands(*call[:7]), _kept_of(*call[7:9]), _norm_of(*call[9:])
    source, _ = dense(given.x)
    given = given._replace(x=source, residual=None if given.residual is None else like(given.residual, source))
    out = torch.empty_like(source) if norm.keep == "output" else None
    z, (mean, rstd, xhat, share, total) = forward(given, norm, kept, out)
    # An implementation need not return the mean that was passed to it.
    if given.running_mean is not None and norm.keep == "output":
        mean = given.running_mean.to(rstd.dtype)
    assert mean is not None
    rows = [mean, rstd] if total is None or share is None else [mean, rstd, share, total]
    return z, torch.stack(rows), source.new_empty(0) if xhat is None else xhat


@norm_op.register_fake
def _(*call):
    x, _ = dense(call[0])
    slots, kept_count, norm = *call[7:9], _norm_of(*call[9:])
    rows = 2 if norm.process_group is None else 4
    stats = x.new_empty((rows, statistics_count(x, norm)), dtype=stats_dtype(x))
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
    (source, *parameters), (stats, xhat), kept, norm = call[:5], call[5:7], _kept_of(*call[7:9]), _norm_of(*call[11:])
    affine, residual_wanted = call[9:11]
    given = Operands(dense(source)[0], *parameters)
    mean, rstd, *of_all = stats
    found = Statistics(
        mean if norm.keep == "input" else None,
        rstd,
        xhat if kept is not None else None,
        of_all[0] if of_all else None,
    )
    needs = (
        True,
        affine and given.weight is not None,
        affine and given.bias is not None,
        residual_wanted,
        given.slope is not None,
    )
    grads = backward(OutputGradient(dz), given, found, norm, kept, needs).wanted(needs)
    return [given.x.new_empty(0) if grad is None else grad for grad in grads]


@norm_backward_op.register_fake
def _(dz, source, weight, bias, residual, slope, *rest):
    source, _ = dense(source)
    affine, residual_wanted = rest[4:6]
    vectors = (weight, bias) if affine else (None, None)
    like_each = (source, *vectors, source if residual_wanted else None, slope)
    return [source.new_empty(0) if v is None else torch.empty_like(v) for v in like_each]


def parts_of(call: tuple) -> tuple[Operands, Tensor | None, Norm]:
    """The tensors of a call of the functional op, the slots of kept channels, and what the op computes."""
    return Operands(*call[:7]), call[7], norm_of_call(call)


def as_stock(*call):
    """The functional op as stock functions with their own backward, which keeps the input in place of the output."""
    given, slots, norm = parts_of(call)
    if not stock.serves(given.x, norm, slots):
        return norm_op(*call)
    z, stats = stock.forward(given, norm)
    return z, stats.detach(), z.new_empty(0)


def _op_setup_context(ctx, inputs, output):
    x, weight, bias, residual, slope, _, _, slots, kept_count, *flat_norm = inputs
    z, stats, xhat = output
    norm = _norm_of(*flat_norm)
    ctx.mark_non_differentiable(stats, xhat)
    ctx.norm, ctx.kept_count = norm, kept_count
    ctx.passed_on = residual is not None and TABLE[norm.act.name].identity
    if norm.keep == "output":
        ctx.save_for_backward(z, weight, bias, residual, None, stats, xhat, slots)
    else:
        residual = None if ctx.passed_on else residual
        ctx.save_for_backward(x, weight, bias, residual, slope, stats, None, None)


def _op_backward(ctx, dz, *unused):
    needs: Needs = ctx.needs_input_grad[:5]
    affine, residual = needs[1] or needs[2], needs[3] and not ctx.passed_on
    grads = norm_backward_op(dz, *ctx.saved_tensors, ctx.kept_count, affine, residual, *fields_of(ctx.norm))
    dx, dweight, dbias, dresidual, dslope = Gradients(*grads).wanted(needs)
    if ctx.passed_on and needs[3]:
        dresidual = dz
    return dx, dweight, dbias, dresidual, dslope, *(None,) * 12


def _op_backward_setup_context(ctx, inputs, output):
    ctx.name = _norm_of(*inputs[-len(Norm._fields) :]).name


def _op_backward_twice(ctx, *grads):
    raise RuntimeError(double_backward.message(ctx.name))


norm_op.register_autograd(_op_backward, setup_context=_op_setup_context)
norm_backward_op.register_autograd(_op_backward_twice, setup_context=_op_backward_setup_context)


def normalise(given: Operands, norm: Norm, kept: Kept | None = None) -> Tensor:
    """The op on checked arguments.

    In eager mode an op that keeps its output overwrites x.  Under ``torch.compile`` it does not change x, and x is
    freed because no graph saves it.
    """
    residual, batches = given.residual, given.batches
    if residual is not None and residual.dtype != given.x.dtype:
        given = given.with_residual(residual.to(given.x.dtype))
    exported = norm.process_group is None and unfused.wanted()
    if not exported and not torch.compiler.is_compiling():
        return normalise_eagerly(given, norm, kept)
    # A list of kept channels changes during training, and would compile the op anew.
    keeps_input = norm.process_group is None and (norm.keep == "input" or kept is not None)
    stock_functions = exported or keeps_input
    z = stock.norm_act(given, norm) if stock_functions else _functional(given, norm.of_given(), kept)
    if batches is not None:
        batches.add_(1)
    return z


def _functional(given: Operands, norm: Norm, kept: Kept | None) -> Tensor:
    """Calls the functional op, and moves the running statistics."""
    x, *more, running_mean, running_var, _ = given
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    running = (None, None) if norm.own else (running_mean, running_var)
    z, stats, _ = norm_op(x, *more, *running, slots, count, *fields_of(norm))
    if norm.own:
        mean, rstd, *of_all = stats
        values = x.numel() // statistics_count(x, norm) if x.numel() else 0
        move_running(given, norm, mean, variance_of(rstd, norm), of_all[1] if of_all else values)
    return z
