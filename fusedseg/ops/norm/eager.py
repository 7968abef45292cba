"""The norm op in eager mode: the autograd function, and what the recompute scope is told about its tensors."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ...activation import TABLE
from .. import reuse
from ..double_backward import differentiated_once, is_batch
from ..layout import Layout, dense, laid_out, like
from ..recompute import recipes
from ..recompute.codes import with_codes
from . import coded, packed
from .kept import Kept
from .passes import backward, directly, fits, forward, offer_output
from .spec import Gradients, Passed, Saved, Spec, Wanted, adjacent, move_running, of_inputs


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
        mean = share = by = None
        if done is not None:
            z, (second, xhat) = source, done
        else:
            by = directly(passed, spec)
            given = passed, spec, layout, kept, source if in_place else None
            written = None if copy is None else coded.forward(*given, copy)
            found = (forward if by is None else by.forward)(*given) if written is None else written
            z, mean, second, xhat, total, share, counted = found
            if total is not None:
                move_running(passed, spec, found, 0)
                second = torch.rsqrt(second + spec.eps) if in_place else second
            if batches is not None and not counted:
                batches.add_(1)
        passed_on = residual is not None and TABLE[spec.act.name].identity
        if in_place:
            residual, mean = laid, None
            if source is x:
                ctx.mark_dirty(x)
            source = z
        elif passed_on:
            # The identity activation needs no output in backward, so the residual is not kept.
            residual = None
        is_coded = copy is not None and copy.is_read
        ctx.call = spec, layout, source.stride(), by, kept, passed_on, in_place and reuse.wanted(), is_coded
        saved = source, weight, bias, residual, slope, mean, second, xhat, share
        ctx.save_for_backward(*saved)
        # ``offer_output`` sets it.
        ctx.reader = None
        if spec.process_group is None:
            # As in the stock functions, a missing gradient of the output gives no gradients of the inputs.  An
            # optimizer would treat zeros as a gradient.  Processes that share their statistics must all take part in
            # backward, so they get zeros in place of a missing gradient.
            ctx.set_materialize_grads(False)
        if for_others is not None:
            for_others.append(Saved(*saved))
        return z

    @staticmethod
    def backward(ctx, dz):
        if dz is None:
            return (None,) * len(ctx.needs_input_grad)
        # The reader must be asked first, because reading the saved tensors may drop the rebuilt output.
        output = None if ctx.reader is None else ctx.reader.take()
        spec, layout, stride, by, kept, passed_on, reused, is_coded = ctx.call
        # Whether autograd records a graph of the gradients, or dz is a batch of gradients.
        recorded = torch.is_grad_enabled() or is_batch(dz)
        tensors, codes = with_codes(ctx) if is_coded and not recorded else (list(ctx.saved_tensors), None)
        if tensors[0].stride() != stride:
            # Hooks need not keep strides: those of ``save_on_cpu(pin_memory=True)`` make all tensors contiguous.
            tensors[0] = laid_out(tensors[0], stride)
        # Residual and slope are not among the arguments if both are None.
        _, need_x, need_weight, need_bias, *more = ctx.needs_input_grad
        need_residual, need_slope = more or (False, False)
        into = None
        if reused or reuse.is_large(dz):
            if reused and not recorded:
                into = reuse.take(tensors[0], dz)
            if into is None and fits(dz, tensors[0], spec) and reuse.alone([dz], 0, gradient=True):
                into = dz
            elif into is None and codes is None and spec.keep == "output" and reuse.alone(tensors, 0):
                into = tensors[0].detach()
        rebuilt = None if output is None else [output]
        del output  # so that the code that takes it off the list frees it
        wanted = Wanted(need_weight or need_bias, need_residual and not passed_on, into, None, rebuilt)
        if recorded:
            # All saved tensors are passed, because the graph of the gradients must lead back to each of them.
            grads = differentiated_once(spec.name, partial(_gradients, spec, layout, kept, wanted), dz, *tensors)
        elif codes is not None:
            grads = coded.backward(dz, codes, Saved(*tensors), spec, layout, kept, wanted)
        else:
            direct = by is not None and tensors[3] is None and dz.stride() == stride and adjacent(*tensors[1:3])
            run = by.backward if direct else backward
            grads = run(dz, Saved(*tensors), spec, layout, kept, wanted)
        needs = need_x, need_weight, need_bias, need_residual, need_slope
        return None, *of_inputs(grads, dz if passed_on else None, needs)


def _gradients(spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted, dz: Tensor, *saved: Any) -> Gradients:
    """``backward`` with its tensors last."""
    return backward(dz, Saved(*saved), spec, layout, kept, wanted)


# ``Function.apply`` first looks for transforms of ``torch.func`` and their tensors, which the checks refuse.
_apply = super(torch.autograd.Function, NormFunction).apply


def _packing(call, x: Tensor, *others: Tensor | None) -> Tensor:
    """``_apply`` where a scope with ``bits`` may pack what the op saves."""
    registry = recipes.packing()
    if registry is None:
        return _apply(call, x, *others)
    return packed.recorded(registry, lambda copy: _apply((*call[:-1], copy), x, *others), x, call)


def normalise_eagerly(passed: Passed, spec: Spec, kept: Kept | None = None) -> Tensor:
    """``normalise`` for a call that is neither compiled, nor exported, nor traced."""
    x, weight, bias, residual, slope, _, _, _ = passed
    if residual is not None and residual.dtype != x.dtype:
        residual = residual.to(x.dtype)
        passed = passed._replace(residual=residual)
    spec = spec if spec.own else spec.of_given()
    saved: list[Saved] | None = None
    registry = layout = None
    if spec.keep == "output":
        if _torch.len_torch_function_stack():
            recipes.changing(x)
    else:
        x, layout = dense(x)
        passed = passed if x is passed.x else passed._replace(x=x)
        registry = recipes.active()
        saved = None if registry is None else []
    call = passed, layout, spec, kept, None, saved, None
    # The work of autograd grows with the number of arguments.
    more = () if residual is None and slope is None else (residual, slope)
    bare = None if registry is None or more else registry.bares(x)
    if registry is not None and bare is not None:
        z, _ = registry.call_bare(bare, _apply, (call, x, weight, bias))
    else:
        z = (_packing if recipes.PACKING else _apply)(call, x, weight, bias, *more)
    if saved:
        offer_output(z, saved[0], residual, spec, registry)
    return z


def after_convolution(passed: Passed, spec: Spec, kept: Kept | None, done: Sequence[Tensor | None]) -> Tensor:
    """Makes ``passed.x``, which a convolution has normalised and activated already, the result of this op.

    ``done`` holds rstd, and xhat of the kept channels or None.
    """
    record = _packing if recipes.PACKING else _apply
    return record((passed, None, spec, kept, done, None, None), passed.x, passed.weight, passed.bias)
