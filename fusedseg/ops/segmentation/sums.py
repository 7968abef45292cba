"""The op ``fusedseg.segmentation_sums``: one pass over logits and target gives the sums of Dice and cross-entropy.

    sums = segmentation_sums(logits, target)        (ROWS, N, K), see ``spec.py``
    loss = a function of the sums in stock PyTorch, differentiated by autograd at this small scale

The logits may be those of a convolution that is not computed yet (``conv_logits.py``).

Backward computes the probabilities again and writes the gradient in one pass.  Because it runs when the gradient of the
sums is known, and with it the scale of the loss, gradients in half precision do not become 0 before they are scaled.

Eager calls go through ``SumsFunction``; under ``torch.compile`` the op ``fusedseg::segmentation_sums`` runs.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from .. import layout
from ..check import wide_dtype
from ..double_backward import differentiated_once, refused
from ..registry import graph_op, whole
from . import aten_sums, launches
from .checks import check
from .conv_logits import Conv, ConvLogits, tensor_of
from .spec import OP, ROWS, SCHEMA, Sizes, SumsInputs, SumsSpec, sizes_of, sums_dtype
from .tiles import Grads

Needs = Sequence[bool]


def dense_logits(logits: Tensor) -> tuple[Tensor, Sizes]:
    """Logits that are contiguous or channels_last, and their sizes."""
    logits, _ = layout.dense(logits)
    return logits, sizes_of(logits)


def no_autocast(t: Tensor) -> Any:
    """Autocast would round the products of tiles, which are in fp32."""
    kind = t.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def forward(given: SumsInputs, spec: SumsSpec) -> Tensor:
    """The sums, (ROWS, N, K)."""
    assert not isinstance(given.logits, ConvLogits)
    x = tensor_of(given.logits)
    if x.numel() == 0:
        return x.new_zeros((ROWS, *given.logits.shape[:2]), dtype=sums_dtype(x, spec))
    if isinstance(given.logits, Conv):
        with no_autocast(x):
            return aten_sums.forward(given, spec)
    x, sizes = dense_logits(x)
    if not _backend.use_triton(x, launches.FAMILY):
        return aten_sums.forward(given._replace(logits=x), spec)
    return launches.forward(x, given.target, given.mask, sizes, spec)


def backward(dsums: Tensor, given: SumsInputs, spec: SumsSpec, needs: Needs) -> tuple[Tensor | None, ...]:
    """The gradients of the logits or the features, in their dtype and strides, and of weight and bias."""
    assert not isinstance(given.logits, ConvLogits)
    if isinstance(given.logits, Conv):
        with no_autocast(dsums):
            return _conv_backward(dsums, given, given.logits, spec, needs)
    x, sizes = dense_logits(given.logits)
    dx = torch.empty_like(x)
    if dx.numel():
        dsums = dsums.contiguous()
        if _backend.use_triton(x, launches.FAMILY):
            launches.backward(x, given.target, given.mask, sizes, spec, dsums, dx)
        else:
            aten_sums.backward(dsums, given._replace(logits=x), spec, Grads(dx))
    return dx, None, None


def _conv_backward(
    dsums: Tensor, given: SumsInputs, conv: Conv, spec: SumsSpec, needs: Needs
) -> tuple[Tensor | None, ...]:
    # Both passes need features whose positions are one axis.
    conv = conv._replace(features=layout.dense(conv.features)[0])
    dtype = wide_dtype(conv.features.dtype)
    # With an interpolation, no logit may depend on some of the features.
    like = torch.empty_like if conv.size is None else torch.zeros_like
    dfeatures = like(conv.features) if needs[0] else None
    dweight = torch.zeros(conv.weight.shape[:2], dtype=dtype, device=conv.weight.device) if needs[1] else None
    dbias = None if conv.bias is None or not needs[2] else torch.zeros_like(conv.bias, dtype=dtype)
    if conv.features.numel():
        aten_sums.backward(dsums, given._replace(logits=conv), spec, Grads(dfeatures, dweight, dbias))
    dweight = None if dweight is None else dweight.to(conv.weight.dtype).view(conv.weight.shape)
    return dfeatures, dweight, None if dbias is None else dbias.to(conv.weight.dtype)


# The last fields of a ``Conv``, which is none if its dtype is None.
Form = tuple[Sequence[int] | None, bool, torch.dtype | None]
NO_CONV: Form = (None, False, None)


def _inputs(
    form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None, target: Tensor, mask: Tensor | None
) -> SumsInputs:
    """The tensors of a call.  With ``NO_CONV``, ``x`` are the logits, and weight and bias are None."""
    size, align_corners, dtype = form
    if dtype is None:
        return SumsInputs(x, target, mask)
    assert weight is not None
    return SumsInputs(Conv(x, weight, bias, size, align_corners, dtype), target, mask)


class SumsFunction(torch.autograd.Function):
    """The op in eager mode."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, mask, form, spec):
        ctx.form, ctx.spec = form, spec
        ctx.save_for_backward(x, weight, bias, target, mask)
        return forward(_inputs(form, x, weight, bias, target, mask), spec)

    @staticmethod
    def backward(ctx, dsums):
        form, spec, needs = ctx.form, ctx.spec, ctx.needs_input_grad[:3]

        def run(dsums, *tensors):
            return backward(dsums, _inputs(form, *tensors), spec, needs)

        return *differentiated_once(OP, run, dsums, *ctx.saved_tensors), None, None, None, None


