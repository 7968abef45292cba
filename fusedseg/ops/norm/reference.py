"""The norm op in PyTorch's own functions, for every device: the reference of the Triton kernels (``triton.py``).

The formulas, with one mean and one rstd for each of the values that share a statistic, and w and b for each channel:

    xhat = (x - mean) rstd      y = w xhat + b [+ residual]      z = phi(y)

    g = dz phi'(y)      dweight = sum(g xhat)      dbias = sum(g)      dresidual = g
    dx = rstd (w g - mean(w g) - xhat mean(w g xhat))      or rstd w g if the statistics are constants

``forward`` calls the functions that the stock norms call, so z has their bits on a CPU.  ``backward`` is the formulas.
From a kept input it takes y and xhat; from a kept output y = phi^-1(z) and xhat = (y - b) / w.

A tensor is seen as (N, C, S), and everything but the stock functions goes over it in tiles, so that temporaries stay
small, whatever their dtype.  Sums come first, and a second sweep writes dx.
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
from ..layout import Layout, channel_view
from .kept import Kept, finite_inverse
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted, cast, like_parameters, move_running, stats_dtype

# A tile is a sixteenth of the tensor, so that a few temporaries in fp32 are small beside it, and has between LEAST and
# TILE elements.  At most TILE, the temporaries fit into a CPU's caches.  On a GPU the number of launches counts.
LEAST, TILE, TILE_GPU = 2**12, 2**16, 2**24
# The type checker cannot count the arguments of starred lists.
_native_batch_norm: Any = torch.native_batch_norm
# A range of samples, of channels and of positions.
Tile = tuple[slice, slice, slice]


def forward(passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
    """z, the statistics, and xhat of the kept channels.  An op that keeps its output writes z into ``out``."""
    x = passed.x
    # ``out`` may be x, so what backward cannot find in z is copied first.
    lost = None if kept is None else _view(x, spec)[:, kept.index.to(x.device)]
    if spec.kind == "batch" or (spec.kind == "instance" and x.is_contiguous()):
        z, mean, second = _stock_batch_norm(passed, spec, layout, out)
    elif spec.kind == "group" and out is None and (not _backend.off_cpu(x) or isinstance(x, FakeTensor)):
        # On a GPU it takes only contiguous tensors of one dtype.
        z, mean, second = _stock_group_norm(passed, spec)
    else:
        mean, var = (_flat(v, spec) for v in _moments(_view(x, spec), spec))
        second = torch.rsqrt(var + spec.eps)
        move_running(passed, spec, Normalised(x, mean, second), x.numel() // len(mean))
        saved = Saved(x, passed.weight, passed.bias, passed.residual, passed.slope, mean, second)
        z = recompute(saved, spec, out)
        return Normalised(z, mean, second, _xhat_of(lost, kept, z, mean, second, spec))
    if passed.residual is not None:
        z.add_(passed.residual)
    z = activate(z, spec.act, passed.slope)
    return Normalised(z, mean, second, _xhat_of(lost, kept, z, mean, second, spec))


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` except for prelu, whose slopes are ``slope``."""
    return TABLE[act.name].forward(y, act.param if slope is None else slope)


