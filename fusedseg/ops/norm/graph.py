"""Norm, residual and activation as one op of a compiled graph, which keeps its input.

    z, mean, rstd, ... = norm_act(x, weight, bias, residual, running_mean, running_var, mean, rstd, ...)

computes z = phi(weight * (x - mean) * rstd + bias [+ residual]).  The mean and the rstd are found from x; given among
the arguments, they are used as they are, which is how backward computes z again.  In eval mode the running statistics
stand in their place.  The op keeps the memory format of x.

The op changes no argument: it returns moved copies of the running statistics.  ``forward`` and ``backward`` are what
generated code calls, and it may also let them write over an argument that nobody reads again (``OVER``), or move the
running statistics where they are (``MOVING``).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation import TABLE, Activation
from ..layout import dense, like
from . import passes
from .call import Norm, Operands, Statistics, statistics_count, stats_dtype

# The arguments of ``flat`` in a schema.
SPEC = "str activation, float activation_param, float eps, float momentum, bool own, str kind, SymInt groups"


class Given(NamedTuple):
    """The arguments of the op that are tensors."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


def flat(norm: Norm) -> tuple[Any, ...]:
    """What the op computes, as its last arguments."""
    return *norm.act, norm.eps, norm.momentum, norm.own, norm.kind, norm.groups


def norm_of(name: str, param: float, eps: float, momentum: float, own: bool, kind: str, groups: int) -> Norm:
    """The norm of the arguments of ``flat``."""
    return Norm("input", Activation(name, param), eps, momentum, own, kind, groups)


def _split(call: tuple[Any, ...]) -> tuple[Given, Norm]:
    return Given(*call[:8]), norm_of(*call[8:])


def _statistics_shape(x: Tensor, norm: Norm) -> tuple[int, ...]:
    """(C,) for the statistics of a batch; (N, C) or (N, groups) for those of samples."""
    count = statistics_count(x, norm)
    return (count,) if norm.kind == "batch" else (x.shape[0], count // x.shape[0])


def _results(*call: Any, over: bool = False, moving: bool = False) -> tuple[Tensor, ...]:
    given, norm = _split(call)
    source, _ = dense(given.x)
    residual = None if given.residual is None else like(given.residual, source)
    out = source if over else None

    def nothing() -> Tensor:
        return source.new_empty(0, dtype=stats_dtype(source))

    operands = Operands(source, given.weight, given.bias, residual)
    if given.mean is not None and given.rstd is not None:
        z = passes.recompute(operands, _found(source, given.mean, given.rstd), norm, out)
        return z, nothing(), nothing(), nothing(), nothing()
    running = [given.running_mean, given.running_var]
    if norm.own and not moving:
        running = [None if v is None else v.clone() for v in running]
    operands = operands._replace(running_mean=running[0], running_var=running[1])
    z, stats = passes.forward(operands, norm, None, out)
    if out is None and z._is_view():
        # A program may change what a graph returns in place, and PyTorch refuses that for a view.
        z = z.data
    if not norm.own:
        return z, nothing(), nothing(), nothing(), nothing()
    # An implementation that writes over x may keep no mean, which nobody reads then.
    shape = _statistics_shape(source, norm)
    mean, rstd = (nothing() if v is None else v.view(shape) for v in stats[:2])
    return z, mean, rstd, *(nothing() if v is None or moving else v for v in running)


def forward(*call: Any) -> tuple[Tensor, ...]:
    """z, mean, rstd and the moved running statistics; an empty tensor stands for what is not computed."""
    return _results(*call)


def forward_moving(*call: Any) -> tuple[Tensor, ...]:
    """``forward``, which moves the running statistics where they are."""
    return _results(*call, moving=True)


def forward_over(*call: Any) -> tuple[Tensor, ...]:
    """``forward``, which writes z over x."""
    return _results(*call, over=True)


def forward_moving_over(*call: Any) -> tuple[Tensor, ...]:
    """``forward_moving``, which writes z over x."""
    return _results(*call, over=True, moving=True)


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *flat_norm: Any, moving: bool = False
) -> tuple[Tensor, ...]:
    """The results of ``forward`` of a batch norm but z, in whose place there is an empty tensor."""
    source, _ = dense(x)
    running = [v if v is None or moving else v.clone() for v in (running_mean, running_var)]
    mean, rstd = passes.statistics(source, norm_of(*flat_norm), *running)
    return source.new_empty(0), mean, rstd, *(source.new_empty(0) if v is None or moving else v for v in running)


def statistics_moving(*call: Any) -> tuple[Tensor, ...]:
    """``statistics``, which moves the running statistics where they are."""
    return statistics(*call, moving=True)


def _found(x: Tensor, mean: Tensor, rstd: Tensor) -> Statistics:
    mean, rstd = (v.flatten().to(stats_dtype(x)) for v in (mean, rstd))
    return Statistics(mean, rstd)


