"""The norm op in float64, some channels at a time, with the errors that rounding may cause in its kernels.

``triton.py`` compares its results with these at their first call of a kind; ``at_size.py`` says how bounds are found.
Names that begin with ``e_`` are such errors.  The error of a mean is ``growth(n)`` times the mean of the absolute
values.  That of a variance is twice as much of the variance, and what the error of the mean adds.  Where it is more
than a quarter of the variance, as for values far from 0 that differ in their last digits only, nothing is said.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...activation import TABLE, Activation
from ..at_size import TINY, Compared, U, channel_ranges, growth, near, rounding, wide
from . import reference, sync
from .call import Gradients, Norm, Operands, OutputGradient, Statistics, statistics_count
from .kept import Kept, finite_inverse

BATCH = Norm("input", Activation("identity", 0.0))
# The errors of functions such as exp and tanh in fp32, in units of U, beside those of their arguments.
FUNCTION = 64


def forward_kind(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Any, ...]:
    x, weight, _, residual, _, mean, _, _ = given
    return (
        x.shape, x.stride(), x.dtype, x.get_device(), norm, None if weight is None else weight.dtype, residual is None,
        mean is None, kept is None, out is None,
    )  # fmt: skip


def backward_kind(incoming: OutputGradient, given: Operands, stats: Statistics, *rest: Any) -> tuple[Any, ...]:
    x, weight, _, residual, *_ = given
    _, into, also, spare = incoming
    norm, kept, needs, exchange = rest
    return (
        x.shape, x.stride(), x.dtype, x.get_device(), norm, None if weight is None else weight.dtype, residual is None,
        kept is None, needs, exchange is None, into is None, None if also is None else also.stride(), spare,
    )  # fmt: skip


def _copy(t: Tensor | None, over: Tensor | None) -> Any:
    """``t``, or a copy of it if ``over`` is in its memory."""
    if t is None or over is None or t.data_ptr() != over.data_ptr():
        return t
    return t.detach().clone()


def before_forward(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Any, ...]:
    running = (None if v is None else v.clone() for v in (given.running_mean, given.running_var))
    mean, var = running
    return given._replace(x=_copy(given.x, out), running_mean=mean, running_var=var), norm, kept


def before_recompute(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None) -> tuple[Any, ...]:
    return given.with_x(_copy(given.x, out)), stats, norm


def before_backward(incoming: OutputGradient, given: Operands, *rest: Any) -> tuple[Any, ...]:
    dz, into, also, spare = incoming
    if rest[-1] is not None:
        # Other processes take part once, so their sums cannot be compared.
        return incoming, given, *rest
    also = None if also is None else also.clone() if spare else also
    return OutputGradient(_copy(dz, into), None, also), given.with_x(_copy(given.x, into)), *rest


class Moments(NamedTuple):
    """The mean and 1 / sqrt(var + eps) of some channels, (N or 1, channels, 1) each; the latter's error is relative."""

    mean: Tensor
    var: Tensor
    rstd: Tensor
    # Tensors, or 0 for what is given.
    e_mean: Any = 0.0
    e_var: Any = 0.0
    e_rstd: Any = 0.0


