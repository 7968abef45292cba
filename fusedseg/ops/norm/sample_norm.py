"""Norms with statistics of each sample that keep channels_last, as ops of a compiled graph.

PyTorch's instance norm copies an input in channels_last to contiguous planes, in forward and in backward, and so does
its group norm on a GPU.  ``sample_norm`` is either of them in the memory format that it is given.  With the mean and
the rstd among its arguments it computes the output again.  ``in_pieces`` is the same for a compiler that fuses.
"""

from typing import Any

import torch
from torch import Tensor

from ...activation import Activation
from ..layout import dense
from . import passes
from .call import Norm, Operands, Statistics, stats_dtype


def norm_of(channels: int, groups: int, eps: float) -> Norm:
    kind = "instance" if groups == channels else "group"
    return Norm("input", Activation("identity", 0.0), eps, kind=kind, groups=groups)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = Operands(dense(x)[0], weight, bias)
    norm = norm_of(x.shape[1], groups, eps)
    if mean is not None and rstd is not None:
        unused = mean.new_empty(0)
        return passes.recompute(given, Statistics(mean.flatten(), rstd.flatten()), norm), unused, unused.clone()
    z, stats = passes.forward(given, norm, None, None)
    assert stats.mean is not None
    # Results of an op must not share memory.
    return z, stats.mean.view(-1, groups), stats.rstd.view(-1, groups).clone()


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, *call: Any
) -> tuple[Tensor, Tensor, Tensor]:
    groups, eps, affine = call
    given = Operands(dense(x)[0], weight, bias)
    stats = Statistics(mean.flatten(), rstd.flatten())
    needs = (True, affine, affine, False, False)
    dx, dweight, dbias, *_ = passes.backward(grad, given, stats, norm_of(x.shape[1], groups, eps), None, needs)
    dweight, dbias = (mean.new_empty(0) if v is None or not affine else v for v in (dweight, dbias))
    return dx, dweight, dbias


sample_norm_op = torch.library.custom_op(
    "fusedseg::sample_norm",
    forward,
    mutates_args=(),
    schema="(Tensor input, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, SymInt group, float eps) "
    "-> (Tensor, Tensor, Tensor)",
)
sample_norm_backward_op = torch.library.custom_op(
    "fusedseg::sample_norm_backward",
    backward,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, SymInt group, "
    "float eps, bool affine) -> (Tensor, Tensor, Tensor)",
)


@sample_norm_op.register_fake
def _(x, weight, bias, mean, rstd, groups, eps):
    shape = (x.shape[0], groups) if mean is None else (0,)
    return torch.empty_like(x), *(x.new_empty(shape, dtype=stats_dtype(x)) for _ in range(2))


@sample_norm_backward_op.register_fake
def _(grad, x, weight, bias, mean, rstd, groups, eps, affine):
    return torch.empty_like(x), *(
        torch.empty_like(v) if affine and v is not None else mean.new_empty(0) for v in (weight, bias)
    )


def _setup_context(ctx, inputs, output) -> None:
    x, weight, bias, _, _, ctx.groups, ctx.eps = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _gradient(ctx, grad: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    affine = needs[1] or needs[2]
    grads = sample_norm_backward_op(grad, *ctx.saved_tensors, ctx.groups, ctx.eps, affine)
    return *(given if need else None for given, need in zip(grads, needs, strict=False)), *(None,) * 4


sample_norm_op.register_autograd(_gradient, setup_context=_setup_context)


def in_pieces(x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
    """The output as arithmetic, for a compiler that fuses it."""
    parts = x.to(stats_dtype(x)).unflatten(1, (groups, -1))
    var, mean = torch.var_mean(parts, list(range(2, parts.dim())), correction=0, keepdim=True)
    y = ((parts - mean) * torch.rsqrt(var + eps)).flatten(1, 2)
    each = (-1, *(1,) * (x.dim() - 2))
    y = y if weight is None else y * weight.view(each)
    y = y if bias is None else y + bias.view(each)
    return y.to(x.dtype)