def _gradients(dz: Tensor, x: Tensor, *call: Any, over: bool = False) -> tuple[Tensor, ...]:
    weight, bias, residual, mean, second, *flat_norm, affine, of_residual = call
    norm = norm_of(*flat_norm)
    source, _ = dense(x)
    if not norm.own:
        second = (second.to(stats_dtype(source)) + norm.eps).rsqrt()
    operands, stats = Operands(source, weight, bias, residual), _found(source, mean, second)
    into = dz if over and dz.dtype == source.dtype and dz.stride() == source.stride() else None
    needs = True, affine, affine, of_residual, False
    dx, *others, _ = passes.backward(dz, operands, stats, norm, None, needs, into)
    asked = affine and weight is not None, affine and bias is not None, of_residual
    rest = (v if v is not None and ask else dz.new_empty(0) for v, ask in zip(others, asked, strict=True))
    return dx, *rest


def backward(*call: Any) -> tuple[Tensor, ...]:
    """The gradients of x, weight, bias and residual; an empty tensor stands for what is not wanted."""
    return _gradients(*call)


def backward_over(*call: Any) -> tuple[Tensor, ...]:
    """``backward``, which writes the gradient of x over dz."""
    return _gradients(*call, over=True)


def _norm_act(*call: Any) -> tuple[Tensor, ...]:
    z, mean, rstd, *moved = forward(*call)
    # Results of an op must not share memory.
    return z, mean, rstd.clone(), *moved


def _define(name: str, schema: str, run: Callable[..., Any]) -> None:
    # The op takes tensors in any memory format, so a compiler need not copy them to that of the trace.
    torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    torch.library.impl(name, "default", run)


_define(
    "fusedseg::norm_act",
    "(Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? running_mean, Tensor? running_var, "
    f"Tensor? mean, Tensor? rstd, {SPEC}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _norm_act,
)
_define(
    "fusedseg::norm_act_backward",
    "(Tensor grad_out, Tensor input, Tensor? weight, Tensor? bias, Tensor? residual, Tensor mean, Tensor second, "
    f"{SPEC}, bool affine, bool of_residual) -> (Tensor, Tensor, Tensor, Tensor)",
    backward,
)
norm_act = torch.ops.fusedseg.norm_act.default
norm_act_backward = torch.ops.fusedseg.norm_act_backward.default
# The forms of the calls that move running statistics, each with the place of the first of them among the arguments.
MOVING: dict[Any, tuple[int, Callable[..., Any]]] = {norm_act: (4, forward_moving), statistics: (1, statistics_moving)}
# The forms that write over the first argument.
OVER: dict[Any, Callable[..., Any]] = {
    norm_act: forward_over,
    forward_moving: forward_moving_over,
    norm_act_backward: backward_over,
}


@torch.library.register_fake("fusedseg::norm_act")
def _(*call):
    given, norm = _split(call)
    x, _ = dense(given.x)
    finds = norm.own and given.mean is None
    shape = _statistics_shape(x, norm) if finds else (0,)
    running = (given.running_mean, given.running_var) if finds else (None, None)
    statistics = (x.new_empty(shape, dtype=stats_dtype(x)) for _ in range(2))
    moved = (x.new_empty(0, dtype=stats_dtype(x)) if v is None else torch.empty_like(v) for v in running)
    return torch.empty_like(x), *statistics, *moved


@torch.library.register_fake("fusedseg::norm_act_backward")
def _(dz, x, weight, bias, residual, *call):
    x, _ = dense(x)
    affine, of_residual = call[-2:]
    asked = (weight, affine), (bias, affine), (x, of_residual)
    rest = (torch.empty_like(v) if ask and v is not None else dz.new_empty(0) for v, ask in asked)
    return torch.empty_like(x), *rest


def _setup_context(ctx, inputs, output) -> None:
    given, ctx.norm = _split(inputs)
    _, *found = output
    ctx.mark_non_differentiable(*found)
    ctx.passed_on = given.residual is not None and TABLE[ctx.norm.act.name].identity
    residual = None if ctx.passed_on else given.residual
    statistics = found[:2] if ctx.norm.own else (given.running_mean, given.running_var)
    ctx.save_for_backward(given.x, given.weight, given.bias, residual, *statistics)


def _gradient(ctx, dz: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    need_x, need_weight, need_bias, need_residual, *_ = ctx.needs_input_grad
    affine, of_residual = need_weight or need_bias, need_residual and not ctx.passed_on
    dx, dweight, dbias, dresidual = norm_act_backward(dz, *ctx.saved_tensors, *flat(ctx.norm), affine, of_residual)
    dresidual = dz if ctx.passed_on else dresidual
    grads = (dx, need_x), (dweight, need_weight), (dbias, need_bias), (dresidual, need_residual)
    return *(grad if need else None for grad, need in grads), *(None,) * 11


torch.library.register_autograd("fusedseg::norm_act", _gradient, setup_context=_setup_context)
