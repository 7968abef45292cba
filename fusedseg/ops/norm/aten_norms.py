"""The norm op in PyTorch's own functions, for every device: the reference of the Triton kernels (``triton.py``).

The formulas, with one mean and one rstd for each of the values that share a statistic, and w and b for each channel:

    xhat = (x - mean) rstd      y = w xhat + b [+ residual]      z = phi(y)

    g = dz phi'(y)      dweight = sum(g xhat)      dbias = sum(g)      dresidual = g
    dx = rstd (w g - mean(w g) - xhat mean(w g xhat))      or rstd w g if the statistics are constants

``forward`` calls the functions that the stock norms call, so z has their bits on a CPU.  ``backward`` is the formulas.
From a kept input it takes y and xhat; from a kept output y = phi^-1(z) and xhat = (y - b) / w.

A tensor is seen as (N, C, S), and everything but the stock functions goes over it in tiles, so that temporaries stay
small, whatever their dtype.  On a CPU a tile of backward holds whole planes, and the backward function of a stock norm
finds its sums and dx, from xhat whose mean is 0 and rstd 1.  Where planes are too large, lie in channels_last, or share
statistics with other tiles or processes, sums come first, and a second sweep writes dx.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ... import _backend
from ..._torch import FakeTensor
from ...activation import TABLE, Activation
from .call import BackwardCall, Exchange, Gradients, Norm, Operands, Statistics, cast, move_running, stats_dtype
from .kept import Kept, finite_inverse
from .statistic import BATCH, Statistic

# A tile is a sixteenth of the tensor, so that a few temporaries in fp32 are small beside it, and has between
# TILE_LEAST and TILE elements.  At most TILE, the temporaries fit into a CPU's caches.  On a GPU the number of launches
# counts.
TILE_LEAST = 2**12
TILE = 2**16
TILE_GPU = 2**24
# The elements of a tile of whole planes.  A smaller one takes Python longer than the kernels.
TILE_PLANES = 2**18
# The type checker cannot count the arguments of starred lists.
_native_batch_norm: Any = torch.native_batch_norm
# A range of samples, of channels and of positions.
Tile = tuple[slice, slice, slice]


def forward(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Tensor, Statistics]:
    """z, the statistics, and xhat of the kept channels.  An op that keeps its output writes z into ``out``.

    If ``norm.own`` is True, the running statistics move and the batch is counted, where they are given.
    """
    x = given.x
    # ``out`` may be x, so what backward cannot find in z is copied first.
    lost = None if kept is None else norm.over.view(x)[:, kept.index.to(x.device)]
    if not norm.over.of_samples or (not norm.over.is_grouped and x.is_contiguous()):
        z, stats = _stock_batch_norm(given, norm, out)
    elif norm.over.is_grouped and out is None and (not _backend.off_cpu(x) or isinstance(x, FakeTensor)):
        # On a GPU it takes only contiguous tensors of one dtype.
        z, stats = _stock_group_norm(given, norm)
    else:
        z, stats = _by_formulas(given, norm, out)
    if given.batches is not None:
        given.batches.add_(1)
    if kept is None or lost is None:
        return z, stats
    return z, stats._replace(xhat=_xhat_of(lost, kept, z, stats, norm))


def _by_formulas(given: Operands, norm: Norm, out: Tensor | None) -> tuple[Tensor, Statistics]:
    """z and the statistics of a norm for which no stock function is fit."""
    mean, var = (norm.over.flat(v) for v in _moments(norm.over.view(given.x), norm.over))
    move_running(given, norm, mean, var, given.x.numel() // len(mean))
    stats = Statistics(mean, torch.rsqrt(var + norm.eps))
    return recompute(given, stats, norm, out), stats


def _finished(y: Tensor, given: Operands, norm: Norm) -> Tensor:
    """z from the normalised x, in its memory but for prelu."""
    if given.residual is not None:
        y.add_(given.residual)
    return activate(y, norm.act, given.slope)


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` except for prelu, whose slopes are ``slope``."""
    return TABLE[act.name].forward(y, act.param if slope is None else slope)


