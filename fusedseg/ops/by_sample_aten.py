"""Samples with statistics of their own (InstanceNorm, GroupNorm) on aten ops, as ``inplace_abn_aten.py`` has a batch.

Contiguous planes of I samples and C channels are one sample of I C channels.  In channels_last, where those are not
evenly spaced, samples are done one after the other.
"""

from typing import Any

import torch
from torch import Tensor

from . import inplace_abn_aten
from .kept import Kept
from .layout import Layout


def _repeated(v: Tensor | None, samples: int) -> Any:
    # a fifth of the time of Tensor.repeat
    return None if v is None else v.expand(samples, -1).contiguous().view(-1)


def _kept_of_all(kept: Kept | None, layout: Layout) -> Kept | None:
    if kept is None:
        return None
    first = torch.arange(layout.I, dtype=torch.int32, device=kept.slots.device)[:, None] * kept.count
    slots = torch.where(kept.slots < 0, -1, kept.slots + first).flatten()
    return Kept(slots, layout.I * kept.count, _repeated(kept.mask, layout.I))


def _as_one(layout: Layout) -> Layout:
    return layout._replace(I=1, C=layout.I * layout.C)


def _part(t: Tensor | None, i: int, samples: int) -> Any:
    """What belongs to sample i: of a tensor that begins with samples, or a flat one that holds them in order."""
    if t is None or t.dim() > 1:
        return None if t is None else t[i : i + 1]
    return t.view(samples, -1)[i]


def forward(x, out, layout, weight, bias, eps, act, kept, residual):
    """As ``inplace_abn_aten.forward``: mean and rstd, (I C / D,) each, and xhat of the kept channels."""

    def of_one(x, out, layout, weight, bias, kept, residual):
        return inplace_abn_aten.forward(x, out, layout, weight, bias, None, None, True, 0.0, eps, act, kept, residual)

    if not layout.rows:
        affine = _repeated(weight, layout.I), _repeated(bias, layout.I)
        return of_one(x, out, _as_one(layout), *affine, _kept_of_all(kept, layout), residual)
    found = []
    for i in range(layout.I):
        x_i, out_i, residual_i = (_part(t, i, layout.I) for t in (x, out, residual))
        out_i = x_i if out is x else out_i
        found.append(of_one(x_i, out_i, layout._replace(I=1), weight, bias, kept, residual_i))
    means, rstds, xhats = zip(*found, strict=True)
    return torch.cat(means), torch.cat(rstds), None if kept is None else torch.cat(xhats)


def backward(
    dz, z, layout, weight, bias, rstd, xhat_kept, kept, act, dparam_dtype, into=None, residual=None, dresidual=None
):
    """As ``inplace_abn_aten.backward``."""
    sums_dtype = None if dparam_dtype is None else rstd.dtype
    if not layout.rows:
        dx, dweight, dbias = inplace_abn_aten.backward(
            dz, z, _as_one(layout), _repeated(weight, layout.I), _repeated(bias, layout.I), rstd, xhat_kept,
            _kept_of_all(kept, layout), True, act, sums_dtype, into, residual, dresidual,
        )  # fmt: skip
        if dweight is None or dbias is None:
            return dx, None, None
        return dx, *(s.view(layout.I, -1).sum(0).to(dparam_dtype) for s in (dweight, dbias))
    dx = torch.empty_like(z) if into is None else into
    found = []
    for i in range(layout.I):
        dz_i, z_i, dx_i, residual_i, dresidual_i = (_part(t, i, layout.I) for t in (dz, z, dx, residual, dresidual))
        dx_new, *sums = inplace_abn_aten.backward(
            dz_i, z_i, layout._replace(I=1), weight, bias, _part(rstd, i, layout.I), _part(xhat_kept, i, layout.I),
            kept, True, act, sums_dtype, dx_i, residual_i, dresidual_i,
        )  # fmt: skip
        if dx_new.data_ptr() != dx_i.data_ptr():
            dx_i.copy_(dx_new)
        found.append(sums)
    if dparam_dtype is None:
        return dx, None, None
    return dx, *(torch.stack(s).sum(0).to(dparam_dtype) for s in zip(*found, strict=True))
