"""The norm op that keeps its output, on aten ops, for every device.  The mathematics is in ``kernels/norm_act.py``.

Backward rebuilds y = phi^-1(z) and g = dz phi'(z) chunk by chunk.  So the values that one op writes are still in the
cache when the next op reads them, and a large tensor (over 12 MiB on a CPU) needs no temporary of its size.  All chunks
use the same memory, because the first write to a page of new memory costs more than the arithmetic on it.  With
xhat = (y - shift) * inverse (shift = bias, inverse = 1 / weight; for a kept channel y is xhat itself, shift 0 and
inverse 1),

    native_batch_norm_backward(g, y, weight=weight rstd / inverse, save_mean=shift, save_invstd=inverse)

is exactly (dx, dweight, dbias).

The statistics of groups of D channels are merged from the statistics of their channels, and dx is computed from sums.
``aten_samples.py`` serves samples with statistics of their own.
"""

import torch
from torch import Tensor

from ..._backend import on_gpu
from ..._torch import FakeTensor
from ...activation import TABLE, Activation, Inverse
from ..layout import Layout, channel_view, per_channel, starts_at
from . import aten_chunks
from .kept import Kept, finite_inverse
from .spec import Exchange, Gradients, Passed, Saved, Spec, Wanted, cast, stats_dtype

# A call of ``torch.ops`` is shortest if an overload is called by position.
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default

EVERY = slice(None)


def _inverse(act: Activation) -> Inverse:
    inverse = TABLE[act.name].inverse
    assert inverse is not None, act
    return inverse


def _finish_(y: Tensor, act: Activation, residual: Tensor | None, layout: Layout) -> None:
    if residual is not None:
        y.add_(channel_view(residual, layout))
    aten_chunks.activate(y, act)