def _stock_batch_norm(passed: Passed, spec: Spec, layout: Layout, out: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised x, its mean, and rstd or the variance; planes of samples are channels of one sample here."""
    x, acc = passed.x, stats_dtype(passed.x)
    N, C = x.shape[:2]
    samples = 1 if spec.kind == "batch" else N
    z = torch.empty_like(x) if out is None else out

    def image(t: Tensor) -> Tensor:
        return t.view(N // samples, samples * C, -1) if t.is_contiguous() else channel_view(t, layout)

    def repeated(v: Tensor | None) -> Tensor | None:
        return v if v is None or samples == 1 else v.repeat(samples)

    # Parameters in fp32 make PyTorch compute the statistics of half-precision x in fp32.
    weight = torch.ones(C, dtype=acc, device=x.device) if passed.weight is None else cast(passed.weight, acc)
    running = [cast(v, acc) for v in (passed.running_mean, passed.running_var)]
    moved = [repeated(v) for v in running]
    # A CPU leaves them empty in eval mode, and CUDA writes them.
    mean, rstd = (x.new_empty(samples * C if spec.own else 0, dtype=acc) for _ in range(2))
    _native_batch_norm(
        image(x), repeated(weight), repeated(cast(passed.bias, acc)), *moved, spec.own, spec.momentum, spec.eps,
        out=(image(z), mean, rstd),
    )  # fmt: skip
    if spec.own:
        for buffer, v in zip((passed.running_mean, passed.running_var), moved, strict=True):
            if buffer is not None and v is not None and v is not buffer:
                buffer.copy_(v.view(samples, C).mean(0))
        return z, mean, rstd
    if spec.keep == "output":
        return z, running[0], torch.rsqrt(running[1] + spec.eps)
    # These are copies, because the buffers may change before backward runs.
    return z, running[0].clone(), running[1].clone()


def _stock_group_norm(passed: Passed, spec: Spec) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised x, mean and rstd."""
    x, weight, acc = passed.x, passed.weight, stats_dtype(passed.x)
    N, C = x.shape[:2]
    S = x.numel() // (N * C)
    if weight is None and (passed.bias is not None or x.dtype != acc):
        weight = torch.ones(C, dtype=acc, device=x.device)
    # PyTorch recognises channels_last by four dimensions, whatever number of dimensions x has.
    image = x if x.is_contiguous() else x.as_strided((N, C, 1, S), (S * C, 1, S * C, C))
    z, mean, rstd = torch.native_group_norm(
        image, cast(weight, acc), cast(passed.bias, acc), N, C, S, spec.groups, spec.eps
    )
    return z.as_strided(x.shape, x.stride()), mean.flatten(), rstd.flatten()


def _xhat_of(
    lost: Tensor | None, kept: Kept | None, z: Tensor, mean: Tensor, rstd: Tensor, spec: Spec
) -> Tensor | None:
    """xhat of the kept channels, from their x in ``lost``: flat, with planes or rows as z has them."""
    if lost is None or kept is None:
        return None
    view, index = _view(z, spec), kept.index.to(z.device)
    mean, rstd = (_each_channel(v, view, spec)[:, index] for v in (mean, rstd))
    xhat = z.new_empty(lost.numel())
    _kept_view(xhat, view, kept.count).copy_((lost.to(mean.dtype) - mean).mul_(rstd))
    return xhat


def recompute(saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
    """z of an op that keeps its input, in ``out``, which may be the input, or in new memory."""
    z = torch.empty_like(saved.source) if out is None else out
    call, zv = _Call(saved, spec, None), _view(z, spec)
    for tile in _tiles(zv):
        zv[tile] = activate(call.pre_activation(tile), spec.act, call.slope_of(tile))
    return z


def backward(dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted) -> Gradients:
    """The gradients, in the dtypes of the parameters."""
    source = saved.source
    dx = torch.empty_like(source) if wanted.into is None else wanted.into
    dresidual = torch.empty_like(source) if wanted.residual else None
    dzv, dxv = _view(dz, spec), _view(dx, spec)
    drv = None if dresidual is None else _view(dresidual, spec)
    call = _Call(saved, spec, kept)
    gradient = call.from_output if spec.keep == "output" else call.from_input
    s1, s2 = call.rstd.new_zeros((2, *call.source.shape[:2], 1))
    dslope = None if saved.slope is None else torch.zeros_like(saved.slope, dtype=s1.dtype)

    # Functions, so that the temporaries of a tile are free before the next tile begins.
    def add_to_sums(tile: Tile) -> None:
        g, xhat, dslope_of_tile = gradient(dzv[tile], tile)
        s1[tile[:2]] += g.sum(2, keepdim=True)
        s2[tile[:2]] += xhat.mul_(g).sum(2, keepdim=True)
        if dslope is not None and dslope_of_tile is not None:
            (dslope if len(dslope) == 1 else dslope[tile[1]]).add_(dslope_of_tile)

    def write(tile: Tile) -> None:
        g, xhat, _ = gradient(dzv[tile], tile)
        if drv is not None:
            drv[tile] = g
        nc = tile[:2]
        dx_of_tile = g * call.weight[nc]
        if spec.own:
            dx_of_tile.sub_(t1[nc]).sub_(xhat.mul_(t2[nc]))
        dxv[tile] = dx_of_tile.mul_(call.rstd[nc])

    tiles = _tiles(call.source)
    for tile in tiles:
        add_to_sums(tile)
    dbias, dweight = s1.sum(0).flatten(), s2.sum(0).flatten()
    m = call.source.numel() // saved.second.numel()
    if wanted.exchange is None:
        t1, t2 = (_over_statistic(call.weight * s, spec) / m for s in (s1, s2))
    else:
        t1, t2 = (call.weight * s.view(1, -1, 1) / m for s in wanted.exchange(dbias, dweight))
    # Backwards, because the last tiles are still in the cache.
    for tile in reversed(tiles):
        write(tile)
    grads = Gradients(dx, dweight, dbias, dresidual, dslope)
    return like_parameters(grads if wanted.affine else grads._replace(dweight=None, dbias=None), saved)


def moments(x: Tensor, layout: Layout) -> Tensor:
    """(count, mean, M2) of each channel, (1, 3, C), for statistics of all processes."""
    of_batch = Spec("input", Activation("identity", 0.0))
    mean, var = (_flat(v, of_batch) for v in _moments(_view(x, of_batch), of_batch))
    count = x.numel() // len(mean)
    return torch.stack([torch.full_like(mean, count), mean, var * count]).unsqueeze(0)


class _Call:
    """The tensors that one backward pass, or one recomputation, reads: (N, C, S), and vectors as (N, C, 1)."""

    def __init__(self, saved: Saved, spec: Spec, kept: Kept | None) -> None:
        self.source = _view(saved.source, spec)
        self.residual = None if saved.residual is None else _view(saved.residual, spec)
        self.act, self.param, self.kept = TABLE[spec.act.name], spec.act.param, kept
        self.acc = stats_dtype(saved.source)
        N, C, _ = self.source.shape
        ones = torch.ones(C, dtype=self.acc, device=self.source.device)
        weight = ones if saved.weight is None else cast(saved.weight, self.acc)
        bias = torch.zeros_like(ones) if saved.bias is None else cast(saved.bias, self.acc)
        self.slope = cast(saved.slope, self.acc)
        self.weight, self.bias = (v.view(1, C, 1).expand(N, C, 1) for v in (weight, bias))
        rstd = torch.rsqrt(saved.second + spec.eps) if spec.keeps_variance else saved.second
        self.rstd = _each_channel(rstd, self.source, spec)
        if saved.mean is not None:
            self.mean = _each_channel(saved.mean, self.source, spec)
            # So does PyTorch compute y on a CPU, and y has the same bits here: at a kink, z and dz must agree.
            self.scale = self.weight * self.rstd
            self.shift = torch.addcmul(self.bias, self.mean, self.scale, value=-1)
        if spec.keep == "output":
            inverse = finite_inverse(weight, bias, saved.source.dtype, saved.residual is not None)
            self.inverse = inverse.view(1, C, 1).expand(N, C, 1)
        if kept is not None:
            assert saved.xhat is not None
            self.xhat = _kept_view(saved.xhat, self.source, kept.count)

    def slope_of(self, tile: Tile) -> Tensor | None:
        """The learned slopes of these channels."""
        return self.slope if self.slope is None or len(self.slope) == 1 else self.slope[tile[1]]

    def pre_activation(self, tile: Tile) -> Tensor:
        """y of an op that keeps its input, rounded as in forward."""
        x, nc = self.source[tile], tile[:2]
        y = torch.addcmul(self.shift[nc], x.to(self.acc), self.scale[nc]).to(x.dtype)
        return y if self.residual is None else y.add_(self.residual[tile])

    def from_input(self, dz: Tensor, tile: Tile) -> tuple[Tensor, Tensor, Tensor | None]:
        """g, xhat and the gradient of the slopes, from x."""
        y, dslope = self.pre_activation(tile).to(self.acc), None
        if self.act.learned:
            g, dslope = self.act.grad(dz.to(self.acc), y, self.slope_of(tile), y)
        else:
            g = self.act.grad(dz.to(self.acc), y, self.param, y)
        xhat = (self.source[tile].to(self.acc) - self.mean[tile[:2]]).mul_(self.rstd[tile[:2]])
        return g, xhat, dslope

    def from_output(self, dz: Tensor, tile: Tile) -> tuple[Tensor, Tensor, None]:
        """g and xhat, from z."""
        inverse, z = self.act.inverse, self.source[tile]
        assert inverse is not None
        g = inverse.grad(dz.to(self.acc), z.to(self.acc), self.param, None)
        # In the dtype of z: its inverse knows to what z was rounded, and the difference is rounded as y was in forward.
        y = inverse.y(z, self.param, None)
        y = y if self.residual is None else y - self.residual[tile]
        xhat = (y.to(self.acc) - self.bias[tile[:2]]).mul_(self.inverse[tile[:2]])
        if self.kept is not None:
            index, slots = self.kept.within(tile[1])
            xhat[:, index.to(xhat.device)] = self.xhat[tile[0], slots, tile[2]].to(self.acc)
        return g, xhat, None


def _view(x: Tensor, spec: Spec) -> Tensor:
    """A dense tensor as (N, C, S).  For statistics of the batch, rows (channels_last) are those of one sample."""
    N, C = x.shape[:2]
    S = x.numel() // (N * C)
    if x.is_contiguous() and (S > 1 or spec.kind != "batch"):
        return x.view(N, C, S)
    if spec.kind == "batch":
        return x.as_strided((1, C, N * S), (x.numel(), 1, C))
    return x.as_strided((N, C, S), (C * S, 1, C))


def _kept_view(xhat: Tensor, like: Tensor, count: int) -> Tensor:
    """The flat buffer of the kept channels as (N, count, S), with planes or rows as ``like`` has them."""
    N, _, S = like.shape
    return xhat.as_strided((N, count, S), (count * S, S, 1) if like.stride(2) == 1 else (count * S, 1, count))


def _tiles(x: Tensor) -> list[Tile]:
    """Ranges that cover (N, C, S), each as near to adjacent memory as possible.

    Without values, two stand for all, because each allocates the same memory, and thousands would take seconds.
    """
    fake = isinstance(x, FakeTensor)
    most = TILE_GPU if _backend.off_cpu(x) and not fake else TILE
    left, steps = min(most, max(LEAST, x.numel() // 16)), {}
    for d in sorted(range(3), key=x.stride):
        steps[d] = min(x.shape[d], max(1, left))
        left //= steps[d]
    samples, channels, positions = (
        [slice(k, min(k + steps[d], n)) for k in range(0, n, steps[d])] for d, n in enumerate(x.shape)
    )
    tiles = list(product(samples, channels, positions))
    return tiles[:2] if fake and get_proxy_mode() is None else tiles


def _groups(C: int, spec: Spec) -> int:
    return spec.groups if spec.kind == "group" else C


def _over_statistic(sums: Tensor, spec: Spec) -> Tensor:
    """For each channel, the sum of its statistic, from the sums (N, C, 1) of all channels."""
    if spec.kind == "batch":
        return sums.sum(0, keepdim=True).expand_as(sums)
    N, C, _ = sums.shape
    groups = _groups(C, spec)
    return sums.view(N, groups, -1).sum(2, keepdim=True).expand(N, groups, C // groups).reshape(N, C, 1)


def _each_channel(v: Tensor, x: Tensor, spec: Spec) -> Tensor:
    """A flat vector of one value for each statistic, as (N, C, 1)."""
    N, C, _ = x.shape
    samples, groups = (1 if spec.kind == "batch" else N), _groups(C, spec)
    return v.view(samples, groups, 1).expand(samples, groups, C // groups).reshape(samples, C, 1).expand(N, C, 1)


def _flat(v: Tensor, spec: Spec) -> Tensor:
    """One value for each statistic, from the values (N, C, 1) of all channels."""
    v = v[:1] if spec.kind == "batch" else v
    return v.reshape(len(v), _groups(v.shape[1], spec), -1)[..., 0].flatten()


def _moments(x: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of (N, C, S): (N, C, 1) each, with the value of its statistic for a channel."""
    acc, (N, C, S) = stats_dtype(x), x.shape
    m = N * S if spec.kind == "batch" else S * (C // _groups(C, spec))

    def mean_of(values: Callable[[Tensor, Tile], Tensor]) -> Tensor:
        sums = torch.zeros((N, C, 1), dtype=acc, device=x.device)
        for tile in _tiles(x):
            sums[tile[:2]] += values(x[tile].to(acc), tile).sum(2, keepdim=True)
        return _over_statistic(sums, spec) / m

    mean = mean_of(lambda x, tile: x)
    return mean, mean_of(lambda x, tile: (x - mean[tile[:2]]).square_())
