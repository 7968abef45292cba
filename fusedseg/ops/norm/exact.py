"""The norm op in float64, some channels at a time, with the errors that rounding may cause in its kernels.

``triton.py`` compares its results with these at their first call of a kind; ``at_size.py`` says how bounds are found.
The formulas are those of ``aten_norms.py``.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...activation import IDENTITY, TABLE
from ..at_size import FUNCTION, STEPS, Compared, Rounded, U, channel_ranges, exactly, wide
from . import aten_norms, sync
from .call import BackwardCall, Gradients, Norm, Operands, Statistics
from .kept import Kept, finite_inverse

OF_BATCH = Norm("input", IDENTITY)
# Kernels of rows have other code for more kept channels (MAX_COLUMNS in kernels/launch.py).
MANY = 5


def forward_kind(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Any, ...]:
    """x is dense, so that its strides follow from one answer.  A residual has its dtype and its strides.  Kernels read
    the momentum, which may differ in each call.
    """
    x, weight, bias, residual, _, mean, _, batches = given
    keep, act, eps, _, own, over, _ = norm
    return (
        x.shape, x.is_contiguous(), x.dtype, x.get_device(), keep, act, eps, own, over, residual is None, out is None,
        weight if weight is None else weight.dtype, bias if bias is None else bias.dtype,
        mean if mean is None else mean.dtype, batches is None, kept if kept is None else min(kept.count, MANY),
    )  # fmt: skip


def recompute_kind(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None) -> tuple[Any, ...]:
    return forward_kind(given, norm, None, out)


def backward_kind(call: BackwardCall) -> tuple[Any, ...]:
    _, given, _, norm, kept, needs, into, also, over_also, exchange = call
    x, weight, bias, residual, _, _, _, _ = given
    keep, act, _, _, own, over, _ = norm
    return (
        x.shape, x.is_contiguous(), x.dtype, x.get_device(), keep, act, own, over, residual is None, exchange is None,
        weight if weight is None else weight.dtype, bias if bias is None else bias.dtype, needs, into is None,
        over_also, also if also is None else also.stride(), kept if kept is None else min(kept.count, MANY),
    )  # fmt: skip


def copied(given: Operands, over: Tensor | None) -> Operands:
    """The operands before the kernels write over running statistics, and over x if ``over`` is in its memory."""
    mean, var, batches = (v if v is None else v.clone() for v in (given.running_mean, given.running_var, given.batches))
    return given._replace(x=copy_of(given.x, over), running_mean=mean, running_var=var, batches=batches)


def copy_of(t: Tensor, over: Tensor | None) -> Tensor:
    return t if over is None or t.data_ptr() != over.data_ptr() else t.detach().clone()


class Channels:
    """Some channels of a call, (N, channels, positions), and their vectors, (1, channels, 1)."""

    def __init__(self, given: Operands, norm: Norm, a: int, b: int) -> None:
        self.given, self.norm, self.a, self.b = given, norm, a, b
        self.source = exactly(wide(given.x, a, b))
        self.weight, self.bias = self._vector(given.weight, 1.0), self._vector(given.bias, 0.0)
        self.residual = None if given.residual is None else exactly(wide(given.residual, a, b))
        self.row, self.p, self.steep = TABLE[norm.act.name], norm.act.param, max(1.0, abs(norm.act.param))
        # Channels and values that share a statistic.
        self.together, self.values = _together(given, norm), given.x.numel() // norm.over.count(given.x)

    def _vector(self, v: Tensor | None, absent: float) -> Rounded:
        if v is None:
            return exactly(self.source.exact.new_full((1, self.b - self.a, 1), absent))
        return exactly(v.detach()[self.a : self.b].double().view(1, -1, 1))

    def mean(self, of: Rounded) -> Rounded:
        """The mean over the values of each statistic, for each channel."""

        def mean_of(v: Tensor) -> Tensor:
            if not self.norm.over.of_samples:
                return v.mean((0, 2), keepdim=True)
            means = v.mean(2).view(len(v), -1, self.together).mean(2)
            return means.repeat_interleave(self.together, 1).unsqueeze(2)

        return of.reduced(mean_of, self.values)

    def statistics(self, v: Tensor) -> Tensor:
        """The statistics of these channels in a flat vector, (N or 1, statistics)."""
        samples = len(self.given.x) if self.norm.over.of_samples else 1
        return v.view(samples, -1)[:, self.a // self.together : self.b // self.together]

    def each(self, v: Tensor) -> Rounded:
        """One value for each channel, from a flat vector of statistics."""
        return exactly(self.statistics(v).double().repeat_interleave(self.together, 1).unsqueeze(2))

    def moments(self) -> tuple[Rounded, Rounded]:
        """The mean and the variance of the source."""
        mean = self.mean(self.source)
        away = self.source - mean
        return mean, self.mean(away * away)

    def normalised(self, mean: Rounded, rstd: Rounded) -> tuple[Rounded, Rounded]:
        """xhat and y."""
        xhat, dtype = (self.source - mean) * rstd, self.given.x.dtype
        y = (self.weight * xhat + self.bias).stored(dtype)
        return xhat, y if self.residual is None else (y + self.residual).stored(dtype)

    def activated(self, y: Rounded) -> Rounded:
        """z."""
        return y.through(lambda y: self.row.forward(y.clone(), self.p), self.steep).stored(self.given.x.dtype)

    def slope(self, y: Rounded) -> Rounded:
        """phi'(y)."""

        def slope(y: Tensor) -> Tensor:
            return self.row.grad(torch.ones_like(y), y, self.p, torch.empty_like(y))

        return y.through(slope, least=2 * self.steep)

    def kept(self, stats: Statistics, kept: Kept) -> tuple[Tensor, Tensor]:
        """The kept ones of these channels, and their xhat, which is a view of the side buffer."""
        assert stats.xhat is not None
        index, slots = kept.within(slice(self.a, self.b))
        side = aten_norms._kept_view(stats.xhat, self.norm.over.view(self.given.x), kept.count)[:, slots]
        # Samples may be positions there.
        side = side.unflatten(2, (len(self.given.x) // len(side), -1)).transpose(1, 2).flatten(0, 1)
        return index.to(side.device), side

    def from_output(self, stats: Statistics, kept: Kept | None) -> tuple[Rounded, Rounded]:
        """xhat and phi'(y), from the output that was kept."""
        z, dtype, inverse = self.source.exact, self.given.x.dtype, self.row.inverse
        assert inverse is not None
        y, slope = inverse.y(z, self.p, None), inverse.grad(torch.ones_like(z), z, self.p, None)
        bound = STEPS * U * y.abs()
        if inverse.saturates:
            # Rounding z / p near -1, by the inverse 1 / (1 + z / p) = exp(-y); the least y is that of the kernels.
            y = y.clamp(min=math.log(torch.finfo(dtype).eps / 8))
            bound = bound + STEPS * U * torch.exp(-y).clamp(min=1.0)
        w, shift = self.weight, self.bias if self.residual is None else self.bias + self.residual
        xhat = (Rounded(y, bound) - shift) * exactly(w.exact.reciprocal())
        # Rounding has taken all of xhat in a channel that should be kept, and is not.
        lost = finite_inverse(w.exact, self.bias.exact, dtype, self.residual is not None) * w.exact
        xhat = Rounded(xhat.exact, torch.where((lost - 1).abs() > 0.5, torch.inf, xhat.bound))
        of_z = Rounded(slope, torch.full_like(slope, 2 * FUNCTION * U * self.steep))
        if kept is None or stats.xhat is None:
            return xhat, of_z
        index, side = self.kept(stats, kept)
        xhat.exact[:, index], xhat.bound[:, index] = side.double(), 0.0
        if inverse.saturates:
            # phi' of kept channels comes from their xhat where z is below 0.
            y_kept = w * xhat + shift
            of_y = self.slope(Rounded(y_kept.exact.clamp(max=0.0), y_kept.bound))
            tail = torch.zeros_like(z, dtype=torch.bool)
            tail[:, index] = z[:, index] < 0
            of_z = Rounded(torch.where(tail, of_y.exact, of_z.exact), torch.where(tail, of_y.bound, of_z.bound))
        return xhat, of_z


def _together(given: Operands, norm: Norm) -> int:
    C = given.x.shape[1]
    return C // norm.over.groups_of(C)


def _parts(given: Operands, norm: Norm) -> Iterator[Channels]:
    for a, b in channel_ranges(given.x, _together(given, norm)):
        yield Channels(given, norm, a, b)


def forward(found: tuple[Tensor, Statistics], now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of what a forward pass finds: z, the statistics, xhat of kept channels, and what moves."""
    (z, stats), (given, norm, kept) = found, before
    if given.batches is not None:
        yield exactly(given.batches + 1).near("batches", now[0].batches)
    for part in _parts(given, norm):
        if norm.own:
            mean, var = part.moments()
            rstd = (var + exactly(norm.eps)).rsqrt()
            for name, v, of in (("mean", stats.mean, mean), ("rstd", stats.rstd, rstd)):
                if v is not None:
                    yield of[:, :: part.together].near(name, part.statistics(v))
            yield from _moved(part, (mean, var, rstd), now[0])
        else:
            mean, var = (part._vector(v, 0.0) for v in (given.running_mean, given.running_var))
            rstd = (var + exactly(norm.eps)).rsqrt()
        xhat, y = part.normalised(mean, rstd)
        yield part.activated(y).near("z", z[:, part.a : part.b])
        if kept is not None and stats.xhat is not None:
            index, side = part.kept(stats, kept)
            if side.numel():
                yield xhat[:, index].stored(side.dtype).near("xhat", side)


def _moved(part: Channels, moments: tuple[Rounded, Rounded, Rounded], now: Operands) -> Iterator[Compared]:
    """The running statistics, which the kernels have moved."""
    (mean, var, rstd), given, norm, n = moments, part.given, part.norm, part.values
    if n < 2 or given.running_mean is None:
        return
    # ``move_running`` takes the variance of samples from rstd.
    whole = 2 * (var.exact + norm.eps) * rstd.bound / rstd.exact
    unbiased = Rounded(var.exact, var.bound + whole) * exactly(n / (n - 1))
    for name, was, moved, value in (
        ("running mean", given.running_mean, now.running_mean, mean),
        ("running variance", given.running_var, now.running_var, unbiased),
    ):
        assert was is not None
        assert moved is not None
        of_samples = value.reduced(lambda v: v.reshape(-1, part.b - part.a).mean(0), len(value.exact))
        old = exactly(was[part.a : part.b].double())
        # The value and what it moves are rounded to the dtype of the buffer.
        new = old + (of_samples.stored(moved.dtype) - old) * exactly(norm.momentum)
        yield new.stored(moved.dtype).stored(moved.dtype).near(name, moved[part.a : part.b])


def recompute(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of z that is computed again, from statistics that are given."""
    given, stats, norm = before
    for part in _parts(given, norm):
        _, y = part.normalised(part.each(stats.mean), part.each(stats.rstd))
        yield part.activated(y).near("z", found[:, part.a : part.b])


def before_forward(given: Operands, *call: Any) -> tuple[Any, ...]:
    """The arguments of ``forward`` or ``recompute`` without the last one, the memory that they write to."""
    return copied(given, call[-1]), *call[:-1]


def before_backward(call: BackwardCall) -> tuple[BackwardCall]:
    """The call with copies of what is written over: the memory for dx, and with ``over_also`` ``also``."""
    also = call.also.clone() if call.also is not None and call.over_also else call.also
    return (call._replace(dz=copy_of(call.dz, call.into), given=copied(call.given, call.into), also=also),)


def backward(found: Gradients, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of the gradients.  The sums of other processes count as they came."""
    ((given_dz, given, stats, norm, kept, needs, _, also, _, exchange),) = before
    dtype, per_channel = given.x.dtype, given.x.numel() // given.x.shape[1]
    for part in _parts(given, norm):
        at, w, rstd = slice(part.a, part.b), part.weight, part.each(stats.rstd)
        dz = exactly(wide(given_dz, part.a, part.b))
        if also is not None:
            dz = (dz + exactly(wide(also, part.a, part.b))).stored(dtype)
        if norm.keep == "input":
            xhat, y = part.normalised(part.each(stats.mean), rstd)
            slope = part.slope(y)
        else:
            xhat, slope = part.from_output(stats, kept)
        g = dz * slope
        if part.residual is not None:
            # A first kernel stores g, and a second one reads it.
            g = g.stored(dtype)
        for name, need, v, terms in (
            ("dbias", needs[2], found.dbias, g), ("dweight", needs[1], found.dweight, g * xhat),
        ):  # fmt: skip
            if need and v is not None:
                yield terms.reduced(lambda v: v.sum((0, 2)), per_channel).stored(v.dtype).near(name, v[at])
        dx = w * g
        if norm.own:
            of_g, of_g_xhat = (
                (part.mean(dx), part.mean(dx * xhat)) if exchange is None
                else (w * exactly(s[at].double().view(1, -1, 1) / part.values) for s in exchange.sums)
            )  # fmt: skip
            dx = dx - of_g - xhat * of_g_xhat
        yield (dx * rstd).stored(dtype).near("dx", found.dx[:, at])
        if needs[3] and found.dresidual is not None:
            yield g.stored(dtype).near("dresidual", found.dresidual[:, at])


def moments(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """(count, mean, M2) of each part of the values; the parts may be cut in any way, so their sum is compared."""
    merged = sync.merge(found.double())
    for part in _parts(Operands(*before), OF_BATCH):
        mean, var = part.moments()
        n = exactly(mean.exact.new_full(mean.exact.shape, part.values))
        rows = (n, mean, var * n)
        both = Rounded(torch.stack([r.exact for r in rows]), torch.stack([r.bound for r in rows]))
        _, _, exact, close, says = both.near("moments", merged[:, part.a : part.b])
        each = found[:, :, part.a : part.b]
        # In the place of wrong parts, the first one has all values.
        whole = torch.zeros_like(each, dtype=torch.float64)
        whole[0] = exact
        yield Compared("moments", each, whole, close.expand(whole.shape), says.expand(whole.shape))
