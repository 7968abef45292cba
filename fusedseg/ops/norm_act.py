"""Norm, residual and activation in one op that stores its input: z = phi(weight * (x - mean) * rstd + bias + residual).

Mean and variance are those of a channel (BatchNorm), of a channel of one sample (InstanceNorm) or of a group of one
sample's channels (GroupNorm): Ioffe and Szegedy 2015, Ulyanov et al. 2016, Wu and He 2018.  Kept for backward: x, two
vectors of statistics, the parameters, and the residual where there is an activation; z is rebuilt from them.

Eager calls go through ``NormActFunction``; under ``torch.compile`` the functional op ``fusedseg::norm_act`` runs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _backend
from ..activation import TABLE, Activation
from . import double_backward, norm_act_aten, unfused
from .device import device_of
from .double_backward import differentiated_once
from .inplace_abn_aten import Exchange
from .layout import Layout, dense, layout_of, like
from .norm_act_aten import Gradients, Norm, Statistics
from .recompute import recipes

OP = "fusedseg.norm_act"


class Settings(NamedTuple):
    """``own``: the statistics are those of x, which move the running ones, where given, by ``momentum``."""

    norm: Norm
    own: bool
    momentum: float
    eps: float
    act: Activation


def stats_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics_count(x: Tensor, norm: Norm, own: bool) -> int:
    """How many means x has."""
    if norm.kind == "batch" or not own:
        return x.shape[1]
    return x.shape[0] * (x.shape[1] if norm.kind == "instance" else norm.groups)


def use_triton(x: Tensor, act: Activation) -> bool:
    """The slope of prelu, which is learned, is left to aten."""
    return not TABLE[act.name].learned and _backend.use_triton(x)


def kernel_layout(x: Tensor, norm: Norm) -> Layout:
    layout = layout_of(x)
    assert layout is not None
    return layout.by_sample(x.shape[0], {"batch": None, "instance": x.shape[1], "group": norm.groups}[norm.kind])


def forward(
    x, weight, bias, running_mean, running_var, residual, slope, settings: Settings
) -> tuple[Tensor, Statistics]:
    """z of a dense ``x``, and what backward and ``rebuild`` need of the statistics."""
    norm, own, momentum, eps, act = settings
    if x.numel() == 0:
        zeros = torch.zeros(2, statistics_count(x, norm, own), dtype=stats_dtype(x), device=x.device)
        return torch.empty_like(x), Statistics(zeros[0], zeros[1], not own)
    residual = None if residual is None else like(residual, x)
    if use_triton(x, act):
        from ..kernels.norm_act import norm_act_fwd

        z = torch.empty_like(x)
        # kernels move the running statistics of the batch alone
        moved = (running_mean, running_var) if norm.kind == "batch" else (None, None)
        with device_of(x):
            mean, second, _ = norm_act_fwd(
                x, z, kernel_layout(x, norm), weight, bias, *moved, own, momentum, eps, act, None, residual=residual
            )
        if not own:
            mean, second = (v.to(mean.dtype, copy=True) for v in (running_mean, running_var))
        elif norm.kind == "instance" and running_mean is not None:
            move_running(torch.stack([mean, second]), x, norm, running_mean, running_var, momentum, eps)
        return z, Statistics(mean, second, running=not own)
    z, mean, second = norm_act_aten.forward(
        x, norm, weight, bias, running_mean, running_var, own, momentum, eps, act, residual, slope
    )
    return z, Statistics(mean, second, running=not own)


def rebuild(x, weight, bias, residual, slope, stats: Statistics, settings: Settings) -> Tensor:
    """z once more."""
    if x.numel() == 0:
        return torch.empty_like(x)
    residual = None if residual is None else like(residual, x)
    if use_triton(x, settings.act):
        from ..kernels.norm_act import norm_act_fwd, norm_act_rebuild

        z, layout, act = torch.empty_like(x), kernel_layout(x, settings.norm), settings.act
        with device_of(x):
            if stats.running:
                args = (*stats[:2], False, 0.0, settings.eps, act, None)
                norm_act_fwd(x, z, layout, weight, bias, *args, residual=residual)
            else:
                norm_act_rebuild(x, z, layout, weight, bias, *stats[:2], act, residual)
        return z
    return norm_act_aten.rebuild(x, settings.norm, weight, bias, stats, settings.eps, settings.act, residual, slope)


def backward(
    dz, x, weight, bias, residual, slope, stats: Statistics, settings: Settings, affine: bool,
    exchange: Exchange | None = None,
) -> Gradients:  # fmt: skip
    """``affine``: the gradients of weight and bias are wanted; they come in their dtypes.  ``exchange``: called with
    the sums of g and g * xhat of a batch norm, gives those to use for dx, as if the statistics were those of x."""
    if x.numel() == 0:
        dweight, dbias, dslope = (None if v is None else torch.zeros_like(v) for v in (weight, bias, slope))
        return Gradients(torch.empty_like(x), dweight, dbias, None if residual is None else torch.empty_like(x), dslope)
    residual = None if residual is None else like(residual, x)
    if use_triton(x, settings.act):
        return _backward_triton(like(dz, x), x, weight, bias, residual, stats, settings, affine, exchange)
    rest = stats, settings.eps, settings.act, residual, slope, affine, exchange
    found = norm_act_aten.backward(like(dz, x), x, settings.norm, weight, bias, *rest)
    pairs = ((weight, found.dweight), (bias, found.dbias), (slope, found.dslope))
    dweight, dbias, dslope = (None if v is None or d is None else d.to(v.dtype) for v, d in pairs)
    return Gradients(found.dx, dweight, dbias, found.dresidual, dslope)


def _backward_triton(
    dz, x, weight, bias, residual, stats: Statistics, settings: Settings, affine: bool, exchange: Exchange | None
) -> Gradients:
    from ..kernels.norm_act_bwd import norm_act_bwd, norm_act_bwd_exchanged

    dresidual = None if residual is None else torch.empty_like(x)
    dtype = (weight if weight is not None else bias).dtype if affine else None
    rstd = (stats.second + settings.eps).rsqrt() if stats.running else stats.second
    args = dz, x, kernel_layout(x, settings.norm), weight, bias, rstd, None, None
    also = {"mean": stats.mean, "residual": residual, "dresidual": dresidual}
    with device_of(x):
        if exchange is None:
            dx, dweight, dbias = norm_act_bwd(*args, not stats.running, settings.act, dtype, **also)
        else:
            dx, dweight, dbias = norm_act_bwd_exchanged(*args, settings.act, dtype, exchange, **also)
    # an op of both returns them both
    dweight, dbias = (None if v is None else d for v, d in ((weight, dweight), (bias, dbias)))
    return Gradients(dx, dweight, dbias, dresidual, None)


def wanted(found, dz: Tensor, has_residual: bool, activation: str, needs) -> tuple[Tensor | None, ...]:
    """Of the five gradients those that autograd asks for; dz is the residual's own where there is no activation."""
    dx, dweight, dbias, dresidual, dslope = found
    if has_residual and activation == "identity":
        dresidual = dz
    return tuple(
        grad if need else None for grad, need in zip((dx, dweight, dbias, dresidual, dslope), needs, strict=False)
    )


