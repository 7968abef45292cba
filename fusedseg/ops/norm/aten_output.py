"""The norm op that keeps its output on aten ops, for every device: the mathematics of ``kernels/norm_act.py``.

Backward rebuilds y = phi^-1(z) and g = dz phi'(z) a chunk at a time, so that what one op writes is still in the cache
when the next one reads it, and a large tensor (over 12 MiB on a CPU) has no temporary of its size.  With
xhat = (y - shift) * inverse (shift = bias, inverse = 1 / weight; for a kept channel y is xhat itself, shift 0 and
inverse 1),

    native_batch_norm_backward(g, y, weight=weight rstd / inverse, save_mean=shift, save_invstd=inverse)

is exactly (dx, dweight, dbias).  Groups of D channels, on a CPU, are given to aten's group norm a few at a time
(planes), or all where they are small (rows).  Else their statistics are merged from those of the channels; dx then is
scale g + slope y + offset of vectors per channel, as it is where sums come first.  Samples with statistics of their own
are dealt with in ``aten_samples.py``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...activation import TABLE, Activation, Inverse
from ..layout import Layout, channel_view, per_channel
from . import aten_groups
from .kept import Kept
from .spec import Exchange, Gradients, Passed, Saved, Spec, Wanted, stats_dtype

aten = torch.ops.aten

# so many chunks are still done as one: dealing them out costs more than the cache gains
WHOLE = 6
# aten's statistics of contiguous fp32 and fp64 planes run at a tenth of the memory's speed; below this they cost less
SLOW_STATISTICS = 2**16


def cast(v: Tensor, dtype: torch.dtype) -> Tensor:
    """``v.to(dtype)``, without the call where there is nothing to do, as nearly always."""
    return v if v.dtype == dtype else v.to(dtype)


def _chunk_elements(x: Tensor) -> int:
    """What leaves room in a CPU's cache for the few tensors in flight; elsewhere the number of launches counts."""
    if x.device.type != "cpu":
        return 2**26
    return 2**21 // x.element_size()


def _channel_chunks(x: Tensor, D: int = 1) -> Iterator[slice]:
    """Ranges of channels of planes (N, C, S), whole groups of D, two at least, so that two threads find work."""
    N, C, S = x.shape
    step = max(2, _chunk_elements(x) // (N * S * D)) * D
    return (slice(c, min(c + step, C)) for c in range(0, C, step))


def _plane_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of (N, C, S), in two passes of which the second meets the cache."""
    m = x.shape[0] * x.shape[2]
    means, variances = [], []
    for c in _channel_chunks(x):
        # positions first, samples then: aten is slow at reducing over both at once
        mean = x[:, c].sum(2).sum(0).div_(m)
        d = x[:, c] - mean.view(1, -1, 1)
        means.append(mean)
        variances.append(torch.linalg.vector_norm(d, dim=2).square_().sum(0).div_(m))
    return torch.cat(means), torch.cat(variances)


def _slow_statistics(x: Tensor, layout: Layout, acc: torch.dtype) -> bool:
    slow = x.device.type == "cpu" and not layout.rows and x.dtype == acc and x.numel() > SLOW_STATISTICS
    # nothing is slow without values but many pieces
    return slow and not isinstance(x, FakeTensor)


def moments(xv: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel of a ``channel_view``."""
    acc = stats_dtype(xv)
    if _slow_statistics(xv, layout, acc):
        return _plane_moments(xv)
    if xv.device.type == "cpu":
        mean, var = aten.batch_norm_update_stats(xv, *torch.zeros(2, layout.C, dtype=acc), 0.0)
    else:
        var, mean = torch.var_mean(xv.to(acc), (0, 2, 3) if layout.rows else (0, 2), correction=0)
    return mean, var


def _scale_shift(x, out, weight, bias, mean, var, eps) -> None:
    """out = (x - mean) / sqrt(var + eps) * weight + bias in one pass; ``out`` may be ``x``."""
    unused = mean.new_empty(0)
    torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps, out=(out, unused, unused))


