"""The norm op that keeps its output, on aten ops, for samples with statistics of their own (InstanceNorm, GroupNorm).

It calls ``aten_output.py``, which serves a batch.  Contiguous planes of I samples and C channels are computed as one
sample of I C channels.  In channels_last these channels are not evenly spaced, so samples are computed one by one.
"""

from typing import Any

import torch
from torch import Tensor

from ..layout import Layout, starts_at
from . import aten_output
from .aten_chunks import over_samples
from .kept import Kept
from .spec import Gradients, Passed, Saved, Spec, Wanted


def _kept_of_all(kept: Kept | None, layout: Layout) -> Kept | None:
    if kept is None:
        return None
    first = torch.arange(layout.I, dtype=torch.int32, device=kept.slots.device)[:, None] * kept.count
    slots = torch.where(kept.slots < 0, -1, kept.slots + first).flatten()
    return Kept(slots, layout.I * kept.count, over_samples(kept.mask, layout.I))


def _as_one(layout: Layout) -> Layout:
    return layout._replace(I=1, C=layout.I * layout.C)


def _part(t: Tensor | None, i: int, samples: int) -> Any:
    """The values of sample i.

    ``t`` is a tensor whose first dimension counts samples, or a flat tensor that holds the samples in order.
    """
    if t is None or t.dim() > 1:
        return None if t is None else t[i : i + 1]
    return t.view(samples, -1)[i]


def forward(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Does what ``aten_output.forward`` does.  Mean and rstd, (I C / D,) each, and xhat of the kept channels."""
    samples, x = layout.I, passed.x
    if not layout.rows:
        weight, bias = over_samples(passed.weight, samples), over_samples(passed.bias, samples)
        passed = passed._replace(weight=weight, bias=bias)
        return aten_output.forward(passed, spec, _as_one(layout), _kept_of_all(kept, layout), out)
    found = []
    for i in range(samples):
        x_i, out_i, residual_i = (_part(t, i, samples) for t in (x, out, passed.residual))
        one = passed._replace(x=x_i, residual=residual_i)
        found.append(aten_output.forward(one, spec, layout._replace(I=1), kept, x_i if out is x else out_i))
    means, rstds, xhats = zip(*found, strict=True)
    return torch.cat(means), torch.cat(rstds), None if kept is None else torch.cat(xhats)


def backward(
    dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted, dresidual: Tensor | None
) -> Gradients:
    """Does what ``aten_output.backward`` does, but returns dweight and dbias only if they are wanted."""
    samples, z = layout.I, saved.source
    if not layout.rows:
        weight, bias = over_samples(saved.weight, samples), over_samples(saved.bias, samples)
        of_all, all_kept = saved._replace(weight=weight, bias=bias), _kept_of_all(kept, layout)
        found = aten_output.backward(dz, of_all, spec, _as_one(layout), all_kept, wanted, dresidual)
        over_all = (s.view(samples, -1).sum(0) for s in found[1:3] if s is not None and wanted.affine)
        return Gradients(found.dx, *over_all)
    dx = torch.empty_like(z) if wanted.into is None else wanted.into
    sums = []
    for i in range(samples):
        dz_i, z_i, dx_i, dresidual_i = (_part(t, i, samples) for t in (dz, z, dx, dresidual))
        residual, second, xhat = (_part(t, i, samples) for t in (saved.residual, saved.second, saved.xhat))
        one = saved._replace(source=z_i, residual=residual, second=second, xhat=xhat)
        found = aten_output.backward(
            dz_i, one, spec, layout._replace(I=1), kept, wanted._replace(into=dx_i), dresidual_i
        )
        if not starts_at(found.dx, dx_i):
            dx_i.copy_(found.dx)
        sums.append(found[1:3])
    return Gradients(dx, *(torch.stack(s).sum(0) for s in zip(*sums, strict=True))) if wanted.affine else Gradients(dx)