# The arguments of the ops: the tensors, a ``Form``, and a ``SumsSpec``.
_CALL = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor target, Tensor? mask, "
    f"SymInt[]? size, bool align_corners, ScalarType? dtype, {SCHEMA}"
)


def _call(args: Sequence[Any]) -> tuple[SumsInputs, SumsSpec]:
    size, align_corners, dtype = args[5:8]
    return _inputs((size, align_corners, dtype), *args[:5]), SumsSpec(*args[8:])


def _is_launched(given: SumsInputs) -> bool:
    """Whether a fake tensor's launches are listed."""
    x = given.logits
    return isinstance(x, Tensor) and _backend.lists_launches(x, launches.FAMILY)


def _fake(*args):
    given, spec = _call(args)
    if _is_launched(given):
        return forward(given, spec)
    x = tensor_of(given.logits)
    return x.new_empty((ROWS, *given.logits.shape[:2]), dtype=sums_dtype(x, spec))


def _gradients(dsums, needs, *args):
    return whole(backward(dsums, *_call(args), tuple(needs)), dsums)


def _fake_gradients(dsums, needs, *args):
    if _is_launched(_call(args)[0]):
        return _gradients(dsums, needs, *args)
    x, weight, bias = args[:3]
    pairs = zip((layout.dense(x)[0], weight, bias), needs, strict=True)
    return whole((torch.empty_like(t) if need and t is not None else None for t, need in pairs), dsums)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.rest = inputs[5:]


def _op_backward(ctx, dsums):
    needs = [bool(need) for need in ctx.needs_input_grad[:3]]
    found = sums_backward_op(dsums, needs, *ctx.saved_tensors, *ctx.rest)
    grads = (grad if need else None for grad, need in zip(found, needs, strict=True))
    return *grads, *(None,) * (2 + len(ctx.rest))


sums_op = graph_op(
    f"segmentation_sums({_CALL}) -> Tensor",
    lambda *args: forward(*_call(args)),
    _fake,
    gradient=(_op_backward, _setup_context),
)
sums_backward_op = graph_op(
    f"segmentation_sums_backward(Tensor dsums, bool[] needs, {_CALL}) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
    gradient=refused(lambda inputs: OP),
)


def sums(given: SumsInputs, spec: SumsSpec) -> Tensor:
    """The op on unchecked arguments: (ROWS, N, K), in the dtype of ``sums_dtype``."""
    check(given, spec)
    logits, target, mask = given
    if not spec.dense and target.dtype == torch.bool:
        # Truth values are the labels 0 and 1.
        target = target.view(torch.uint8)
    conv = logits.conv if isinstance(logits, ConvLogits) else (logits, None, None, *NO_CONV)
    *parts, size, align_corners, dtype = conv
    if spec.hard:
        parts = [None if t is None else t.detach() for t in parts]
    tensors, form = (*parts, target, mask), (size, align_corners, dtype)
    if torch.compiler.is_compiling():
        return sums_op(*tensors, *form, *spec)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts)):
        return forward(_inputs(form, *tensors), spec)
    return SumsFunction.apply(*tensors, form, spec)
