"""The norm op as stock functions: for programs that run without this package, and for a compiler to trace and fuse.

``norm_act`` is the op of exported programs, and in compiled code the op that keeps its input.  ``forward`` and
``backward`` are the op that keeps its output; AOTAutograd traces them in place of the opaque op (``op.py``).  They are
those of PyTorch's norms, so that a compiler knows them.  ``backward`` rebuilds y = phi^-1(z) and xhat = (y - bias) /
weight from z, as ``aten_output.py`` does, but without chunks: a compiler fuses both into their readers.  Channels whose
weight is too small for that do not come here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import suggest_memory_format
from ...activation import TABLE, Activation
from .spec import Gradients, Passed, Saved, Spec, cast, stats_dtype

aten = torch.ops.aten


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
    """Whether ``forward`` and ``backward`` compute the op of these arguments."""
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


def backward(dz: Tensor, saved: Saved, spec: Spec, wanted: Sequence[bool]) -> Gradients:
    """The gradients of x, weight, bias and residual; ``wanted`` asks for those of weight and bias, and of residual."""
    z, weight, bias, residual, *_ = saved
    acc, inverse = stats_dtype(z), TABLE[spec.act.name].inverse
    assert inverse is not None
    N, C, *size = z.shape
    # In half precision y would be rounded once more.
    wide, dwide = z.to(acc), dz.to(acc)
    g = inverse.grad(dwide, wide, spec.act.param, None)
    y = inverse.y(wide, spec.act.param, None)
    if residual is not None:
        y = y - residual.to(acc)
    scale = torch.ones(C, dtype=acc, device=z.device) if weight is None else cast(weight, acc)
    shift = torch.zeros_like(scale) if bias is None else cast(bias, acc)
    inv, rstd = 1 / scale, saved.second
    if spec.own and spec.kind == "batch":
        mask = [True, wanted[0], wanted[0]]
        dx, dweight, dbias = aten.native_batch_norm_backward(
            g, y, scale * scale * rstd, None, None, shift, inv, train=True, eps=spec.eps, output_mask=mask
        )
    else:
        each = -1, C, *(1 for _ in size)
        scale, shift, inv = (v.view(each) for v in (scale, shift, inv))
        xhat = (y - shift) * inv
        over = [d for d in range(z.dim()) if d > 1 or (d == 0 and not spec.own)]
        s1, s2 = g.sum(over, keepdim=True), (g * xhat).sum(over, keepdim=True)
        dweight, dbias = s2.sum(0).flatten(), s1.sum(0).flatten()
        if spec.own:
            groups = C if spec.kind == "instance" else spec.groups
            m1, m2 = (_of_groups(v * scale, groups, z.numel() // (N * groups)) for v in (s1, s2))
            rstd = rstd.view(N, groups, 1).expand(N, groups, C // groups).reshape(each)
            dx = rstd * (scale * g - m1 - xhat * m2)
        else:
            dx = g * (scale * rstd.view(each))
    dresidual = g.to(z.dtype) if wanted[1] else None
    return Gradients(dx.to(z.dtype).contiguous(memory_format=suggest_memory_format(z)), dweight, dbias, dresidual)


def _of_groups(v: Tensor, groups: int, count: int) -> Tensor:
    """The mean over ``count`` values of each group, for each of its channels, from sums (N, C, 1, ...) of channels."""
    N, C = v.shape[:2]
    mean = v.view(N, groups, -1).sum(2, keepdim=True) / count
    return mean.expand(N, groups, C // groups).reshape(v.shape)
