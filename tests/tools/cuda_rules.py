"""What PyTorch's kernels for CUDA demand of a call and how they return its results, on tensors of a CPU.

``CudaRules`` is a dispatch mode.  It computes the ops of ``RULES`` in the way of the CUDA kernels, as far as callers
notice: which arguments must be there, in which dtype and memory format, which outputs are written, and in which memory
format results are made.  An error that a call raises on a GPU is raised here too; a result that is written to a wrong
place there is in a wrong place here.  Of every other op it checks that no two outputs share memory.

Last bits, speed and the order of atomic sums are not those of a GPU.

The rules were read in PyTorch 2.11 to 2.13.  Each names its file under ``aten/src/ATen/native``.
"""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedseg.ops.layout import suggests_channels_last

aten = torch.ops.aten
# An index that no tensor has stands in memory that a kernel should have written, and did not.
NO_INDEX = 2**40


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether a write to one tensor may change the other; two empty tensors of one storage count, as they may grow."""
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False

    def last(t: Tensor) -> int:
        return t.storage_offset() + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))

    if not a.numel() or not b.numel():
        return a.storage_offset() == b.storage_offset()
    return a.storage_offset() <= last(b) and b.storage_offset() <= last(a)


def acc_dtype(x: Tensor) -> torch.dtype:
    """``at::acc_type`` of CUDA."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(f"CUDA: {text}")


def is_rows(x: Tensor) -> bool:
    """``batch_norm_use_channels_last_kernels`` in cuda/Normalization.cu: of volumes only 4 dimensions count."""
    rows = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return rows or (x.is_contiguous() and x.stride(1) == 1)


def kernel_of(x: Tensor) -> str:
    """``batch_norm_choose_impl`` in cuda/Normalization.cu, for tensors of less than 2**31 elements."""
    if x.is_contiguous():
        return "rows" if x.stride(1) == 1 else "planes"
    return "rows" if is_rows(x) else "any"


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *(1,) * (x.dim() - 2))


def over(x: Tensor) -> list[int]:
    """The dimensions over which a batch norm sums."""
    return [d for d in range(x.dim()) if d != 1]


def check_parameters(x: Tensor, vectors: dict[str, Tensor | None], stats: Sequence[Tensor | None]) -> None:
    """``is_mixed_type`` and ``get_packed_accessor`` in cuda/Normalization.cu(h).

    The first of the vectors decides about the dtype of all of them: that of x, or that of the sums.
    """
    given = {name: v for name, v in vectors.items() if v is not None}
    first = next(iter(given.values()), x).dtype
    expected = x.dtype if first == x.dtype else acc_dtype(x)
    for name, v in given.items():
        demand(v.dtype == expected, f"expected {name} to have type {expected}, got {v.dtype}")
        demand(v.is_contiguous(), f"{name} must be contiguous")
    for v in stats:
        demand(v is None or v.dtype == acc_dtype(x), f"statistics must have type {acc_dtype(x)}")


def write_elements(out: Tensor, y: Tensor, x: Tensor) -> None:
    """``batch_norm_elementwise`` in cuda/Normalization.cu: it takes the kernel of x, whatever ``out`` looks like."""
    kernel = kernel_of(x)
    if kernel == "rows":
        # The kernel counts through the memory of both tensors.
        out.as_strided(x.shape, x.stride()).copy_(y)
    elif kernel == "planes":
        shape = (*x.shape[:2], math.prod(x.shape[2:]))
        out.view(shape).copy_(y.reshape(shape))
    else:
        out.copy_(y)


def batch_norm_out(x, weight, bias, running_mean, running_var, training, momentum, eps, out, save_mean, save_invstd):
    """``batch_norm_cuda_out`` in cuda/Normalization.cu: it writes save_mean and save_invstd in eval mode too."""
    demand((running_mean is None) == (running_var is None), "running_mean and running_var must be given together")
    check_parameters(x, {"weight": weight, "bias": bias}, (save_mean, save_invstd))
    wide = x.to(acc_dtype(x))
    if training:
        var, mean = torch.var_mean(wide, over(x), correction=0)
        if running_mean is not None:
            count = x.numel() // x.shape[1]
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_((var * count / (count - 1)).to(running_var.dtype), momentum)
    else:
        demand(running_mean is not None, "running statistics are needed in eval mode")
        mean, var = running_mean, running_var
    save_mean.resize_(x.shape[1]).copy_(mean)
    save_invstd.resize_(x.shape[1]).copy_(torch.rsqrt(var + eps))
    # The kernel reads what was just written.
    y = (wide - per_channel(save_mean, x)) * per_channel(save_invstd, x)
    y = y if weight is None else y * per_channel(weight, x)
    y = y if bias is None else y + per_channel(bias, x)
    write_elements(out, y.to(x.dtype), x)
    return out, save_mean, save_invstd


def batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps):
    """``batch_norm_cuda`` in cuda/Normalization.cu."""
    stats = [x.new_empty(x.shape[1], dtype=acc_dtype(x)) for _ in range(2)]
    return batch_norm_out(
        x, weight, bias, running_mean, running_var, training, momentum, eps, torch.empty_like(x), *stats
    )


def batch_norm_backward(g, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, mask):
    """``batch_norm_backward_cuda`` in cuda/Normalization.cu.

    The sums of a norm without weight have no dtype: the kernel of planes raises, and that of channels_last returns an
    empty gradient of the bias.
    """
    demand(weight is not None or not (mask[1] or mask[2]), "tensor does not have a device (there is no weight)")
    reduces = train or mask[1] or mask[2]
    fused = reduces and mask[0] and not is_rows(x)
    running = {"running_mean": running_mean, "running_var": running_var}
    check_parameters(x, {"weight": weight, **(running if fused else {})}, (save_mean, save_invstd))
    if not fused:
        demand(save_mean is not None and save_invstd is not None, "INTERNAL ASSERT: save_mean should always be defined")
    if train or (not fused and save_mean.numel()):
        mean, invstd = save_mean, save_invstd
    else:
        mean, invstd = running_mean.to(acc_dtype(x)), torch.rsqrt(running_var.to(acc_dtype(x)) + eps)
    wide, dy = x.to(acc_dtype(x)) - per_channel(mean, x), g.to(acc_dtype(x))
    s1, s2 = dy.sum(over(x)), (dy * wide).sum(over(x))
    scale = invstd if weight is None else invstd * weight
    if train:
        m = x.numel() // x.shape[1]
        dy = dy - per_channel(s1 / m, x) - wide * per_channel(invstd.square() * s2 / m, x)
    # Only the kernel of channels_last makes its result in the format of x.
    keeps = train and not fused and kernel_of(x) == kernel_of(g) == "rows"
    dx = torch.empty_like(x) if keeps else torch.empty_like(x, memory_format=torch.contiguous_format)
    dx.copy_(dy * per_channel(scale, x))
    sums = [s if weight is None else s.to(weight.dtype) for s in (s2 * invstd, s1)]
    return [t if wanted else None for t, wanted in zip((dx, *sums), mask, strict=True)]


def check_group_norm(x: Tensor, *given: Tensor | None) -> None:
    """group_norm.cpp: 2.11 refuses channels_last, later versions copy it; both return contiguous results.

    cuda/group_norm_kernel.cu reads all tensors in the dtype of x.
    """
    demand(x.is_contiguous(), "expected X.is_contiguous(memory_format) to be true, but got false")
    for v in given:
        demand(v is None or v.dtype == x.dtype, f"expected scalar type {x.dtype} but found {v is not None and v.dtype}")


def group_norm(x, weight, bias, N, C, S, groups, eps):
    """``native_group_norm`` in group_norm.cpp: the statistics have the dtype of x, also if that is half precision."""
    check_group_norm(x, weight, bias)
    wide = x.to(acc_dtype(x)).view(N, groups, -1)
    var, mean = torch.var_mean(wide, 2, correction=0)
    rstd = torch.rsqrt(var + eps)
    y = ((wide - mean[..., None]) * rstd[..., None]).view(x.shape)
    y = y if weight is None else y * per_channel(weight, x)
    y = y if bias is None else y + per_channel(bias, x)
    return y.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def group_norm_backward(g, x, mean, rstd, weight, N, C, S, groups, mask):
    """``native_group_norm_backward`` in group_norm.cpp."""
    check_group_norm(x, g, mean, rstd, weight)
    demand(g.is_contiguous(), "expected dY to be contiguous")
    D = C // groups
    mu, r = (v.to(acc_dtype(x)).repeat_interleave(D, 1)[..., None] for v in (mean, rstd))
    dy, xhat = g.to(acc_dtype(x)).view(N, C, S), (x.to(acc_dtype(x)).view(N, C, S) - mu) * r
    s1, s2 = dy.sum(2), (dy * xhat).sum(2)
    w = torch.ones(C, dtype=acc_dtype(x)) if weight is None else weight.to(acc_dtype(x))
    m1, m2 = ((s * w).view(N, groups, D).sum(2).repeat_interleave(D, 1)[..., None] / (D * S) for s in (s1, s2))
    dx = r * (dy * w[:, None] - m1 - xhat * m2)
    found = dx.view(x.shape).to(x.dtype), s2.sum(0).to(x.dtype), s1.sum(0).to(x.dtype)
    return [t if wanted else None for t, wanted in zip(found, mask, strict=True)]


