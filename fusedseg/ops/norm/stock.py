"""The norm op as stock functions: for programs that run without this package, and for a compiler to trace and fuse.

``norm_act`` is the op of exported programs, and in compiled code the op that keeps its input.  ``forward`` returns the
statistics too; it stands for the functional op where a compiler decides by itself what is kept (``op.as_stock``).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import suggest_memory_format
from ...activation import TABLE, Activation
from .spec import Passed, Spec, stats_dtype


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    return TABLE[act.name].function(y, act.param if slope is None else slope)


def _weight_of(weight: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The weight; ones for a bias alone, which has no gradient on CUDA otherwise."""
    return torch.ones_like(bias) if weight is None and bias is not None else weight


def norm_act(passed: Passed, spec: Spec) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = passed
    weight = _weight_of(weight, bias)
    if spec.kind == "group":
        # Not all devices take parameters of another dtype than x here; autocast returns fp32.
        wide = x if weight is None else x.to(weight.dtype)
        y = F.group_norm(wide, spec.groups, weight, bias, spec.eps).to(x.dtype)
    elif spec.kind == "instance" and spec.own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, spec.momentum, spec.eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, spec.own, spec.momentum, spec.eps)
    return activate(y if residual is None else y + residual, spec.act, slope)


def serves(x: Tensor, spec: Spec, slots: Tensor | None) -> bool:
    """Whether ``forward`` computes the op of these arguments."""
    return spec.keep == "output" and spec.process_group is None and slots is None and x.numel() > 0


def forward(passed: Passed, spec: Spec) -> tuple[Tensor, Tensor]:
    """z, and the mean and rstd in one tensor; the running statistics do not move."""
    x, weight, bias, residual, _, running_mean, running_var, _ = passed
    weight = _weight_of(weight, bias)
    N, C, *size = x.shape
    acc = stats_dtype(x)
    if not spec.own:
        assert running_mean is not None
        assert running_var is not None
        y = F.batch_norm(x, running_mean, running_var, weight, bias, eps=spec.eps)
        mean, rstd = running_mean.to(acc), torch.rsqrt(running_var.to(acc) + spec.eps)
    elif spec.kind == "group":
        wide = x if weight is None else x.to(weight.dtype)
        S = x.numel() // (N * C)
        y, mean, rstd = torch.native_group_norm(wide.contiguous(), weight, bias, N, C, S, spec.groups, spec.eps)
        y = y.to(x.dtype)
    elif spec.kind == "instance":
        each = [None if v is None else v.repeat(N) for v in (weight, bias)]
        rows = x.contiguous().view(1, N * C, *size)
        y, mean, rstd = torch.native_batch_norm(rows, each[0], each[1], None, None, True, 0.0, spec.eps)
        y = y.view(x.shape)
    else:
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, spec.eps)
    z = activate(y if residual is None else y + residual, spec.act)
    return z.contiguous(memory_format=suggest_memory_format(x)), torch.stack(
        [mean.flatten().to(acc), rstd.flatten().to(acc)]
    )
