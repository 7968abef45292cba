"""The op ``fusedseg.segmentation_sums``: one pass over logits and target gives the sums of Dice and cross-entropy.

    sums = segmentation_sums(logits, target)        (ROWS, N, K), see ``spec.py``
    loss = a function of the sums in stock PyTorch, differentiated by autograd at this small scale

Kept for backward: the logits and the target of the caller, and no other tensor.  Backward computes the probabilities
again and writes the gradient in one pass.  Because it runs when the gradient of the sums is known, and with it the
scale of the loss, gradients in half precision do not become 0 before they are scaled.

Eager calls go through ``SumsFunction``; under ``torch.compile`` the op ``fusedseg::segmentation_sums`` runs.
"""

import torch
from torch import Tensor

from ... import _backend
from .. import layout
from ..double_backward import differentiated_once, refuse_in_graphs
from . import conv_op, reference
from .checks import check
from .conv_logits import ConvLogits
from .spec import OP, ROWS, SCHEMA, Given, Sizes, SumsSpec, sizes_of, sums_dtype


def dense(given: Given) -> tuple[Given, Sizes]:
    """The tensors with logits that are contiguous or channels_last, and their sizes."""
    given = given._replace(logits=layout.dense(given.logits)[0])
    sizes = sizes_of(given.logits)
    assert sizes is not None
    return given, sizes


def forward(given: Given, spec: SumsSpec) -> Tensor:
    """The sums, (ROWS, N, K)."""
    given, sizes = dense(given)
    if given.logits.numel() == 0:
        return given.logits.new_zeros((ROWS, sizes.N, sizes.K), dtype=sums_dtype(given.logits, spec))
    if not _backend.use_triton(given.logits, "sums"):
        return reference.forward(given, sizes, spec)
    from ...kernels.segmentation_sums import segmentation_sums_fwd

    with _backend.launching(given.logits):
        return segmentation_sums_fwd(*given, sizes, spec)


def backward(dsums: Tensor, given: Given, spec: SumsSpec) -> Tensor:
    """The gradient of the logits, in their dtype and strides."""
    given, sizes = dense(given)
    dx = torch.empty_like(given.logits)
    if dx.numel() == 0:
        return dx
    dsums = dsums.contiguous()
    if not _backend.use_triton(given.logits, "sums"):
        reference.backward(dsums, given, sizes, spec, dx)
        return dx
    from ...kernels.segmentation_sums import segmentation_sums_bwd

    with _backend.launching(given.logits):
        segmentation_sums_bwd(dsums, *given, dx, sizes, spec)
    return dx


class SumsFunction(torch.autograd.Function):
    """The op in eager mode."""

    @staticmethod
    def forward(ctx, logits, target, mask, spec):
        ctx.spec = spec
        ctx.save_for_backward(logits, target, mask)
        return forward(Given(logits, target, mask), spec)

    @staticmethod
    def backward(ctx, dsums):
        spec = ctx.spec
        dx, *_ = differentiated_once(
            OP, lambda dsums, *given: (backward(dsums, Given(*given), spec),), dsums, *ctx.saved_tensors
        )
        return dx, None, None, None


_GIVEN = "Tensor logits, Tensor target, Tensor? mask"


@torch.library.custom_op("fusedseg::segmentation_sums", mutates_args=(), schema=f"({_GIVEN}, {SCHEMA}) -> Tensor")
def sums_op(logits, target, mask, *spec):
    return forward(Given(logits, target, mask), SumsSpec(*spec))


@sums_op.register_fake
def _(logits, target, mask, *spec):
    return logits.new_empty((ROWS, *logits.shape[:2]), dtype=sums_dtype(logits, SumsSpec(*spec)))


@torch.library.custom_op(
    "fusedseg::segmentation_sums_backward", mutates_args=(), schema=f"(Tensor dsums, {_GIVEN}, {SCHEMA}) -> Tensor"
)
def sums_backward_op(dsums, logits, target, mask, *spec):
    return backward(dsums, Given(logits, target, mask), SumsSpec(*spec))


@sums_backward_op.register_fake
def _(dsums, logits, *rest):
    given, _ = dense(Given(logits, logits))
    return torch.empty_like(given.logits)


def _setup_context(ctx, inputs, output):
    logits, target, mask, *ctx.spec = inputs
    ctx.save_for_backward(logits, target, mask)


def _op_backward(ctx, dsums):
    return sums_backward_op(dsums, *ctx.saved_tensors, *ctx.spec), *(None,) * (2 + len(ctx.spec))


sums_op.register_autograd(_op_backward, setup_context=_setup_context)
refuse_in_graphs(sums_backward_op, OP)


def sums(given: Given, spec: SumsSpec) -> Tensor:
    """The op on unchecked arguments: (ROWS, N, K), in the dtype of ``sums_dtype``."""
    check(given, spec)
    if not spec.dense and given.target.dtype == torch.bool:
        # Truth values are the labels 0 and 1.
        given = Given(given.logits, given.target.view(torch.uint8), given.mask)
    if isinstance(given.logits, ConvLogits):
        return conv_op.sums(given, spec)
    if spec.hard:
        given = Given(given.logits.detach(), given.target, given.mask)
    if torch.compiler.is_compiling():
        return sums_op(*given, *spec)
    if not (torch.is_grad_enabled() and given.logits.requires_grad):
        return forward(given, spec)
    return SumsFunction.apply(*given, spec)
