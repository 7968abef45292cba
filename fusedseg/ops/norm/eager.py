"""Norm, residual and activation in one op: z = phi(weight * (x - mean) * rstd + bias [+ residual]).

A mean and a variance belong to a channel (BatchNorm, Ioffe and Szegedy 2015), to a channel of one sample (InstanceNorm,
Ulyanov et al. 2016), to a group of one sample's channels (GroupNorm, Wu and He 2018), or to a channel over the batches
of several processes (``sync.py``).  ``Norm.keep`` says which tensors are kept for backward beside the parameters:

    "output"   z, which is written over x, rstd, and xhat of the kept channels (``kept.py``).  Source: Rota Bulo,
               Porzi, Kontschieder, "In-Place Activated BatchNorm for Memory-Optimized Training of DNNs", CVPR 2018,
               equations 5 to 8 (their "InPlace-ABN I"), with the signed weight of BatchNorm.
    "input"    x and two vectors of statistics, and the residual if there is an activation.

Eager calls go through ``NormFunction``.  Autograd cannot be registered on an op that overwrites its input.  So under
``torch.compile`` there is the functional op ``fusedseg::norm`` (``graph.py``), which does not change x.  Both call
``forward`` and ``backward`` of ``dispatch.py``.  A norm that keeps its input is stock functions under ``torch.compile``
(``stock.py``), unless its statistics are those of all processes.
"""

import torch
from torch import Tensor

from ...activation import TABLE
from .. import reuse, unfused
from ..double_backward import differentiated_once
from ..layout import dense, laid_out, like
from . import stock
from .call import BackwardCall, Norm, Operands, Statistics
from .dispatch import backward, fits, forward
from .graph import RUNNING_MEAN, flat, norm_op
from .kept import Kept


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
        mean, *more = stats
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
        # Hooks need not keep strides: those of ``save_on_cpu(pin_memory=True)`` make all tensors contiguous.  This
        # test takes less time than the call.
        if tensors[0].stride() != stride:
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
            given, stats = Operands(*saved[:5]), Statistics(*saved[5:])
            return backward(BackwardCall(dz, given, stats, norm, kept, needs, into)).wanted(needs)

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
    """Calls the op of graphs, and moves the running statistics."""
    x, weight, bias, residual, slope, mean, var, _ = given
    slots, count = (None, 0) if kept is None else (kept.slots, kept.count)
    tensors = (x, weight, bias, residual, mean, var, None, None, slope, slots)
    # The momentum may be a symbol, which is no argument of an op.
    results = norm_op(*tensors, *flat(norm.at_once()), count)
    if norm.own and mean is not None and var is not None:
        with torch.no_grad():
            mean.lerp_(results[RUNNING_MEAN], norm.momentum)
            var.lerp_(results[RUNNING_MEAN + 1], norm.momentum)
    return results[0]