class NormActFunction(torch.autograd.Function):
    """Keeps x, the statistics, weight, bias, slope, and the residual where there is an activation.

    ``found``: a list to leave the statistics in, for whoever else may rebuild z.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, slope, running_mean, running_var, settings, found):
        z, stats = forward(x, weight, bias, running_mean, running_var, residual, slope, settings)
        ctx.settings, ctx.running = settings, stats.running
        ctx.has_residual = residual is not None
        kept = None if settings.act.name == "identity" else residual
        ctx.save_for_backward(x, weight, bias, kept, slope, stats.mean, stats.second)
        if found is not None:
            found.append(stats)
        return z

    @staticmethod
    def backward(ctx, dz):
        *inputs, mean, second = ctx.saved_tensors
        needs = ctx.needs_input_grad
        stats = Statistics(mean, second, ctx.running)
        found = differentiated_once(OP, backward, dz, *inputs, stats, ctx.settings, needs[1] or needs[2])
        return *wanted(found, dz, ctx.has_residual, ctx.settings.act.name, needs), *(None,) * 4


@torch.library.custom_op("fusedseg::norm_act", mutates_args=())
def norm_act_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    kind: str,
    groups: int,
    eps: float,
    activation: str,
    activation_param: float,
) -> tuple[Tensor, Tensor]:
    """The functional op: z, and the two vectors of ``Statistics``, in one tensor.  ``mean`` and ``var`` None: of x."""
    x, _ = dense(x)
    settings = Settings(Norm(kind, groups), mean is None, 0.0, eps, Activation(activation, activation_param))
    z, stats = forward(x, weight, bias, mean, var, residual, slope, settings)
    return z, torch.stack([stats.mean, stats.second])


@norm_act_op.register_fake
def _(x, weight, bias, residual, slope, mean, var, kind, groups, eps, activation, activation_param):
    x, _ = dense(x)
    count = statistics_count(x, Norm(kind, groups), mean is None)
    return torch.empty_like(x), x.new_empty((2, count), dtype=stats_dtype(x))


@torch.library.custom_op("fusedseg::norm_act_backward", mutates_args=())
def norm_act_backward_op(
    dz: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    stats: Tensor,
    running: bool,
    kind: str,
    groups: int,
    eps: float,
    activation: str,
    activation_param: float,
    affine: bool,
) -> list[Tensor]:
    """dx, dweight, dbias, dresidual, dslope, empty where there are none."""
    x, _ = dense(x)
    settings = Settings(Norm(kind, groups), not running, 0.0, eps, Activation(activation, activation_param))
    found = backward(dz, x, weight, bias, residual, slope, Statistics(stats[0], stats[1], running), settings, affine)
    return [x.new_empty(0) if v is None else v for v in found]


@norm_act_backward_op.register_fake
def _(dz, x, weight, bias, residual, slope, stats, running, kind, groups, eps, activation, activation_param, affine):
    x, _ = dense(x)
    vectors = [None if v is None else torch.empty_like(v) for v in ((weight, bias) if affine else (None, None))]
    residual = None if residual is None else torch.empty_like(x)
    found = (torch.empty_like(x), *vectors, residual, None if slope is None else torch.empty_like(slope))
    return [x.new_empty(0) if v is None else v for v in found]


def _op_setup_context(ctx, inputs, output):
    x, weight, bias, residual, slope, mean, _, *constants = inputs
    _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.constants, ctx.has_residual = (mean is not None, *constants), residual is not None
    ctx.save_for_backward(x, weight, bias, None if constants[3] == "identity" else residual, slope, stats)


def _op_backward(ctx, dz, *unused):
    needs = ctx.needs_input_grad
    found = norm_act_backward_op(dz, *ctx.saved_tensors, *ctx.constants, needs[1] or needs[2])
    return *wanted(found, dz, ctx.has_residual, ctx.constants[-2], needs), *(None,) * 7


norm_act_op.register_autograd(_op_backward, setup_context=_op_setup_context)
norm_act_backward_op.register_autograd(double_backward.refusing(OP))


def autocast_residual(x: Tensor, residual: Tensor | None) -> Tensor | None:
    """Under autocast, the residual in the dtype of x, which is the result's."""
    if not isinstance(residual, Tensor) or residual.dtype == x.dtype or not torch.is_autocast_enabled(x.device.type):
        return residual
    return residual.to(x.dtype)


def norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    settings: Settings,
) -> Tensor:
    """The op on checked arguments."""
    norm, own, momentum, eps, act = settings
    if unfused.wanted():
        rest = weight, bias, running_mean, running_var, own, momentum, eps, act, residual, slope
        return unfused.norm_act(x, norm.kind, norm.groups, *rest)
    if not own:
        # of statistics that came from elsewhere, those of a sample are no others
        settings = settings._replace(norm=Norm("batch"))
    if not torch.compiler.is_compiling():
        x, _ = dense(x)
        inputs = (x, weight, bias, residual, slope)
        found: list[Statistics] | None = None if recipes.active() is None else []
        z = NormActFunction.apply(*inputs, running_mean, running_var, settings, found)
        if found:
            offer(z, inputs, found[0], settings)
        return z
    given = (None, None) if own else (running_mean, running_var)
    z, stats = norm_act_op(x, weight, bias, residual, slope, *given, *settings.norm, eps, *act)
    if own and running_mean is not None and running_var is not None:
        move_running(stats, x, norm, running_mean, running_var, momentum, eps)
    return z


def offer(z: Tensor, inputs: tuple[Tensor | None, ...], stats: Statistics, settings: Settings) -> None:
    """Whoever saves z may rebuild it."""
    x, weight, bias, residual, slope = inputs
    if recipes.active() is None:
        return
    # of parameters, copies, since an optimizer may change them before backward
    weight, bias, slope = (None if v is None else v.detach().clone() for v in (weight, bias, slope))

    def again(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return rebuild(x, weight, bias, residual, slope, stats, settings)

    recipes.offer(z, again, *(t for t in (x, residual) if t is not None))


def move_running(stats, x, norm: Norm, running_mean, running_var, momentum: float, eps: float) -> None:
    """Moves the running statistics towards those of x, mean and 1 / sqrt(var + eps); no values move nothing."""
    m = x.numel() // statistics_count(x, norm, True) if x.numel() else 0
    if m == 0:
        return
    with torch.no_grad():
        mean = stats[0].view(-1, x.shape[1]).mean(0)
        var = ((stats[1] ** -2 - eps).clamp_min(0.0) * (m / (m - 1))).view(-1, x.shape[1]).mean(0)
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_(var.to(running_var.dtype), momentum)
