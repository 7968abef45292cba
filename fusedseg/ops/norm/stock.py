"""The norm op as stock functions: for programs that run without this package, and for a compiler to trace and fuse.

``norm_act`` is the op of exported programs, and in compiled code the op that keeps its input.  ``forward`` returns the
statistics too; it stands for the functional op where a compiler decides by itself what is kept (``op.as_stock``).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import suggest_memory_format
from ...activation import TABLE, Activation
from .call import Norm, Operands, stats_dtype


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    return TABLE[act.name].function(y, act.param if slope is None else slope)


def _weight_of(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The weight; ones for a bias alone, which has no gradient on CUDA otherwise."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def norm_act(given: Operands, norm: Norm) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = given
    weight = _weight_of(weight, bias)
    if norm.kind == "group":
        # Not all devices take parameters of another dtype than x here; autocast returns fp32.
        wide = x if weight is None else x.to(weight.dtype)
        y = F.group_norm(wide, norm.groups, weight, bias, norm.eps).to(x.dtype)
    elif norm.kind == "instance" and norm.own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, norm.momentum, norm.eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, norm.own, norm.momentum, norm.eps)
    return activate(y if residual is None else y + residual, norm.act, slope)


def serves(x: Tensor, norm: Norm, slots: Tensor | None) -> bool:
    """Whether ``forward`` computes the op of these arguments."""
    return norm.keep == "output" and norm.process_group is None and slots is None and x.numel() > 0


def forward(given: Operands, norm: Norm) -> tuple[Tensor, Tensor]:
    """z, and the mean and rstd in one tensor; the running statistics do not move."""
    x, weight, bias, residual, _, running_mean, running_var, _ = given
    weight = _weight_of(weight, bias)
    N, C, *size = x.shape
    acc = stats_dtype(x)
    if not norm.own:
        assert running_mean is not None
        assert running_var is not None
        y = F.batch_norm(x, running_mean, running_var, weight, bias, eps=norm.eps)
        mean, rstd = running_mean.to(acc), torch.rsqrt(running_var.to(acc) + norm.eps)
    elif norm.kind == "group":
        wide = x if weight is None else x.to(weight.dtype)
        S = x.numel() // (N * C)
        y, mean, rstd = torch.native_group_norm(wide.contiguous(), weight, bias, N, C, S, norm.groups, norm.eps)
        y = y.to(x.dtype)
    elif norm.kind == "instance":
        each = [None if v is None else v.repeat(N) for v in (weight, bias)]
        rows = x.contiguous().view(1, N * C, *size)
        y, mean, rstd = torch.native_batch_norm(rows, each[0], each[1], None, None, True, 0.0, norm.eps)
        y = y.view(x.shape)
    else:
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, norm.eps)
    z = activate(y if residual is None else y + residual, norm.act)
    return z.contiguous(memory_format=suggest_memory_format(x)), torch.stack(
        [mean.flatten().to(acc), rstd.flatten().to(acc)]
    )
