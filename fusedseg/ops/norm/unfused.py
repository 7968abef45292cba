"""The norm op as stock functions, for programs that run without this package."""

from torch import Tensor
from torch.nn import functional as F

from ...activation import TABLE, Activation
from .spec import Passed, Spec


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    return TABLE[act.name].function(y, act.param if slope is None else slope)


def norm_act(passed: Passed, spec: Spec) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = passed
    if spec.kind == "group":
        # Not all devices take parameters of another dtype than x here; autocast returns fp32.
        wide = x if weight is None else x.to(weight.dtype)
        y = F.group_norm(wide, spec.groups, weight, bias, spec.eps).to(x.dtype)
    elif spec.kind == "instance" and spec.own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, spec.momentum, spec.eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, spec.own, spec.momentum, spec.eps)
    return activate(y if residual is None else y + residual, spec.act, slope)
