"""BatchNorm, residual and any activation with the statistics of all processes of a group: ``sync.py``, and all else,
what is kept too, is ``norm_act.py``.

Eager calls go through ``NormActSyncFunction``; under ``torch.compile`` the functional op ``fusedseg::norm_act_sync``
runs, which has its collective within.
"""

import torch
from torch import Tensor

from ..activation import Activation
from . import double_backward, norm_act
from .check import check_input, check_parameters
from .double_backward import differentiated_once
from .layout import dense, layout_of
from .norm_act import Settings, stats_dtype, wanted
from .norm_act_aten import Norm, Statistics
from .norm_act_check import check_activation
from .recompute import recipes
from .sync import Joint, exchange, joint_moments, move_running

OP = "fusedseg.norm_act_sync"


def settings_of(eps: float, act: Activation) -> Settings:
    """Of an op to which the statistics of all come from elsewhere."""
    return Settings(Norm("batch"), False, 0.0, eps, act)


def statistics_of(joint: Joint) -> Statistics:
    return Statistics(joint.mean, joint.var, running=True)


def _forward(x, weight, bias, residual, slope, settings, group) -> tuple[Tensor, Joint]:
    layout = layout_of(x)
    assert layout is not None
    joint = joint_moments(x, layout, group)
    z, _ = norm_act.forward(x, weight, bias, joint.mean, joint.var, residual, slope, settings)
    return z, joint


def _backward(dz, x, weight, bias, residual, slope, joint, settings, group, affine):
    exchanged = exchange(joint.share, group)
    if x.numel() == 0:
        # the others wait for this one
        exchanged(torch.zeros_like(joint.mean), torch.zeros_like(joint.mean))
    return norm_act.backward(dz, x, weight, bias, residual, slope, statistics_of(joint), settings, affine, exchanged)


class NormActSyncFunction(torch.autograd.Function):
    """Keeps what ``NormActFunction`` keeps, and the share of its values in those of all processes, (C,).

    ``found``: a list to leave the statistics in, for whoever else may rebuild z.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, residual, slope, running, momentum, settings, group, found):
        z, joint = _forward(x, weight, bias, residual, slope, settings, group)
        running_mean, running_var = running
        move_running(joint, running_mean, running_var, momentum)
        ctx.settings, ctx.group, ctx.has_residual = settings, group, residual is not None
        kept = None if settings.act.name == "identity" else residual
        ctx.save_for_backward(x, weight, bias, kept, slope, *joint)
        if found is not None:
            found.append(statistics_of(joint))
        return z

    @staticmethod
    def backward(ctx, dz):
        *inputs, total, mean, var, share = ctx.saved_tensors
        needs = ctx.needs_input_grad
        args = dz, *inputs, Joint(total, mean, var, share), ctx.settings, ctx.group, needs[1] or needs[2]
        found = differentiated_once(OP, _backward, *args)
        return *wanted(found, dz, ctx.has_residual, ctx.settings.act.name, needs), *(None,) * 5


@torch.library.custom_op("fusedseg::norm_act_sync", mutates_args=())
def norm_act_sync_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    eps: float,
    activation: str,
    activation_param: float,
    group: str,
) -> tuple[Tensor, Tensor]:
    """The functional op: z, and what ``Joint`` has in one tensor (4, C)."""
    settings = settings_of(eps, Activation(activation, activation_param))
    z, joint = _forward(dense(x)[0], weight, bias, residual, slope, settings, group)
    return z, torch.stack(joint)


@norm_act_sync_op.register_fake
def _(x, weight, bias, residual, slope, eps, activation, activation_param, group):
    return torch.empty_like(dense(x)[0]), x.new_empty((4, x.shape[1]), dtype=stats_dtype(x))


@torch.library.custom_op("fusedseg::norm_act_sync_backward", mutates_args=())
def norm_act_sync_backward_op(
    dz: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    joint: Tensor,
    eps: float,
    activation: str,
    activation_param: float,
    group: str,
    affine: bool,
) -> list[Tensor]:
    """dx, dweight, dbias, dresidual, dslope, empty where there are none."""
    settings = settings_of(eps, Activation(activation, activation_param))
    args = dense(x)[0], weight, bias, residual, slope, Joint(*joint), settings, group, affine
    return [x.new_empty(0) if v is None else v for v in _backward(dz, *args)]


@norm_act_sync_backward_op.register_fake
def _(dz, x, weight, bias, residual, slope, joint, eps, activation, activation_param, group, affine):
    x, _ = dense(x)
    vectors = [None if v is None else torch.empty_like(v) for v in ((weight, bias) if affine else (None, None))]
    residual = None if residual is None else torch.empty_like(x)
    found = (torch.empty_like(x), *vectors, residual, None if slope is None else torch.empty_like(slope))
    return [x.new_empty(0) if v is None else v for v in found]


def _op_setup_context(ctx, inputs, output):
    x, weight, bias, residual, slope, *constants = inputs
    _, joint = output
    ctx.mark_non_differentiable(joint)
    ctx.constants, ctx.has_residual = constants, residual is not None
    ctx.save_for_backward(x, weight, bias, None if constants[1] == "identity" else residual, slope, joint)


def _op_backward(ctx, dz, *unused):
    needs = ctx.needs_input_grad
    found = norm_act_sync_backward_op(dz, *ctx.saved_tensors, *ctx.constants, needs[1] or needs[2])
    return *wanted(found, dz, ctx.has_residual, ctx.constants[1], needs), *(None,) * 4


norm_act_sync_op.register_autograd(_op_backward, setup_context=_op_setup_context)
norm_act_sync_backward_op.register_autograd(double_backward.refusing(OP))


def check(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    act: Activation,
) -> None:
    """Raises ValueError or TypeError for arguments that the op cannot take."""
    check_input(OP, x)
    vectors = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    check_parameters(OP, vectors, x.shape[1], x.dtype, x.device)
    check_activation(OP, x, residual, slope, act)


def norm_act_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    slope: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    act: Activation,
    group: str,
) -> Tensor:
    """The op on checked arguments, with the statistics of the batches of all processes of the group of that name."""
    if not torch.compiler.is_compiling():
        x, _ = dense(x)
        inputs, settings = (x, weight, bias, residual, slope), settings_of(eps, act)
        found: list[Statistics] | None = None if recipes.active() is None else []
        z = NormActSyncFunction.apply(*inputs, (running_mean, running_var), momentum, settings, group, found)
        if found:
            norm_act.offer(z, inputs, found[0], settings)
        return z
    z, joint = norm_act_sync_op(x, weight, bias, residual, slope, eps, act.name, act.param, group)
    move_running(Joint(*joint), running_mean, running_var, momentum)
    return z