def _stock_batch_norm(given: Operands, norm: Norm, out: Tensor | None) -> tuple[Tensor, Statistics]:
    """z and the statistics; planes of samples are channels of one sample here."""
    x, acc = given.x, stats_dtype(given.x)
    N, C = x.shape[:2]
    samples = N if norm.over.of_samples else 1
    y = torch.empty_like(x) if out is None else out

    def image(t: Tensor) -> Tensor:
        if t.is_contiguous():
            return t.view(N // samples, samples * C, -1)
        # PyTorch recognises channels_last by four dimensions, whatever number of dimensions x has.
        return t.as_strided((1, C, t.numel() // C, 1), (t.numel(), 1, C, C))

    def repeated(v: Tensor | None) -> Tensor | None:
        return v if v is None or samples == 1 else v.repeat(samples)

    # Parameters in fp32 make PyTorch compute the statistics of half-precision x in fp32.
    weight = torch.ones(C, dtype=acc, device=x.device) if given.weight is None else cast(given.weight, acc)
    running = [cast(v, acc) for v in (given.running_mean, given.running_var)]
    moved = [repeated(v) for v in running]
    # A CPU leaves them empty in eval mode, and CUDA writes them.
    mean, rstd = (x.new_empty((samples * C if norm.own else 0,), dtype=acc) for _ in range(2))
    _native_batch_norm(
        image(x), repeated(weight), repeated(cast(given.bias, acc)), *moved, norm.own, norm.momentum, norm.eps,
        out=(image(y), mean, rstd),
    )  # fmt: skip
    if not norm.own:
        mean = running[0] if norm.keep == "output" else running[0].clone()
        return _finished(y, given, norm), Statistics(mean, torch.rsqrt(running[1] + norm.eps))
    for buffer, v in zip((given.running_mean, given.running_var), moved, strict=True):
        if buffer is not None and v is not None and v is not buffer:
            buffer.copy_(v.view(samples, C).mean(0))
    return _finished(y, given, norm), Statistics(mean, rstd)


def _stock_group_norm(given: Operands, norm: Norm) -> tuple[Tensor, Statistics]:
    """z and the statistics."""
    x, weight, acc = given.x, given.weight, stats_dtype(given.x)
    N, C = x.shape[:2]
    S = x.numel() // (N * C)
    if weight is None and (given.bias is not None or x.dtype != acc):
        weight = torch.ones(C, dtype=acc, device=x.device)
    # PyTorch recognises channels_last by four dimensions, whatever number of dimensions x has.
    image = x if x.is_contiguous() else x.as_strided((N, C, 1, S), (S * C, 1, S * C, C))
    y, mean, rstd = torch.native_group_norm(
        image, cast(weight, acc), cast(given.bias, acc), N, C, S, norm.over.groups_of(C), norm.eps
    )
    if image is not x:
        # Autograd refuses writes into views that a function returns.  The result of ``data`` is none.
        y = y.as_strided(x.shape, x.stride()).data
    return _finished(y, given, norm), Statistics(mean.flatten(), rstd.flatten())


def _xhat_of(lost: Tensor, kept: Kept, z: Tensor, stats: Statistics, norm: Norm) -> Tensor:
    """xhat of the kept channels, from their x in ``lost``: flat, in the memory format of z."""
    assert stats.mean is not None
    view, index = norm.over.view(z), kept.index.to(z.device)
    mean, rstd = (norm.over.each_channel(v, view)[:, index] for v in (stats.mean, stats.rstd))
    xhat = z.new_empty((lost.numel(),))
    _kept_view(xhat, view, kept.count).copy_((lost.to(mean.dtype) - mean).mul_(rstd))
    return xhat


def recompute(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None) -> Tensor:
    """z of an op that keeps its input, with the bits of forward, in ``out``, which may be x, or in new memory."""
    z = torch.empty_like(given.x) if out is None else out
    call, zv = _Call(given, stats, norm, None), norm.over.view(z)
    for tile in _tiles(zv):
        zv[tile] = activate(call.pre_activation(tile), norm.act, call.slope_of(tile))
    return z


def backward(call: BackwardCall) -> Gradients:
    """The gradients, in the dtypes of the parameters; dz and the residual stay, unless ``call.into`` is one of them."""
    given, exchange = call.given, call.exchange
    dx = torch.empty_like(given.x) if call.into is None else call.into
    dresidual = torch.empty_like(given.x) if call.needs[3] else None
    gradient = _Gradient(call, dx, dresidual)
    planes = _plane_tiles(gradient.source, call.norm) if exchange is None else None
    if planes is None:
        gradient.write_in_two_sweeps(exchange)
    for tile in planes or ():
        gradient.write_planes(tile)
    dbias, dweight = gradient.sums_of_channels()
    dslope = None if given.slope is None else cast(gradient.dslope, given.slope.dtype)
    return _of_parameters(given, dx, dweight, dbias)._replace(dresidual=dresidual, dslope=dslope)


def _of_parameters(given: Operands, dx: Tensor, dweight: Tensor, dbias: Tensor) -> Gradients:
    """The gradients of x and of the parameters, in the dtypes of these."""
    pairs = ((dweight, given.weight), (dbias, given.bias))
    return Gradients(dx, *(None if v is None else cast(dv, v.dtype) for dv, v in pairs))


def backward_of_sums(call: BackwardCall, sums: Tensor) -> Gradients:
    g, given, stats, norm, *_ = call
    tensors, gv = _Call(given, stats, norm, None), norm.over.view(g)
    m, (s1, s2) = norm.over.shared_by(tensors.source), (norm.over.each_channel(s, tensors.source) for s in sums)
    xhat = (tensors.source.to(tensors.acc) - tensors.mean).mul_(tensors.rstd)
    gv.copy_((gv - s1 / m - xhat.mul_(s2 / m)).mul_(tensors.scale))
    # Results of an op must not share memory.
    dbias, dweight = (s.view(-1, given.x.shape[1]).sum(0) for s in sums)
    return _of_parameters(given, g, dweight, dbias)


def moments(x: Tensor) -> Tensor:
    """(count, mean, M2) of each channel, (1, 3, C), for statistics of all processes."""
    mean, var = (BATCH.flat(v) for v in _moments(BATCH.view(x), BATCH))
    count = x.numel() // len(mean)
    return torch.stack([torch.full_like(mean, count), mean, var * count]).unsqueeze(0)


class _Call:
    """The tensors that one backward pass, or one recomputation, reads: (N, C, S), and vectors as (N, C, 1)."""

    def __init__(self, given: Operands, stats: Statistics, norm: Norm, kept: Kept | None) -> None:
        self.source = norm.over.view(given.x)
        self.residual = None if given.residual is None else norm.over.view(given.residual)
        self.act, self.param, self.kept = TABLE[norm.act.name], norm.act.param, kept
        self.keeps_output = norm.keep == "output"
        self.acc = stats_dtype(given.x)
        N, C, _ = self.source.shape
        ones = torch.ones(C, dtype=self.acc, device=self.source.device)
        weight = ones if given.weight is None else cast(given.weight, self.acc)
        bias = torch.zeros_like(ones) if given.bias is None else cast(given.bias, self.acc)
        self.slope = cast(given.slope, self.acc)
        self.weight, self.bias = (v.view(1, C, 1).expand(N, C, 1) for v in (weight, bias))
        self.rstd = norm.over.each_channel(stats.rstd, self.source)
        if stats.mean is not None:
            self.mean = norm.over.each_channel(stats.mean, self.source)
            # So does PyTorch compute y on a CPU, and y has the same bits here: at a kink, z and dz must agree.
            self.scale = self.weight * self.rstd
            self.shift = torch.addcmul(self.bias, self.mean, self.scale, value=-1)
        if self.keeps_output:
            inverse = finite_inverse(weight, bias, given.x.dtype, given.residual is not None)
            self.inverse = inverse.view(1, C, 1).expand(N, C, 1)
        if kept is not None:
            assert stats.xhat is not None
            self.xhat = _kept_view(stats.xhat, self.source, kept.count)

    def slope_of(self, tile: Tile) -> Tensor | None:
        """The learned slopes of these channels."""
        return self.slope if self.slope is None or len(self.slope) == 1 else self.slope[tile[1]]

    def pre_activation(self, tile: Tile) -> Tensor:
        """y of an op that keeps its input, rounded as in forward."""
        x, nc = self.source[tile], tile[:2]
        y = torch.addcmul(self.shift[nc], x.to(self.acc), self.scale[nc]).to(x.dtype)
        return y if self.residual is None else y.add_(self.residual[tile])

    def gradient(self, dz: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        """g, xhat and the gradient of learned slopes, from the gradient ``dz`` of z."""
        return self._from_output(dz, tile) if self.keeps_output else self._from_input(dz, tile)

    def _from_input(self, dz: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        y, dslope = self.pre_activation(tile).to(self.acc), None
        if self.act.learned:
            g, dslope = self.act.grad(dz.to(self.acc), y, self.slope_of(tile), y)
        else:
            g = self.act.grad(dz.to(self.acc), y, self.param, y)
        xhat = (self.source[tile].to(self.acc) - self.mean[tile[:2]]).mul_(self.rstd[tile[:2]])
        return g, xhat, dslope

    def _from_output(self, dz: Tensor, tile: Tile) -> tuple[Tensor, Tensor, None]:
        inverse, z = self.act.inverse, self.source[tile]
        assert inverse is not None
        g = inverse.grad(dz.to(self.acc), z.to(self.acc), self.param, None)
        # In the dtype of z: its inverse knows to what z was rounded, and the difference is rounded as y was in forward.
        y = inverse.y(z, self.param, None)
        y = y if self.residual is None else y - self.residual[tile]
        xhat = (y.to(self.acc) - self.bias[tile[:2]]).mul_(self.inverse[tile[:2]])
        if self.kept is not None:
            index, slots = self.kept.within(tile[1])
            index, kept = index.to(xhat.device), self.xhat[tile[0], slots, tile[2]].to(self.acc)
            xhat[:, index] = kept
            if inverse.saturates:
                # Near the limit of z, rounding takes the digits of phi'(y) = z + p too.  The sign of z decides on which
                # side of the kink a value is.
                y = torch.addcmul(self.bias[tile[:2]][:, index], kept, self.weight[tile[:2]][:, index])
                y = y if self.residual is None else y + self.residual[tile][:, index]
                y = self.act.grad(dz[:, index].to(self.acc), y.clamp_(max=0.0), self.param, y)
                g[:, index] = torch.where(z[:, index] < 0, y, g[:, index])
        return g, xhat, None


class _Gradient(_Call):
    """The tensors of a backward pass, with those that it writes, and what it adds up over all positions.

    ``g`` and ``g_xhat`` are the sums of g and of g * xhat, (N, C, 1) each, ``dslope`` the gradient of learned slopes.
    """

    def __init__(self, call: BackwardCall, dx: Tensor, dresidual: Tensor | None) -> None:
        super().__init__(call.given, call.stats, call.norm, call.kept)
        self.norm, view = call.norm, call.norm.over.view
        self.dz = view(call.dz if call.also is None else call.dz + call.also)
        self.dx, self.dresidual = view(dx), None if dresidual is None else view(dresidual)
        self.g, self.g_xhat = self.rstd.new_zeros((2, *self.source.shape[:2], 1))
        self.dslope = None if self.slope is None else torch.zeros_like(self.slope)

    def write_planes(self, tile: Tile) -> None:
        """Writes the gradients of a tile of whole planes, and adds its sums."""
        g, xhat, dslope = self.gradient(self.dz[tile], tile)
        if self.dresidual is not None:
            self.dresidual[tile] = g
        # Without an activation g is a part of dz.
        g, (n, c, S), nc, mask = g.contiguous(), g.shape, tile[:2], [True, True, True]
        rstd, weight = self.rstd[nc], self.weight[0, tile[1], 0].contiguous()
        if not self.norm.over.of_samples:
            mean, one = torch.zeros_like(weight), torch.ones_like(weight)
            self.dx[tile], dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                g, xhat, weight * rstd[0, :, 0], None, None, save_mean=mean, save_invstd=one,
                train=True, eps=0.0, output_mask=mask,
            )  # fmt: skip
        else:
            C = self.source.shape[1]
            groups = c * self.norm.over.groups_of(C) // C
            mean, one = rstd.new_zeros((n, groups)), rstd.new_ones((n, groups))
            found, dweight, dbias = torch.ops.aten.native_group_norm_backward(
                g, xhat, mean, one, weight, N=n, C=c, HxW=S, group=groups, output_mask=mask
            )
            self.dx[tile] = found.mul_(rstd)
        self.g[0, tile[1], 0] += dbias
        self.g_xhat[0, tile[1], 0] += dweight
        self._add_slope(tile, dslope)

    def write_in_two_sweeps(self, exchange: Exchange | None) -> None:
        """Adds up the sums, and then writes the gradients, by the formulas."""
        tiles = _tiles(self.source)
        # Calls of ``_add`` and of ``_write`` hold the temporaries of a tile, which are free before the next tile.
        for tile in tiles:
            self._add(tile)
        if exchange is None:
            of_statistic = [self.norm.over.summed(self.weight * s) for s in (self.g, self.g_xhat)]
        else:
            of_statistic = [self.weight * s.view(1, -1, 1) for s in exchange(*self.sums_of_channels())]
        means = [s / self.norm.over.shared_by(self.source) for s in of_statistic]
        # Backwards, because the last tiles are still in the cache.
        for tile in reversed(tiles):
            self._write(tile, *means)

    def _add(self, tile: Tile) -> None:
        g, xhat, dslope = self.gradient(self.dz[tile], tile)
        self.g[tile[:2]] += g.sum(2, keepdim=True)
        self.g_xhat[tile[:2]] += xhat.mul_(g).sum(2, keepdim=True)
        self._add_slope(tile, dslope)

    def _add_slope(self, tile: Tile, dslope: Tensor | None) -> None:
        if self.dslope is not None and dslope is not None:
            (self.dslope if len(self.dslope) == 1 else self.dslope[tile[1]]).add_(dslope)

    def _write(self, tile: Tile, mean_g: Tensor, mean_g_xhat: Tensor) -> None:
        g, xhat, _ = self.gradient(self.dz[tile], tile)
        if self.dresidual is not None:
            self.dresidual[tile] = g
        nc = tile[:2]
        dx = g * self.weight[nc]
        if self.norm.own:
            dx.sub_(mean_g[nc]).sub_(xhat.mul_(mean_g_xhat[nc]))
        self.dx[tile] = dx.mul_(self.rstd[nc])

    def sums_of_channels(self) -> tuple[Tensor, Tensor]:
        """The sums of g and of g * xhat over the samples too."""
        return self.g.sum(0).flatten(), self.g_xhat.sum(0).flatten()


def _kept_view(xhat: Tensor, like: Tensor, count: int) -> Tensor:
    """The flat buffer of the kept channels as (N, count, S), in the memory format of ``like``."""
    N, _, S = like.shape
    return xhat.as_strided((N, count, S), (count * S, S, 1) if like.stride(2) == 1 else (count * S, 1, count))


def _tiles(x: Tensor) -> list[Tile]:
    """Ranges that cover (N, C, S), each as near to adjacent memory as possible.

    Without values, two stand for all, because each allocates the same memory, and thousands would take seconds.
    """
    fake = isinstance(x, FakeTensor)
    most = TILE_GPU if _backend.off_cpu(x) and not fake else TILE
    left, steps = min(most, max(TILE_LEAST, x.numel() // 16)), {}
    for d in sorted(range(3), key=x.stride):
        steps[d] = min(x.shape[d], max(1, left))
        left //= steps[d]
    samples, channels, positions = (
        [slice(k, min(k + steps[d], n)) for k in range(0, n, steps[d])] for d, n in enumerate(x.shape)
    )
    tiles = list(product(samples, channels, positions))
    return tiles[:2] if fake and get_proxy_mode() is None else tiles


def _plane_tiles(x: Tensor, norm: Norm) -> list[Tile] | None:
    """Ranges of whole planes, with all values of a statistic in one of them; None if there are no such tiles.

    Tensors without values stand for those of a GPU, whose kernels have no temporaries.
    """
    (N, C, S), least = x.shape, norm.over.shared_by(x)
    fits = least <= max(TILE_PLANES, x.numel() // 16) and x.is_contiguous()
    if not (fits and norm.own) or _backend.off_cpu(x) or isinstance(x, FakeTensor):
        return None
    samples = 1 if norm.over.of_samples else N
    channels = min(C, max(1, TILE_PLANES // least) * least // (samples * S))
    if channels == C:
        samples = max(samples, TILE_PLANES // (C * S))
    starts = product(range(0, N, samples), range(0, C, channels))
    return [(slice(n, n + samples), slice(c, c + channels), slice(None)) for n, c in starts]


def _moments(x: Tensor, over: Statistic) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of (N, C, S): (N, C, 1) each, with the value of its statistic for a channel."""
    acc, (N, C, _), m = stats_dtype(x), x.shape, over.shared_by(x)

    def mean_of(values: Callable[[Tensor, Tile], Tensor]) -> Tensor:
        sums = torch.zeros((N, C, 1), dtype=acc, device=x.device)
        for tile in _tiles(x):
            sums[tile[:2]] += values(x[tile].to(acc), tile).sum(2, keepdim=True)
        return over.summed(sums) / m

    mean = mean_of(lambda x, tile: x)
    return mean, mean_of(lambda x, tile: (x - mean[tile[:2]]).square_())