def forward(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Writes z into ``out``.  Returns mean, rstd and the xhat of the kept channels, which is flat, or None."""
    x, weight, bias, residual = passed.x, passed.weight, passed.bias, passed.residual
    running_mean, running_var, training = passed.running_mean, passed.running_var, spec.own
    momentum, eps, act, acc = spec.momentum, spec.eps, spec.act, stats_dtype(x)
    # Parameters in fp32 make aten compute the statistics of half-precision input in fp32.
    weight = torch.ones(layout.C, dtype=acc, device=x.device) if weight is None else cast(weight, acc)
    bias = cast(bias, acc)
    own_update = running_mean is not None and running_mean.dtype != acc
    at_once = training and kept is None and layout.D == 1 and not own_update
    xv = channel_view(x, layout)
    outv = xv if out is x else channel_view(out, layout)
    if at_once:
        mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
        torch.native_batch_norm(
            xv, weight, bias, running_mean, running_var, True, momentum, eps, out=(outv, mean, rstd)
        )
        _finish_(outv, act, residual, layout)
        return mean, rstd, None
    if training:
        mean, var = aten_chunks.moments(xv, layout)
    else:
        mean, var = cast(running_mean, acc), cast(running_var, acc)
    if layout.D > 1:
        mean, var = aten_chunks.of_channels(mean, var, layout.D)
    rstd = torch.rsqrt(var + eps)
    found = mean, rstd
    mean, var, rstd = (aten_chunks.over_channels(v, layout.D) for v in (mean, var, rstd))
    xhat_kept = None
    if kept is not None:
        index = kept.index.to(x.device)
        xhat = xv.index_select(1, index).to(acc)
        xhat = (xhat - per_channel(mean[index], layout)) * per_channel(rstd[index], layout)
        xhat_kept = x.new_empty(xhat.numel())
        channel_view(xhat_kept, layout._replace(C=kept.count)).copy_(xhat)
    aten_chunks.scale_shift(xv, outv, weight, bias, mean, var, eps)
    _finish_(outv, act, residual, layout)
    if training and running_mean is not None and running_var is not None:
        m = layout.N * layout.S
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (m / (m - 1))).to(running_var.dtype), momentum)
    return *found, xhat_kept


class _Backward:
    """The values that all chunks of one backward pass share."""

    def __init__(self, saved: Saved, act: Activation, layout: Layout, kept: Kept | None, dresidual: Tensor | None):
        self.act, self.kept, self.D = act, kept, layout.D
        self.m = layout.N * layout.S * layout.D
        self.g_is_dz = TABLE[act.name].identity
        self.residual = None if saved.residual is None else channel_view(saved.residual, layout)
        self.dresidual = None if dresidual is None else channel_view(dresidual, layout)
        self.rstd = rstd = aten_chunks.over_channels(saved.second, layout.D)
        self.shift = torch.zeros_like(rstd) if saved.bias is None else cast(saved.bias, rstd.dtype)
        self.weight = torch.ones_like(rstd) if saved.weight is None else cast(saved.weight, rstd.dtype)
        self.inverse, square = finite_inverse(self.weight, self.shift, saved.source.dtype, self.residual is not None)
        self.rescaled = square.mul_(rstd)
        if kept is not None:
            index = kept.index.to(rstd.device)
            self.rescaled.index_copy_(0, index, (self.weight * rstd)[index])
            self.shift, self.inverse = self.shift.index_fill(0, index, 0.0), self.inverse.index_fill_(0, index, 1.0)
            assert saved.xhat is not None
            self.xhat = channel_view(saved.xhat, layout._replace(C=kept.count))

    def gradient(self, z: Tensor, dz: Tensor, c: slice, rows: slice, out: Tensor | None = None) -> Tensor:
        """g of a range of channels (planes) or rows.

        It is written into dresidual if that gradient is wanted, otherwise into ``out`` or new memory.  If g equals dz
        and there is no ``out``, ``dz`` itself is returned.
        """
        out = out if self.dresidual is None else self.dresidual[:, c, rows]
        return _inverse(self.act).grad(dz, z, self.act.param, out)

    def invert(self, z: Tensor, c: slice, rows: slice, out: Tensor | None = None) -> Tensor:
        """y of a range of channels or rows, in ``out`` or new memory, or ``z`` itself if y equals z.

        ``out`` may lie in the memory of ``z``.
        """
        y = _inverse(self.act).y(z, self.act.param, out)
        if y is z and out is not None and out.is_contiguous() and not z.is_contiguous():
            # aten is slow on memory with gaps.
            y = out.copy_(z)
        if self.residual is not None:
            y = torch.sub(y, self.residual[:, c, rows], out=out if y is z else y)
        if self.kept is not None:
            into, slots = self.kept.within(c)
            if into.numel():
                y = y if y is not z else y.clone() if out is None else out.copy_(y)
                y[:, into.to(y.device)] = self.xhat[:, slots, rows]
        return y

    def reduce(self, g: Tensor, y: Tensor, c: slice, dx_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        """dx, s2 and s1 of these values alone."""
        weight, shift, inverse = self.rescaled, self.shift, self.inverse
        if c != EVERY:
            weight, shift, inverse = weight[c], shift[c], inverse[c]
        own = None, None, shift, inverse
        return _batch_norm_backward(g, y, weight, *own, True, 0.0, [dx_wanted, True, True])

    def affine(self, s1: Tensor, s2: Tensor, c: slice) -> tuple[Tensor, Tensor, Tensor]:
        """scale, slope and offset of dx = scale g + slope y + offset, for the channels ``c`` with these sums."""
        rstd, inverse, shift, weight = (v[c] for v in (self.rstd, self.inverse, self.shift, self.weight))
        scale, t1, t2 = weight * rstd, weight * s1, weight * s2
        if self.D > 1:
            t1, t2 = (aten_chunks.over_channels(t.view(-1, self.D).sum(1), self.D) for t in (t1, t2))
        slope = (t2 * rstd).mul_(inverse).div_(-self.m)
        return scale, slope, (t1 * rstd).div_(-self.m).addcmul_(slope, shift, value=-1)


def backward(
    dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted, dresidual: Tensor | None
) -> Gradients:
    """dx, dweight and dbias.  dweight and dbias have the dtype of the statistics, and are computed in any case.

    The gradient of the residual is written into ``dresidual`` if that is given.  dx may be new memory even if
    ``wanted.into`` is given, because some calls of aten allocate dx themselves.
    """
    z, training, into, exchange = saved.source, spec.own, wanted.into, wanted.exchange
    job = _Backward(saved, spec.act, layout, kept, dresidual)
    rstd = job.rstd
    at_once = training and layout.D == 1 and exchange is None and aten_chunks.small(z)
    zv, dzv = channel_view(z, layout), channel_view(dz, layout)
    # Where aten allocates dx, g may take the memory of dz.
    over = dzv if into is not None and starts_at(into, dz) else None
    if at_once:
        g, y = job.gradient(zv, dzv, EVERY, EVERY, over), job.invert(zv, EVERY, EVERY)
        dx, s2, s1 = job.reduce(g, y, EVERY, True)
    elif isinstance(z, FakeTensor) and on_gpu(z):
        # The kernel of a GPU has no chunks.
        dx, s2, s1 = torch.empty_like(z) if into is None else into, torch.empty_like(rstd), torch.empty_like(rstd)
    else:
        dx = torch.empty_like(z) if into is None else into
        dxv = channel_view(dx, layout)
        if layout.rows or exchange is not None:
            s2, s1 = _backward_twice(job, zv, dzv, dxv, training, layout.rows, exchange)
        else:
            s2, s1 = _backward_planes(job, zv, dzv, dxv, training)
    return Gradients(dx.as_strided(z.shape, z.stride()), s2, s1)


def _backward_planes(job: _Backward, z: Tensor, dz: Tensor, dx: Tensor, training: bool) -> tuple[Tensor, Tensor]:
    """Writes dx in one sweep over ranges of channels, which are independent.  Returns s2 and s1."""
    N, _, S = z.shape
    parts = list(aten_chunks.channel_chunks(z, job.D))
    s1, s2 = [], []
    at_once = training and job.D == 1
    memory = z.new_empty((2, N * (parts[0].stop - parts[0].start) * S))
    run = aten_chunks.run_of(parts, z)
    for c in run:
        z_c, dx_c = z[:, c], dx[:, c]
        g, y = (of_all[: z_c.numel()].view(z_c.shape) for of_all in memory)
        g, y = job.gradient(z_c, dz[:, c], c, EVERY, g), job.invert(z_c, c, EVERY, y)
        found, s2_c, s1_c = job.reduce(g, y, c, at_once)
        if at_once:
            dx_c.copy_(found)
        elif training:
            aten_chunks.affine_into(dx_c, g, y, *job.affine(s1_c, s2_c, c))
        else:
            torch.mul(g, (job.weight[c] * job.rstd[c]).view(1, -1, 1), out=dx_c)
        s1.append(s1_c)
        s2.append(s2_c)
    times = -(-len(parts) // len(run))
    return torch.cat(s2 * times)[: z.shape[1]], torch.cat(s1 * times)[: z.shape[1]]


def _backward_twice(
    job: _Backward, z: Tensor, dz: Tensor, dx: Tensor, training: bool, rows: bool, exchange: Exchange | None
) -> tuple[Tensor, Tensor]:
    """Writes dx in two sweeps: the first computes the sums, the second dx.  Returns s2 and s1.

    The sweeps go over ranges of channels, or over runs of ``rows``, in which a range of channels is scattered.
    """
    if rows:
        C, m = z.shape[1:3]
        step = max(1, aten_chunks.chunk_elements(z) // C)
        parts = [(EVERY, slice(n, n + step)) for n in range(0, m, step)]
    else:
        parts = [(c, EVERY) for c in aten_chunks.channel_chunks(z, job.D)]
    memory = z.new_empty(z[:, parts[0][0], parts[0][1]].numel())

    # All parts share the memory of y, as in ``_backward_planes``.
    def memory_of(part: Tensor) -> Tensor:
        n, c, m = part.shape[:3]
        return memory[: n * c * m].as_strided(part.shape, (m * c, 1, c, c) if rows else (c * m, m, 1))

    # g is stored for the second sweep in the memory of dresidual or dx, unless dx lies in the memory of z.
    over_z = starts_at(dx, z)
    waits = job.dresidual if job.dresidual is not None else None if over_z or job.g_is_dz else dx
    sums = []
    run = aten_chunks.run_of(parts, z)
    for c, r in run:
        z_cr = z[:, c, r]
        g = job.gradient(z_cr, dz[:, c, r], c, r, None if waits is None else waits[:, c, r])
        sums.append(job.reduce(g, job.invert(z_cr, c, r, memory_of(z_cr)), c, False))
    sums *= -(-len(parts) // len(run))
    s2, s1 = (torch.stack(s).sum(0) if rows else torch.cat(s)[: z.shape[1]] for s in list(zip(*sums, strict=True))[1:])
    vectors = job.affine(*((s1, s2) if exchange is None else exchange(s1, s2)), EVERY)
    for c, r in reversed(run):
        z_cr, dx_cr = z[:, c, r], dx[:, c, r]
        g = dx_cr if waits is dx else waits[:, c, r] if waits is not None else job.gradient(z_cr, dz[:, c, r], c, r)
        scale, slope, offset = (v[c] for v in vectors)
        if training:
            y = job.invert(z_cr, c, r, shifted := memory_of(z_cr))
            aten_chunks.affine_into(dx_cr, g, y, scale, slope, offset, shifted)
        else:
            torch.mul(g, scale.to(z.dtype).view(1, -1, *(1,) * (z.dim() - 2)), out=dx_cr)
    return s2, s1