def pool_format(x: Tensor) -> torch.memory_format:
    """``suggest_memory_format`` of an image: the strides of dimensions of size 1 count."""
    return torch.channels_last if suggests_channels_last(x) else torch.contiguous_format


def write_memory(out: Tensor, values: Tensor, fmt: torch.memory_format) -> None:
    """Writes as a kernel does that knows the address of ``out`` only."""
    out.as_strided(out.shape, torch.empty(out.shape, memory_format=fmt, device="meta").stride()).copy_(values)


def max_pool2d_out(x, *window, out, indices):
    """cuda/DilatedMaxPool2d.cu: both outputs are written in the format that the strides of x suggest.

    In channels_last the index of a window of nothing but -inf is 0.
    """
    fmt = pool_format(x)
    z, index = aten.max_pool2d_with_indices(x.contiguous(), *window)
    if fmt == torch.channels_last:
        index = torch.where(z == -math.inf, 0, index)
    write_memory(out, z, fmt)
    write_memory(indices, index, fmt)
    return out, indices


def max_pool2d(x, *window):
    shape = aten.max_pool2d_with_indices(x, *window)[0].shape
    out = torch.empty(shape, dtype=x.dtype, memory_format=pool_format(x))
    return max_pool2d_out(x, *window, out=out, indices=torch.empty_like(out, dtype=torch.int64))


def max_pool2d_backward_out(g, x, *window, grad_input):
    """cuda/DilatedMaxPool2d.cu: the gradient is written in the format that the strides of ``x`` suggest."""
    *window, indices = window
    like = torch.empty(x.shape, dtype=x.dtype)
    dx = aten.max_pool2d_with_indices_backward(g.contiguous(), like, *window, indices.contiguous())
    write_memory(grad_input, dx, pool_format(x))
    return grad_input


def max_pool2d_backward(g, x, *window):
    dx = torch.empty(x.shape, dtype=x.dtype, memory_format=pool_format(x))
    return max_pool2d_backward_out(g, x, *window, grad_input=dx)


def write_collapsed(out: Tensor, values: Tensor, lost: float) -> None:
    """cuda/DilatedMaxPool3d.cu calls ``reshape`` on an output: where that is a copy, the output is never written."""
    out.fill_(lost)
    out.reshape(-1, *out.shape[-3:]).copy_(values.reshape(-1, *out.shape[-3:]))


def max_pool3d_out(x, *window, out, indices):
    """cuda/DilatedMaxPool3d.cu."""
    z, index = aten.max_pool3d_with_indices(x.contiguous(), *window)
    write_collapsed(out, z, math.nan)
    write_collapsed(indices, index, NO_INDEX)
    return out, indices


def max_pool3d(x, *window):
    """cuda/DilatedMaxPool3d.cu: the results are contiguous."""
    return aten.max_pool3d_with_indices(x.contiguous(), *window)


def max_pool3d_backward_out(g, x, *window, grad_input):
    """cuda/DilatedMaxPool3d.cu."""
    *window, indices = window
    like = torch.empty(x.shape, dtype=x.dtype)
    dx = aten.max_pool3d_with_indices_backward(g.contiguous(), like, *window, indices.contiguous())
    write_collapsed(grad_input, dx, 0.0)
    return grad_input


def max_pool3d_backward(g, x, *window):
    """cuda/DilatedMaxPool3d.cu: the result is contiguous."""
    return max_pool3d_backward_out(g, x, *window, grad_input=torch.empty(x.shape, dtype=x.dtype))


RULES: dict[Any, Callable[..., Any]] = {
    aten.native_batch_norm.default: batch_norm,
    aten.native_batch_norm.out: batch_norm_out,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.max_pool2d_with_indices.default: max_pool2d,
    aten.max_pool2d_with_indices.out: max_pool2d_out,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
    aten.max_pool2d_with_indices_backward.grad_input: max_pool2d_backward_out,
    aten.max_pool3d_with_indices.default: max_pool3d,
    aten.max_pool3d_with_indices.out: max_pool3d_out,
    aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
    aten.max_pool3d_with_indices_backward.grad_input: max_pool3d_backward_out,
}


class CudaRules(TorchDispatchMode):
    """Calls the ops of ``RULES`` by their rules, and refuses outputs of any op that share memory.

    Attributes:
        called: the names of the ops of ``RULES`` that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = [kwargs[a.name] for a in func._schema.arguments if a.is_out and a.name in kwargs]
        for a, b in combinations(written, 2):
            demand(not share_memory(a, b), f"{func} is given one memory for two outputs")
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **kwargs)
        self.called.add(func._schema.name.partition("::")[2])
        return rule(*args, **kwargs)
