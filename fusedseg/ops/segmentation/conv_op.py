"""The op ``fusedseg.segmentation_sums`` for logits that a 1x1 convolution gives, without forming them.

    sums = segmentation_sums(interpolate(conv(features, weight, bias), size), target)        (ROWS, N, K)

Kept for backward: features, weight, bias, target and mask of the caller, and no other tensor.  Backward computes the
logits of each tile again, and from their gradient those of features, weight and bias (``conv_aten.py``).

Eager calls go through ``ConvSumsFunction``; under ``torch.compile`` the op ``fusedseg::conv_segmentation_sums`` runs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..double_backward import differentiated_once, refuse_in_graphs
from ..layout import dense
from . import conv_aten
from .conv_aten import ConvSums
from .conv_logits import Conv, ConvForm, ConvLogits
from .spec import OP, ROWS, SCHEMA, Given, SumsSpec, sums_dtype

Needs = tuple[bool, bool, bool]


def no_autocast(t: Tensor) -> Any:
    """Autocast would round the products of tiles, which are in fp32."""
    kind = t.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def forward(call: ConvSums) -> Tensor:
    """The sums, (ROWS, N, K)."""
    with no_autocast(call.target):
        return conv_aten.forward(call)


def backward(dsums: Tensor, call: ConvSums, needs: Needs) -> tuple[Tensor | None, ...]:
    """The gradients of features, weight and bias."""
    with no_autocast(dsums):
        return conv_aten.backward(dsums, call, needs)


class ConvSumsFunction(torch.autograd.Function):
    """The op in eager mode."""

    @staticmethod
    def forward(ctx, features, weight, bias, target, mask, form, spec):
        ctx.form, ctx.spec = form, spec
        ctx.save_for_backward(features, weight, bias, target, mask)
        return forward(ConvSums(Conv(features, weight, bias), form, target, mask, spec))

    @staticmethod
    def backward(ctx, dsums):
        form, spec, needs = ctx.form, ctx.spec, ctx.needs_input_grad[:3]

        def run(dsums, features, weight, bias, target, mask):
            return backward(dsums, ConvSums(Conv(features, weight, bias), form, target, mask, spec), needs)

        return *differentiated_once(OP, run, dsums, *ctx.saved_tensors), None, None, None, None


# The fields of ``ConvForm`` in the schemas of the ops, in their order.
_FORM = "SymInt[]? size, bool align_corners, ScalarType dtype"
_CONV = "Tensor features, Tensor weight, Tensor? bias"
_CALL = f"{_CONV}, Tensor target, Tensor? mask, {_FORM}, {SCHEMA}"


def _form(size: Sequence[int] | None, align_corners: bool, dtype: torch.dtype) -> ConvForm:
    return ConvForm(None if size is None else tuple(size), align_corners, dtype)


def _call(args: tuple) -> ConvSums:
    target, mask = args[3:5]
    return ConvSums(Conv(*args[:3]), _form(*args[5:8]), target, mask, SumsSpec(*args[8:]))


@torch.library.custom_op("fusedseg::conv_segmentation_sums", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def conv_sums_op(*args):
    return forward(_call(args))


@conv_sums_op.register_fake
def _(*args):
    call = _call(args)
    shape = ROWS, call.conv.features.shape[0], call.conv.weight.shape[0]
    return call.conv.features.new_empty(shape, dtype=sums_dtype(call.conv.features, call.spec))


@torch.library.custom_op(
    "fusedseg::conv_segmentation_sums_backward",
    mutates_args=(),
    schema=f"(Tensor dsums, bool[] needs, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def conv_sums_backward_op(dsums, needs, *args):
    """A gradient that is not needed is an empty tensor."""
    return tuple(dsums.new_empty(0) if t is None else t for t in backward(dsums, _call(args), tuple(needs)))


@conv_sums_backward_op.register_fake
def _(dsums, needs, *args):
    features, weight, bias = args[:3]
    found = (dense(features)[0], weight, bias)
    return tuple(
        torch.empty_like(t, memory_format=torch.preserve_format) if need and t is not None else dsums.new_empty(0)
        for t, need in zip(found, needs, strict=True)
    )


@torch.library.custom_op(
    "fusedseg::conv_argmax", mutates_args=(), schema=f"({_CONV}, {_FORM}, ScalarType labels) -> Tensor"
)
def conv_argmax_op(features, weight, bias, *form):
    *of_form, dtype = form
    return labels_of(Conv(features, weight, bias), _form(*of_form), dtype)


@conv_argmax_op.register_fake
def _(features, weight, bias, *form):
    *of_form, dtype = form
    return _empty_labels(Conv(features, weight, bias), _form(*of_form), dtype)


def labels_of(conv: Conv, form: ConvForm, dtype: torch.dtype) -> Tensor:
    labels = _empty_labels(conv, form, dtype)
    if labels.numel():
        with no_autocast(labels):
            conv_aten.argmax(conv, form, labels)
    return labels


def _empty_labels(conv: Conv, form: ConvForm, dtype: torch.dtype) -> Tensor:
    N, _, *spatial = conv.features.shape
    return conv.features.new_empty(N, *(spatial if form.size is None else form.size), dtype=dtype)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _op_backward(ctx, dsums):
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = conv_sums_backward_op(dsums, needs, *ctx.saved_tensors, *ctx.rest)
    grads = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return *grads, *(None,) * (2 + len(ctx.rest))


conv_sums_op.register_autograd(_op_backward, setup_context=_setup_context)
refuse_in_graphs(conv_sums_backward_op, OP)


def sums(given: Given, spec: SumsSpec) -> Tensor:
    """The op on checked arguments, of which the logits are ``ConvLogits``."""
    logits: ConvLogits = given.logits
    conv, form = logits.conv, logits.form
    if torch.compiler.is_compiling():
        if spec.hard:
            conv = conv.detached()
        return conv_sums_op(*conv, given.target, given.mask, *form, *spec)
    differentiable = any(t is not None and t.requires_grad for t in conv)
    if spec.hard or not (torch.is_grad_enabled() and differentiable):
        return forward(ConvSums(conv, form, given.target, given.mask, spec))
    return ConvSumsFunction.apply(*conv, given.target, given.mask, form, spec)


def argmax(logits: ConvLogits, dtype: torch.dtype) -> Tensor:
    """The predicted labels, (N, *spatial)."""
    conv, form = logits.conv.detached(), logits.form
    # The first call of a custom op imports the compiler, which takes a second.
    return conv_argmax_op(*conv, *form, dtype) if torch.compiler.is_compiling() else labels_of(conv, form, dtype)
