"""What the norm ops on aten share: chunks that fit into a CPU's cache, passes over a chunk, and channel vectors."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ... import _backend
from ..._torch import FakeTensor
from ...activation import TABLE, Activation
from ..layout import Layout
from .spec import stats_dtype

Part = TypeVar("Part")

# A tensor of up to this many chunks is processed in one piece, because splitting it costs more than the cache gains.
WHOLE = 6


def chunk_elements(x: Tensor) -> int:
    """The number of elements of one chunk.

    On a CPU, the few tensors that a pass uses at once fit into the cache.  On other devices the chunks are large,
    because the number of launches matters there.
    """
    if _backend.off_cpu(x):
        return 2**26
    return 2**21 // x.element_size()


def channel_chunks(x: Tensor, D: int = 1) -> Iterator[slice]:
    """Ranges of channels of planes (N, C, S).

    A range holds whole groups of D channels, and at least two groups, so that two threads find work.
    """
    N, C, S = x.shape
    step = max(2, chunk_elements(x) // (N * S * D)) * D
    return (slice(c, min(c + step, C)) for c in range(0, C, step))


def run_of(parts: list[Part], x: Tensor) -> list[Part]:
    """The parts of ``x`` that are processed.

    Without values, two parts stand for all, because each part allocates the same memory, and the next one frees it.
    Thousands of parts of a fake tensor would take seconds.
    """
    return parts[:2] if isinstance(x, FakeTensor) and get_proxy_mode() is None else parts


def moments(xv: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of a ``channel_view``."""
    acc = stats_dtype(xv)
    if _backend.off_cpu(xv):
        var, mean = torch.var_mean(xv.to(acc), (0, 2, 3) if layout.rows else (0, 2), correction=0)
    else:
        zeros, unused = torch.zeros(2, layout.C, dtype=acc, device=xv.device)
        mean, var = torch.batch_norm_update_stats(xv, zeros, unused, 0.0)
    return mean, var


def scale_shift(x, out, weight, bias, mean, var, eps) -> None:
    """Writes out = (x - mean) / sqrt(var + eps) * weight + bias in one pass; ``out`` may be ``x``."""
    # CUDA writes the statistics there, a CPU nothing.
    unused = mean.new_empty(0), mean.new_empty(0)
    torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps, out=(out, *unused))


def affine_into(
    dx: Tensor, g: Tensor, y: Tensor, scale: Tensor, slope: Tensor, offset: Tensor, shifted: Tensor | None = None
) -> None:
    """Writes scale g + slope y + offset into ``dx``, which may be ``y``.

    ``shifted`` is memory for slope y + offset, which may be ``y``; None stands for ``dx``.  If ``shifted`` is given,
    ``dx`` may also be ``g``.
    """
    one_each = 1, -1, *(1,) * (g.dim() - 2)
    shifted = dx if shifted is None else shifted
    if y.stride(1) == 1 and y.dtype == slope.dtype:
        # In rows, aten's batch norm takes twice the time; in planes, and in half precision, it takes less.
        torch.addcmul(offset.view(one_each), y, slope.view(one_each), out=shifted)
    else:
        scale_shift(y, shifted, slope, offset, torch.zeros_like(scale), torch.ones_like(scale), 0.0)
    torch.addcmul(shifted, g, scale.to(g.dtype).view(one_each), out=dx)


def small(x: Tensor) -> bool:
    return x.numel() <= WHOLE * chunk_elements(x)


def of_channels(mean: Tensor, var: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each group, from the means and variances of its D channels.

    All channels of a group have the same number of values.
    """
    means, variances = mean.view(-1, D), var.view(-1, D)
    mean = means.mean(1)
    return mean, variances.mean(1) + (means - mean[:, None]).square_().mean(1)


def over_channels(v: Tensor, D: int) -> Tensor:
    """Repeats the value of each group for each of its D channels."""
    # repeat_interleave computes its indices first.
    return v if D == 1 else v[:, None].expand(-1, D).reshape(-1)


def over_samples(v: Tensor | None, samples: int) -> Any:
    """Repeats a vector of one value per channel for each sample."""
    # For one channel, reshape() would return a view in which all samples share one value, so all samples would move the
    # same running statistics.
    return None if v is None else v.expand(samples, -1).contiguous().view(-1)


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` except for prelu.  ``slope``, (1,) or (C,), has the slopes of prelu."""
    return TABLE[act.name].forward(y, act.param if slope is None else slope)


def activation_grad(
    dz: Tensor, y: Tensor, act: Activation, slope: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """g = dz phi'(y), and the gradient of the slope of prelu, in the shape and dtype of the slope.

    The gradient belongs to the stock function that does not overwrite its input, such as ``elu(y)``; that of
    ``elu_(y)`` is rounded differently.  g is written to ``out``, which may be ``dz`` or ``y``, if aten has an op for
    that.
    """
    row = TABLE[act.name]
    if row.learned:
        return row.grad(dz, y, slope, out)
    return row.grad(dz, y, act.param, out), None