def activate_(z: Tensor, act: Activation) -> Tensor:
    return TABLE[act.name].forward(z, act.param)


def _inverse(act: Activation) -> Inverse:
    inverse = TABLE[act.name].inverse
    assert inverse is not None, act
    return inverse


def _small(x: Tensor) -> bool:
    return x.numel() <= WHOLE * _chunk_elements(x)


def _as_group_norm(x: Tensor, layout: Layout) -> bool:
    """Whether aten's group norm does it: not where its temporaries are large, nor without values."""
    if layout.D == 1 or x.device.type != "cpu" or isinstance(x, FakeTensor):
        return False
    return not layout.rows or _small(x)


def _finish_(y: Tensor, act: Activation, residual: Tensor | None, layout: Layout) -> None:
    if residual is not None:
        y.add_(channel_view(residual, layout))
    activate_(y, act)


def forward(
    passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Writes z into ``out``.  Mean, rstd and xhat of the kept channels, flat or None, of the batch or of one sample."""
    x, weight, bias, residual = passed.x, passed.weight, passed.bias, passed.residual
    running_mean, running_var, training = passed.running_mean, passed.running_var, spec.own
    momentum, eps, act, acc = spec.momentum, spec.eps, spec.act, stats_dtype(x)
    xv = channel_view(x, layout)
    outv = xv if out is x else channel_view(out, layout)
    # parameters in fp32 are also what makes aten compute the statistics of half-precision input in fp32
    weight = torch.ones(layout.C, dtype=acc, device=x.device) if weight is None else cast(weight, acc)
    bias = bias if bias is None or bias.dtype == acc else bias.to(acc)
    own_update = running_mean is not None and running_mean.dtype != acc
    if training and kept is None and not _slow_statistics(x, layout, acc) and not own_update and layout.D == 1:
        mean, rstd = torch.empty_like(weight), torch.empty_like(weight)
        torch.native_batch_norm(
            xv, weight, bias, running_mean, running_var, True, momentum, eps, out=(outv, mean, rstd)
        )
        _finish_(outv, act, residual, layout)
        return mean, rstd, None
    if training and kept is None and _as_group_norm(x, layout):
        means, rstds = [], []
        for c in (EVERY,) if layout.rows else _channel_chunks(xv, layout.D):
            y, mean, rstd = aten_groups.forward(xv[:, c], weight[c], None if bias is None else bias[c], layout.D, eps)
            means.append(mean)
            rstds.append(rstd)
            if residual is not None:
                y.add_(channel_view(residual, layout)[:, c])
            _inverse(act).into(y, act.param, outv[:, c])
        return torch.cat(means), torch.cat(rstds), None
    if training:
        mean, var = moments(xv, layout)
    else:
        mean, var = cast(running_mean, acc), cast(running_var, acc)  # type: ignore[arg-type]
    if layout.D > 1:
        mean, var = aten_groups.of_channels(mean, var, layout.D)
    rstd = torch.rsqrt(var + eps)
    found = mean, rstd
    mean, var, rstd = (aten_groups.over_channels(v, layout.D) for v in (mean, var, rstd))
    xhat_kept = None
    if kept is not None:
        index = kept.index.to(x.device)
        xhat = xv.index_select(1, index).to(acc)
        xhat = (xhat - per_channel(mean[index], layout)) * per_channel(rstd[index], layout)
        xhat_kept = x.new_empty(xhat.numel())
        channel_view(xhat_kept, layout._replace(C=kept.count)).copy_(xhat)
    _scale_shift(xv, outv, weight, bias, mean, var, eps)
    _finish_(outv, act, residual, layout)
    if training and running_mean is not None and running_var is not None:
        m = layout.N * layout.S
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (m / (m - 1))).to(running_var.dtype), momentum)
    return *found, xhat_kept


class _Backward:
    """One backward pass: what all chunks share."""

    def __init__(self, saved: Saved, act: Activation, layout: Layout, kept: Kept | None, dresidual: Tensor | None):
        self.act, self.kept, self.D = act, kept, layout.D
        self.m = layout.N * layout.S * layout.D
        both = saved.residual, dresidual
        self.residual, self.dresidual = (None if t is None else channel_view(t, layout) for t in both)
        self.rstd = rstd = aten_groups.over_channels(saved.second, layout.D)
        self.shift = torch.zeros_like(rstd) if saved.bias is None else cast(saved.bias, rstd.dtype)
        self.weight = torch.ones_like(rstd) if saved.weight is None else cast(saved.weight, rstd.dtype)
        self.inverse = self.weight.reciprocal()
        self.rescaled = self.weight.square().mul_(rstd)
        if kept is not None:
            index = kept.index.to(rstd.device)
            self.rescaled.index_copy_(0, index, (self.weight * rstd)[index])
            self.shift, self.inverse = self.shift.index_fill(0, index, 0.0), self.inverse.index_fill_(0, index, 1.0)
            assert saved.xhat is not None
            self.xhat = channel_view(saved.xhat, layout._replace(C=kept.count))

    def rebuild(self, z: Tensor, dz: Tensor, c: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """g and y of a range of channels (planes) or rows."""
        inverse, param = _inverse(self.act), self.act.param
        y = inverse.y(z, param)
        if self.residual is not None:
            r = self.residual[:, c, rows]
            y = z - r if y is z else y.sub_(r)
        if self.kept is not None:
            into, slots = self.kept.within(c)
            if into.numel():
                y = y.clone() if y is z else y
                y[:, into.to(y.device)] = self.xhat[:, slots, rows]
        return inverse.grad(dz, z, param, None if self.dresidual is None else self.dresidual[:, c, rows]), y

    def reduce(self, g: Tensor, y: Tensor, c: slice, dx_wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
        """dx, s2, s1 of these values alone."""
        weight, shift, inverse = self.rescaled, self.shift, self.inverse
        if c != EVERY:
            weight, shift, inverse = weight[c], shift[c], inverse[c]
        return aten.native_batch_norm_backward(
            g, y, weight, None, None, shift, inverse, True, 0.0, [dx_wanted, True, True]
        )

    def reduce_groups(self, g: Tensor, y: Tensor, z: Tensor, c: slice) -> tuple[Tensor, Tensor, Tensor]:
        """The same of whole groups of channels; ``y`` is overwritten unless it is ``z``."""
        weight, rstd = self.weight[c], self.rstd[c]
        scale = self.inverse[c] / rstd
        centred = torch.empty_like(y) if y is z else y
        _scale_shift(y, centred, scale, self.shift[c] * -scale, torch.zeros_like(scale), torch.ones_like(scale), 0.0)
        return aten_groups.backward(g, centred, weight, rstd, self.D)

    def affine(self, s1: Tensor, s2: Tensor, c: slice) -> tuple[Tensor, Tensor, Tensor]:
        """scale, slope and offset of dx = scale g + slope y + offset, for channels whose sums are these."""
        rstd, inverse, shift, weight = (v[c] for v in (self.rstd, self.inverse, self.shift, self.weight))
        t1, t2 = weight * s1, weight * s2
        if self.D > 1:
            t1, t2 = (aten_groups.over_channels(t.view(-1, self.D).sum(1), self.D) for t in (t1, t2))
        slope = rstd * inverse * t2 / -self.m
        return weight * rstd, slope, rstd * t1 / -self.m - slope * shift


def _affine_into(dx: Tensor, g: Tensor, y: Tensor, scale: Tensor, slope: Tensor, offset: Tensor) -> None:
    _scale_shift(y, dx, slope, offset, torch.zeros_like(scale), torch.ones_like(scale), 0.0)
    dx.addcmul_(g, scale.to(g.dtype).view(1, -1, *(1,) * (g.dim() - 2)))


EVERY = slice(None)


def backward(
    dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted, dresidual: Tensor | None
) -> Gradients:
    """dx, dweight and dbias, the latter two in the dtype of the statistics, whether wanted or not.

    ``dresidual``, where given, is written.  In one piece dx is new memory even where ``wanted.into`` is given, since
    aten makes it.
    """
    z, training, into, exchange = saved.source, spec.own, wanted.into, wanted.exchange
    job = _Backward(saved, spec.act, layout, kept, dresidual)
    rstd = job.rstd
    zv, dzv = channel_view(z, layout), channel_view(dz, layout)
    # x - mean is not rounded to half precision
    as_groups = training and exchange is None and z.dtype == rstd.dtype and _as_group_norm(z, layout)
    if training and layout.D == 1 and exchange is None and _small(z):
        dx, s2, s1 = job.reduce(*job.rebuild(zv, dzv, EVERY, EVERY), EVERY, True)
    elif as_groups and _small(z):
        dx, s2, s1 = job.reduce_groups(*job.rebuild(zv, dzv, EVERY, EVERY), zv, EVERY)
    elif isinstance(z, FakeTensor):
        # pieces without values, by the thousand, would take seconds
        dx, s2, s1 = torch.empty_like(z) if into is None else into, torch.empty_like(rstd), torch.empty_like(rstd)
    else:
        dx = torch.empty_like(z) if into is None else into
        dxv = channel_view(dx, layout)
        if layout.rows or exchange is not None:
            s2, s1 = _backward_twice(job, zv, dzv, dxv, training, layout.rows, exchange)
        else:
            s2, s1 = _backward_planes(job, zv, dzv, dxv, training, as_groups)
    return Gradients(dx.as_strided(z.shape, z.stride()), s2, s1)


def _backward_planes(
    job: _Backward, z: Tensor, dz: Tensor, dx: Tensor, training: bool, as_groups: bool
) -> tuple[Tensor, Tensor]:
    """Groups of channels are independent: each range of them is done in one sweep.  Returns s2 and s1."""
    s1, s2 = [], []
    at_once = training and job.D == 1
    for c in _channel_chunks(z, job.D):
        z_c = z[:, c]
        g, y = job.rebuild(z_c, dz[:, c], c, EVERY)
        dx_c, s2_c, s1_c = job.reduce_groups(g, y, z_c, c) if as_groups else job.reduce(g, y, c, at_once)
        if at_once or as_groups:
            dx[:, c] = dx_c
        elif training:
            _affine_into(dx[:, c], g, y, *job.affine(s1_c, s2_c, c))
        else:
            dx[:, c] = g * (job.weight[c] * job.rstd[c]).view(1, -1, 1)
        s1.append(s1_c)
        s2.append(s2_c)
    return torch.cat(s2), torch.cat(s1)


def _backward_twice(
    job: _Backward, z: Tensor, dz: Tensor, dx: Tensor, training: bool, rows: bool, exchange: Exchange | None
) -> tuple[Tensor, Tensor]:
    """Two sweeps, over runs of rows, since a range of channels is scattered there, or over ranges of channels: the
    sums, then dx.  Returns s2 and s1."""
    if rows:
        C, m = z.shape[1:3]
        step = max(1, _chunk_elements(z) // C)
        parts = [(EVERY, slice(n, n + step)) for n in range(0, m, step)]
    else:
        parts = [(c, EVERY) for c in _channel_chunks(z, job.D)]
    # g is written where it is wanted once, in the second
    dresidual, job.dresidual = job.dresidual, None
    sums = [job.reduce(*job.rebuild(z[:, c, r], dz[:, c, r], c, r), c, False) for c, r in parts]
    job.dresidual = dresidual
    s2, s1 = (torch.stack(s).sum(0) if rows else torch.cat(s) for s in list(zip(*sums, strict=True))[1:])
    vectors = job.affine(*((s1, s2) if exchange is None else exchange(s1, s2)), EVERY)
    for c, r in reversed(parts):
        g, y = job.rebuild(z[:, c, r], dz[:, c, r], c, r)
        scale, slope, offset = (v[c] for v in vectors)
        if training:
            _affine_into(dx[:, c, r], g, y, scale, slope, offset)
        else:
            torch.mul(g, scale.to(z.dtype).view(1, -1, *(1,) * (z.dim() - 2)), out=dx[:, c, r])
    return s2, s1
