"""The norm op as stock functions: for programs that run without this package, and for a compiler to trace and fuse.

``norm_act`` is the op of exported programs, and in compiled code the op that keeps its input.  It stands for the
functional op too where a compiler decides by itself what is kept (``compiler/capture/stock_norms.py``).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ...activation import TABLE, Activation
from .call import Norm, Operands


def finished(y: Tensor, residual: Tensor | None, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y [+ residual])."""
    return TABLE[act.name].function(y if residual is None else y + residual, act.param if slope is None else slope)


def _weight_of(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The weight; ones for a bias alone, which has no gradient on CUDA otherwise."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def norm_act(given: Operands, norm: Norm) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = given
    weight = _weight_of(weight, bias)
    if norm.over.is_grouped:
        # Not all devices take parameters of another dtype than x here; autocast returns fp32.
        wide = x if weight is None else x.to(weight.dtype)
        y = F.group_norm(wide, norm.over.groups_of(x.shape[1]), weight, bias, norm.eps).to(x.dtype)
    elif norm.over.of_samples and norm.own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, norm.momentum, norm.eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, norm.own, norm.momentum, norm.eps)
    return finished(y, residual, norm.act, slope)
