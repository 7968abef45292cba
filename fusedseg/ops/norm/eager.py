"""The norm op in eager mode: the autograd function, and the calls of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...activation import TABLE
from .. import reuse
from ..double_backward import differentiated_once
from ..layout import Layout, dense, laid_out, like
from .kept import Kept
from .passes import backward, fits, forward
from .spec import Passed, Saved, Spec, Wanted, move_running, of_inputs


@dataclass(eq=False, slots=True)
class NormCall:
    """One call of the norm op.

    layout: that of x, which is dense then; or None.
    done: rstd, and xhat of the kept channels, if x is the output already, which a convolution has computed; or None.
    """

    passed: Passed
    layout: Layout | None
    spec: Spec
    kept: Kept | None
    done: Sequence[Tensor | None] | None

    def run(self) -> Tensor:
        x, weight, bias, residual, slope, _, _, _ = self.passed
        # The work of autograd grows with the number of arguments.
        if residual is None and slope is None:
            return _apply(self, x, weight, bias)
        return _apply(self, x, weight, bias, residual, slope)


class NormFunction(torch.autograd.Function):
    """The autograd function of the norm op.  It keeps the tensors of ``Saved``.

    ``call`` is a ``NormCall``.  ``tensors`` are x, weight and bias, followed by residual and slope unless both are
    None.  They are passed once more because autograd sees only tensors that are arguments themselves.
    """

    @staticmethod
    def forward(ctx, call, *tensors):
        passed, layout, spec, kept = call.passed, call.layout, call.spec, call.kept
        x, weight, bias, residual, slope, _, _, _ = passed
        in_place = spec.keep == "output"
        source, layout = dense(x) if layout is None else (x, layout)
        if spec.kind != "batch":
            layout = spec.layout(source, layout)
        laid = None if residual is None else like(residual, source)
        if source is not x or laid is not residual:
            passed = passed._replace(x=source, residual=laid)
        if call.done is None:
            z, mean, second, xhat, share = _computed(passed, spec, layout, kept)
        else:
            z, mean, (second, xhat), share = source, None, call.done, None
        passed_on = residual is not None and TABLE[spec.act.name].identity
        if in_place:
            residual, mean = laid, None
            if source is x:
                ctx.mark_dirty(x)
            source = z
        elif passed_on:
            # The identity activation needs no output in backward, so the residual is not kept.
            residual = None
        ctx.call = spec, layout, source.stride(), kept, passed_on
        ctx.save_for_backward(*Saved(source, weight, bias, residual, slope, mean, second, xhat, share=share))
        if spec.process_group is None:
            # As in the stock functions, a missing gradient of the output gives no gradients of the inputs.  An
            # optimizer would treat zeros as a gradient.  Processes that share their statistics must all take part in
            # backward, so they get zeros in place of a missing gradient.
            ctx.set_materialize_grads(False)
        return z

    @staticmethod
    def backward(ctx, dz):
        if dz is None:
            return (None,) * len(ctx.needs_input_grad)
        spec, layout, stride, kept, passed_on = ctx.call
        tensors = list(ctx.saved_tensors)
        if tensors[0].stride() != stride:
            # Hooks need not keep strides: those of ``save_on_cpu(pin_memory=True)`` make all tensors contiguous.
            tensors[0] = laid_out(tensors[0], stride)
        # Residual and slope are not among the arguments if both are None.
        _, need_x, need_weight, need_bias, *more = ctx.needs_input_grad
        need_residual, need_slope = more or (False, False)
        into = None
        if reuse.is_large(dz):
            if fits(dz, tensors[0], spec) and reuse.alone([dz], 0, gradient=True):
                into = dz
            elif spec.keep == "output" and reuse.alone(tensors, 0):
                into = tensors[0].detach()
        wanted = Wanted(need_weight or need_bias, need_residual and not passed_on, into)

        def gradients(dz, *saved):
            return backward(dz, Saved(*saved), spec, layout, kept, wanted)

        # All saved tensors are passed, because a graph of the gradients must lead back to each of them.
        grads = differentiated_once(spec.name, gradients, dz, *tensors)
        needs = need_x, need_weight, need_bias, need_residual, need_slope
        return None, *of_inputs(grads, dz if passed_on else None, needs)


def _computed(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
    """z, mean, the second statistic to keep, xhat of the kept channels and ``Normalised.share``, on a dense x.

    It moves the running statistics.
    """
    in_place = spec.keep == "output"
    found = forward(passed, spec, layout, kept, passed.x if in_place else None)
    z, mean, second, xhat, total, share, counted = found
    if total is not None:
        move_running(passed, spec, found, 0)
        second = torch.rsqrt(second + spec.eps) if in_place else second
    if passed.batches is not None and not counted:
        passed.batches.add_(1)
    return z, mean, second, xhat, share


# ``Function.apply`` first looks for transforms of ``torch.func`` and their tensors, which the checks refuse.
_apply = super(torch.autograd.Function, NormFunction).apply


def normalise_eagerly(passed: Passed, spec: Spec, kept: Kept | None = None) -> Tensor:
    """``normalise`` for a call that is neither compiled, nor exported, nor traced."""
    x, layout = passed.x, None
    if not spec.own:
        spec = spec.of_given()
    if spec.keep == "input":
        dense_x, layout = dense(x)
        passed = passed if dense_x is x else passed._replace(x=dense_x)
    return NormCall(passed, layout, spec, kept, None).run()


def after_convolution(passed: Passed, spec: Spec, kept: Kept | None, done: Sequence[Tensor | None]) -> Tensor:
    """Makes ``passed.x``, which a convolution has normalised and activated already, the result of this op.

    ``done`` holds rstd, and xhat of the kept channels or None.
    """
    return NormCall(passed, None, spec, kept, done).run()