class Channels:
    """Some channels of a call, and what they have in common."""

    def __init__(self, given: Operands, norm: Norm, a: int, b: int) -> None:
        self.given, self.norm, self.a, self.b = given, norm, a, b
        self.dtype = given.x.dtype
        self.source = wide(given.x, a, b)
        self.weight = self._vector(given.weight, 1.0)
        self.bias = self._vector(given.bias, 0.0)
        self.residual = None if given.residual is None else wide(given.residual, a, b)
        # Channels that share a statistic.
        self.D = given.x.shape[1] // norm.groups if norm.kind == "group" else 1
        self.values = given.x.numel() // statistics_count(given.x, norm)

    def _vector(self, v: Tensor | None, absent: float) -> Tensor:
        if v is None:
            return self.source.new_full((1, self.b - self.a, 1), absent)
        return v.detach()[self.a : self.b].double().view(1, -1, 1)

    def mean(self, v: Tensor) -> Tensor:
        """The mean over the values of each statistic, for each channel."""
        if self.norm.kind == "batch":
            return v.mean((0, 2), keepdim=True)
        means = v.mean(2, keepdim=True)
        if self.D == 1:
            return means
        return means.view(len(v), -1, self.D, 1).mean(2, keepdim=True).expand(-1, -1, self.D, -1).reshape(means.shape)

    def of_statistics(self, v: Tensor) -> Tensor:
        """The statistics of these channels, a part of a flat vector, (N or 1, statistics)."""
        samples = 1 if self.norm.kind == "batch" else self.given.x.shape[0]
        return v.view(samples, -1)[:, self.a // self.D : self.b // self.D]

    def each(self, v: Tensor) -> Tensor:
        """One value for each channel, from a flat vector of statistics, in float64."""
        return self.of_statistics(v).double().repeat_interleave(self.D, 1).unsqueeze(2)

    def moments(self, eps: float) -> Moments:
        """The statistics of the source."""
        mean = self.mean(self.source)
        var = self.mean((self.source - mean).square_())
        grow = growth(self.values)
        e_mean = grow * (mean.square() + var).sqrt() + TINY
        e_var = 2 * grow * var + 2 * e_mean * var.sqrt() + e_mean.square()
        # A sum of squares overflows in fp32, and may in fp64.
        e_var = torch.where(var * self.values > 1e37, torch.inf, e_var)
        whole = var + eps
        e_rstd = torch.where(e_var > whole / 4, torch.inf, e_var / whole + 8 * U)
        return Moments(mean, var, whole.rsqrt(), e_mean, e_var, e_rstd)

    def normalised(self, of: Moments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """xhat, its error, y and its error."""
        x, w = self.source, self.weight.abs()
        xhat = (x - of.mean) * of.rstd
        e_xhat = of.rstd * of.e_mean + xhat.abs() * of.e_rstd + 8 * U * of.rstd * (x.abs() + of.mean.abs())
        e_xhat = e_xhat + TINY * (1 + of.rstd)
        y = self.weight * xhat + self.bias
        e_y = w * e_xhat + 8 * U * (w * xhat.abs() + self.bias.abs()) + rounding(y, self.dtype)
        if self.residual is not None:
            y = y + self.residual
            e_y = e_y + rounding(y, self.dtype)
        return xhat, e_xhat, y, e_y


def _within(f: Callable[[Tensor], Tensor], y: Tensor, e_y: Tensor) -> tuple[Tensor, Tensor]:
    """f(y), and the largest change of f for an argument that is off by e_y."""
    value = f(y)
    return value, torch.maximum((f(y + e_y) - value).abs_(), (f(y - e_y) - value).abs_())


def _activated(y: Tensor, e_y: Tensor, act: Activation, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    row, p = TABLE[act.name], act.param
    z, e_z = _within(lambda y: row.forward(y.clone(), p), y, e_y)
    return z, e_z + FUNCTION * U * (z.abs() + max(1.0, abs(p)) * y.abs()) + rounding(z, dtype)


def forward(found: tuple[Tensor, Statistics], now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of what a forward pass finds: z, the statistics, xhat of kept channels, and moved statistics."""
    z, stats = found
    given, norm, kept = before
    for a, b in channel_ranges(given.x, given.x.shape[1] // norm.groups if norm.kind == "group" else 1):
        channels = Channels(given, norm, a, b)
        if norm.own:
            of = channels.moments(norm.eps)
            for name, v, exact, error in (
                ("mean", stats.mean, of.mean, of.e_mean),
                ("rstd", stats.rstd, of.rstd, of.rstd * of.e_rstd),
            ):
                if v is not None:
                    of_group = (t[:, :: channels.D] for t in (exact, error))
                    yield near(name, channels.of_statistics(v), *of_group)
            yield from _moved(channels, of, now[0])
        else:
            mean, var = (v.double()[a:b].view(1, -1, 1) for v in (given.running_mean, given.running_var))
            of = Moments(mean, var, (var + norm.eps).rsqrt(), e_rstd=8 * U)
        xhat, e_xhat, y, e_y = channels.normalised(of)
        exact, error = _activated(y, e_y, norm.act, given.x.dtype)
        yield near("z", z[:, a:b], exact, error)
        if kept is not None and stats.xhat is not None:
            index, slots = kept.within(slice(a, b))
            side = reference._kept_view(stats.xhat, reference._view(z, norm), kept.count)[:, slots]
            mine, of_mine = (_as(t[:, index.to(t.device)], side) for t in (xhat, e_xhat))
            if mine.numel():
                yield near("xhat", side, mine, of_mine + rounding(mine, side.dtype))


def _as(t: Tensor, side: Tensor) -> Tensor:
    """(N, channels, positions) in the shape of a side buffer, in which samples may be positions."""
    return t if len(side) == len(t) else t.transpose(0, 1).reshape(1, t.shape[1], -1)


def _moved(channels: Channels, of: Moments, now: Operands) -> Iterator[Compared]:
    """The running statistics, which the kernels have moved."""
    given, norm, n = channels.given, channels.norm, channels.values
    if n < 2 or given.running_mean is None or given.running_var is None:
        return
    assert now.running_mean is not None
    assert now.running_var is not None
    part, m = slice(channels.a, channels.b), norm.momentum
    bessel = n / (n - 1)
    for name, was, moved, value, error in (
        ("running mean", given.running_mean, now.running_mean, of.mean, of.e_mean),
        ("running variance", given.running_var, now.running_var, of.var * bessel,
         # ``move_running`` takes the variance of samples from rstd.
         bessel * (of.e_var + (of.var + norm.eps) * 2 * of.e_rstd)),
    ):  # fmt: skip
        value, error, was = (t.view(-1, channels.b - channels.a).mean(0) for t in (value, error, was[part].double()))
        exact = was + m * (value - was)
        # The value and what it moves are rounded to the dtype of the buffer.
        stored = 2 * rounding(exact, moved.dtype) + m * rounding(value, moved.dtype)
        yield near(name, moved[part], exact, m * error + 8 * U * (was.abs() + value.abs()) + stored)


def recompute(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of z that is computed again, from statistics that are given."""
    given, stats, norm = before
    for a, b in channel_ranges(given.x, given.x.shape[1] // norm.groups if norm.kind == "group" else 1):
        channels = Channels(given, norm, a, b)
        mean, rstd = channels.each(stats.mean), channels.each(stats.rstd)
        *_, y, e_y = channels.normalised(Moments(mean, rstd, rstd))
        yield near("z", found[:, a:b], *_activated(y, e_y, norm.act, given.x.dtype))


def _from_output(channels: Channels, stats: Statistics, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """xhat and its error, from the output that was kept."""
    given, norm, z = channels.given, channels.norm, channels.source
    inverse = TABLE[norm.act.name].inverse
    assert inverse is not None
    y = inverse.y(z, norm.act.param, None)
    e_y = 8 * U * y.abs()
    if inverse.saturates:
        # Rounding z / p near -1, by the inverse 1 / (1 + z / p) = exp(-y).
        y = y.clamp(min=_least(channels.dtype))
        e_y = e_y + 8 * U * torch.exp(-y).clamp(min=1.0)
    shift = channels.bias if channels.residual is None else channels.bias + channels.residual
    terms = y.abs() + channels.bias.abs() + (0.0 if channels.residual is None else channels.residual.abs())
    w = channels.weight
    xhat = (y - shift) / w
    e_xhat = (e_y + 8 * U * terms) / w.abs() + 8 * U * xhat.abs() + TINY * (1 + 1 / w.abs())
    # Rounding has taken all of xhat in a channel that should be kept, and is not.
    lost = finite_inverse(w, channels.bias, channels.dtype, given.residual is not None) * w
    e_xhat = torch.where((lost - 1).abs() > 0.5, torch.inf, e_xhat)
    if kept is not None and stats.xhat is not None:
        index, slots = kept.within(slice(channels.a, channels.b))
        view = reference._view(given.x, norm)
        side = reference._kept_view(stats.xhat, view, kept.count)[:, slots].double()
        index = index.to(z.device)
        if len(side) != len(z):
            side = side.view(side.shape[1], len(z), -1).transpose(0, 1)
        xhat[:, index], e_xhat[:, index] = side, 0.0
    return xhat, e_xhat


def _least(dtype: torch.dtype) -> float:
    """The least y that the inverse of a function that saturates finds."""
    return torch.tensor(torch.finfo(dtype).eps / 8, dtype=torch.float64).log().item()


def backward(found: Gradients, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The parts of the gradients."""
    incoming, given, stats, norm, kept, needs, exchange = before
    if exchange is not None:
        return
    row, p = TABLE[norm.act.name], norm.act.param
    per_channel = given.x.numel() // given.x.shape[1]
    for a, b in channel_ranges(given.x, given.x.shape[1] // norm.groups if norm.kind == "group" else 1):
        channels = Channels(given, norm, a, b)
        rstd, w = channels.each(stats.rstd), channels.weight
        dz = wide(incoming.dz, a, b)
        e_dz = 0.0 * dz
        if incoming.also is not None:
            dz = dz + wide(incoming.also, a, b)
            e_dz = rounding(dz, given.x.dtype)

        def gradient(y: Tensor, dz: Tensor = dz) -> Tensor:
            return row.grad(dz.clone(), y, p, torch.empty_like(dz))

        if norm.keep == "input":
            xhat, e_xhat, y, e_y = channels.normalised(Moments(channels.each(stats.mean), rstd, rstd))
            g, e_g = _within(gradient, y, e_y)
        else:
            xhat, e_xhat = _from_output(channels, stats, kept)
            assert row.inverse is not None
            g = row.inverse.grad(dz, channels.source, p, None)
            e_g = torch.zeros_like(g)
            if row.inverse.saturates and kept is not None and stats.xhat is not None:
                # phi' of kept channels comes from their xhat where z is below 0.
                shift = channels.bias if channels.residual is None else channels.bias + channels.residual
                y = (w * xhat + shift).clamp(max=0.0)
                of_y = _within(gradient, y, 8 * U * ((w * xhat).abs() + shift.abs()) + TINY)
                index = kept.within(slice(a, b))[0].to(g.device)
                tail = torch.zeros_like(g, dtype=torch.bool)
                tail[:, index] = channels.source[:, index] < 0
                g, e_g = (torch.where(tail, mine, other) for mine, other in zip(of_y, (g, e_g), strict=True))
        steep = max(1.0, abs(p))
        e_g = e_g + 2 * steep * (e_dz + FUNCTION * U * dz.abs()) + TINY
        if channels.residual is not None:
            # A first kernel stores g, and a second one reads it.
            e_g = e_g + rounding(g, given.x.dtype)
        g_xhat = g * xhat
        e_g_xhat = g.abs() * e_xhat + xhat.abs() * e_g
        for name, need, v, terms, error in (
            ("dbias", needs[2], found.dbias, g, e_g), ("dweight", needs[1], found.dweight, g_xhat, e_g_xhat),
        ):  # fmt: skip
            if need and v is not None:
                exact = terms.sum((0, 2))
                bound = growth(per_channel) * terms.abs().sum((0, 2)) + error.sum((0, 2)) + rounding(exact, v.dtype)
                yield near(name, v[a:b], exact, _finite_in_fp32(terms, bound))
        dx = w * g
        e_dx = w.abs() * e_g + 8 * U * dx.abs()
        if norm.own:
            grow = growth(channels.values)
            means = []
            for terms, error in ((w * g, w.abs() * e_g), (w * g_xhat, w.abs() * e_g_xhat)):
                bound = grow * channels.mean(terms.abs()) + channels.mean(error)
                means.append((channels.mean(terms), _finite_in_fp32(terms, bound)))
            (first, e_first), (second, e_second) = means
            dx = dx - first - xhat * second
            e_dx = e_dx + e_first + xhat.abs() * e_second + e_xhat * second.abs()
            e_dx = e_dx + 8 * U * (first.abs() + (xhat * second).abs())
        dx = dx * rstd
        e_dx = e_dx * rstd + 8 * U * dx.abs() + TINY * (1 + rstd * w.abs())
        yield near("dx", found.dx[:, a:b], dx, e_dx + rounding(dx, given.x.dtype))
        if needs[3] and found.dresidual is not None:
            yield near("dresidual", found.dresidual[:, a:b], g, e_g + rounding(g, given.x.dtype))


def _finite_in_fp32(terms: Tensor, bound: Tensor) -> Tensor:
    """``bound``, or infinity where the sum of the terms may overflow in fp32."""
    return bound + torch.where(terms.abs().sum() > 1e37, torch.inf, 0.0)


def moments(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """(count, mean, M2) of each part of the values; the parts may be cut in any way, so their sum is compared."""
    (x,) = before
    merged = sync.merge(found.double())
    for a, b in channel_ranges(x):
        channels = Channels(Operands(x), BATCH, a, b)
        of, n = channels.moments(0.0), channels.values
        rows = (of.mean.new_full(of.mean.shape, n), of.mean, n * of.var)
        exact = torch.stack([v.view(-1) for v in rows])
        bound = torch.stack([v.view(-1) for v in (0.0 * of.mean, of.e_mean, n * of.e_var + TINY)])
        whole = near("moments", merged[:, a:b], exact, bound)
        parts = torch.zeros_like(found[:, :, a:b], dtype=torch.float64)
        parts[0] = exact
        close, says = (t.expand(parts.shape) for t in (whole.close, whole.says))
        yield Compared("moments", found[:, :, a:b], parts, close, says)
