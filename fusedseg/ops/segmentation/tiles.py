"""Logits tile by tile, so that a tile and its few copies stay in the cache: of a tensor, or of a 1x1 convolution.

``tiles`` computes one tile after the other.  In backward its consumer writes the gradient of each tile.  The logits of
a convolution are never formed as a whole: ``tiles`` continues from the gradient of a tile to the gradients of
features, weight and bias.

With an interpolation, the convolution comes first, because both are linear and interpolation weights sum to one.  The
spatial axes are planes, rows and columns; two dimensions are volumes of one plane.  A slab of planes is interpolated
along the first axis, and rows of it along the other two.  Neighbouring slabs need the same planes of features: the
gradient of a plane is finished, and its memory given back, when no later slab adds to it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import upsample
from ..check import has_values, wide_dtype
from .conv_logits import Conv

# The number of logits of a tile, for each thread.  A tile of fp32 has 1 MiB, beside a few copies.
TILE = 1 << 18
# On a GPU, where each op is one launch.
DEVICE_TILE = 1 << 24
# The logits of a convolution on a GPU.  A tile has 16 MiB in fp32, beside three or four copies.
CONV_DEVICE_TILE = 1 << 22


class LogitTile(NamedTuple):
    """The logits (samples, K, positions) of a tile in the dtype of the arithmetic.

    where: the slices of samples and of each axis of the grid of positions (``grid_of``).
    into: where the gradient of the tile is written; None unless there are ``Grads``.
    """

    x: Tensor
    where: tuple[slice, ...]
    into: Tensor | None


class Grads(NamedTuple):
    """Gradients, into which tiles are written or added; None for a gradient that nobody needs.

    x: of the logits, or of the features of a convolution.
    """

    x: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None


def tile_size(t: Tensor, device_tile: int) -> int:
    """The number of logits of a tile; ``device_tile`` is that of a GPU."""
    return device_tile if t.is_cuda else TILE * torch.get_num_threads()


def grid_of(logits: Tensor | Conv) -> tuple[int, ...]:
    """The axes of positions to which the slices of tiles belong."""
    if isinstance(logits, Tensor) or logits.size is None:
        return (math.prod(logits.shape[2:]),)
    return (*(1,) * (3 - len(logits.size)), *logits.size)


def tiles(logits: Tensor | Conv, grads: Grads | None = None) -> Iterator[LogitTile]:
    """The tiles of logits.  If there are ``grads``, the consumer of a tile writes its gradient."""
    if isinstance(logits, Tensor):
        return _of_tensor(logits, None if grads is None else grads.x)
    return _of_conv(logits, grads) if logits.size is None else _of_interpolated(logits, grads)


def _of_tensor(logits: Tensor, grad: Tensor | None) -> Iterator[LogitTile]:
    N, K, *spatial = logits.shape
    S = math.prod(spatial)
    x = logits.reshape(N, K, S)
    into = None if grad is None else grad.view(N, K, S)
    for n, s in _ranges(logits, K, S, tile_size(logits, DEVICE_TILE)):
        yield LogitTile(x[n, :, s].to(wide_dtype(logits.dtype)), (n, s), None if into is None else into[n, :, s])


def _ranges(t: Tensor, channels: int, S: int, tile: int) -> Iterator[tuple[slice, slice]]:
    """The samples and positions of each tile.  A tensor without values has one tile, which shows the bytes of all."""
    samples, positions = max(1, tile // (channels * S)), max(1, tile // channels)
    for n in range(0, t.shape[0], samples):
        for s in range(0, S, positions):
            yield slice(n, n + samples), slice(s, s + positions)
            if not has_values(t):
                return


class Wide(NamedTuple):
    """Weight (K, C) and bias (1, K, 1), rounded to the dtype of the convolution, in the dtype of the arithmetic."""

    weight: Tensor
    bias: Tensor | None
    rounded: torch.dtype

    @classmethod
    def of(cls, conv: Conv) -> "Wide":
        dtype, rounded = wide_dtype(conv.features.dtype), conv.dtype
        weight = conv.weight.reshape(conv.weight.shape[:2]).to(rounded).to(dtype)
        return cls(weight, None if conv.bias is None else conv.bias.to(rounded).to(dtype).view(1, -1, 1), rounded)

    def features(self, part: Tensor) -> Tensor:
        return part.to(self.rounded).to(self.weight.dtype)

    def logits(self, h: Tensor) -> Tensor:
        """(n, K, s) of (n, C, s)."""
        weight = self.weight.expand(h.shape[0], -1, -1)
        return torch.bmm(weight, h) if self.bias is None else torch.baddbmm(self.bias, weight, h)

    def backward(self, dx: Tensor, h: Tensor, grads: Grads, into: Tensor | None) -> None:
        """Adds to the gradients of weight and bias, and writes that of ``h`` into ``into``."""
        if grads.weight is not None:
            grads.weight.add_(torch.bmm(dx, h.mT).sum(0))
        if grads.bias is not None:
            grads.bias.add_(dx.sum((0, 2)))
        if into is not None:
            into.copy_(torch.bmm(self.weight.mT.expand(dx.shape[0], -1, -1), dx))

    def chunks(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Positions of (C, *spatial), and the features of these, (1, C, s)."""
        flat = features.reshape(1, features.shape[0], -1)
        step = max(1, tile_size(features, CONV_DEVICE_TILE) // max(self.weight.shape))
        for s in range(0, flat.shape[2], step):
            where = slice(s, s + step)
            yield where, self.features(flat[:, :, where])

    def logits_of(self, features: Tensor) -> Tensor:
        """The logits (K, positions) of (C, *spatial), without a wide copy of all features."""
        z = self.weight.new_empty(self.weight.shape[0], math.prod(features.shape[1:]))
        for where, h in self.chunks(features):
            z[:, where] = self.logits(h)[0]
        return z

    def backward_of(self, dz: Tensor, features: Tensor, grads: Grads, into: Tensor | None) -> None:
        """``backward`` of ``logits_of``; ``into`` has the shape of ``features`` and gets their gradient."""
        dz = dz.flatten(1)
        for where, h in self.chunks(features):
            part = None if into is None else into.view(1, into.shape[0], -1)[:, :, where]
            self.backward(dz[None, :, where], h, grads, part)


def _of_conv(conv: Conv, grads: Grads | None) -> Iterator[LogitTile]:
    wide = Wide.of(conv)
    features = conv.features.flatten(2) if conv.features.dim() > 2 else conv.features.unsqueeze(2)
    N, C, S = features.shape
    for n, s in _ranges(features, max(wide.weight.shape), S, tile_size(features, CONV_DEVICE_TILE)):
        h = wide.features(features[n, :, s])
        x = wide.logits(h)
        # The gradient takes the place of the logits.
        yield LogitTile(x, (n, s), None if grads is None else x)
        if grads is not None:
            wide.backward(x, h, grads, None if grads.x is None else grads.x.view(N, C, S)[n, :, s])


def _as_volume(t: Tensor) -> Tensor:
    return t.view(*t.shape[:2], *(1,) * (5 - t.dim()), *t.shape[2:])


class Interpolation(NamedTuple):
    """How logits of small volumes (K, planes, rows, columns) become large ones, a slab of planes after the other.

    of_planes, of_rows, of_columns: the weights of the small positions for each large one, (large, small).
    depth, height: the most planes of a slab, and the most rows of a tile.
    """

    planes: upsample.LinearAxis
    rows: upsample.LinearAxis
    of_planes: Tensor
    of_rows: Tensor
    of_columns: Tensor
    depth: int
    height: int

    @classmethod
    def of(cls, conv: Conv, size: Sequence[int]) -> "Interpolation":
        axes = upsample.Linear(tuple(size), None, conv.align_corners).axes(conv.features.shape[2:])
        planes, rows, columns = axes
        K, tile = conv.weight.shape[0], tile_size(conv.features, CONV_DEVICE_TILE)
        depth = max(1, min(planes.large, tile // (K * rows.large * columns.large)))
        height = max(1, tile // (K * depth * columns.large))
        dtype = wide_dtype(conv.features.dtype)
        of_planes, of_rows, of_columns = (axis.matrix(dtype, conv.features.device) for axis in axes)
        return cls(planes, rows, of_planes, of_rows, of_columns, depth, height)

    @property
    def has_planes(self) -> bool:
        """Whether there are three dimensions: two have one plane before and after."""
        return self.planes.small > 1 or self.planes.large > 1

    def used(self, slab: slice) -> slice:
        """The small planes that a slab reads."""
        return self.planes.inputs(slab.start, slab.stop)

    def last_used(self, slab: slice) -> slice:
        """The small planes that a slab reads and no later slab."""
        used = self.used(slab)
        if slab.stop == self.planes.large:
            return used
        return slice(used.start, min(self.planes.first(slab.stop), used.stop))

    def along_planes(self, z: Tensor, slab: slice, transposed: bool = False) -> Tensor:
        """The planes of a slab, from the small planes that it uses; rows and columns stay small.  Or the transpose."""
        if not self.has_planes:
            return z
        weights = self.of_planes[slab, self.used(slab)]
        return torch.matmul(weights.mT if transposed else weights, z.flatten(2)).view(len(z), -1, *z.shape[2:])

    def in_plane(self, z: Tensor, rows: slice) -> Tensor:
        """A range of large rows of a slab, with large columns."""
        near = self.rows.inputs(rows.start, rows.stop)
        return torch.matmul(self.of_rows[rows, near], torch.matmul(z[:, :, near], self.of_columns.mT))

    def add_in_plane_backward(self, dz: Tensor, rows: slice, dx: Tensor) -> None:
        """Adds to ``dz`` the gradient ``dx`` of ``in_plane``."""
        near = self.rows.inputs(rows.start, rows.stop)
        dz[:, :, near] += torch.matmul(torch.matmul(self.of_rows[rows, near].mT, dx), self.of_columns)


def _steps(size: int, step: int, most: int | None) -> list[slice]:
    """The ranges of at most ``step`` positions, or the first of them."""
    return [slice(k, min(k + step, size)) for k in range(0, size, step)][:most]


def _of_interpolated(conv: Conv, grads: Grads | None) -> Iterator[LogitTile]:
    assert conv.size is not None
    wide, interpolation = Wide.of(conv), Interpolation.of(conv, conv.size)
    features = _as_volume(conv.features)
    # Without values, one tile of each of two slabs shows the bytes of all.
    slabs, tiles_of_slab = (None, None) if has_values(features) else (2, 1)
    row_ranges = _steps(interpolation.rows.large, interpolation.height, tiles_of_slab)
    for n in range(features.shape[0]):
        later = None
        for slab in _steps(interpolation.planes.large, interpolation.depth, slabs):
            used, done = interpolation.used(slab), interpolation.last_used(slab)
            part = features[n, :, used]
            z = interpolation.along_planes(wide.logits_of(part).view(-1, *part.shape[1:]), slab)
            dz = None if grads is None else torch.zeros_like(z)
            for rows in row_ranges:
                x = interpolation.in_plane(z, rows)
                flat = x.view(1, len(x), -1)
                yield LogitTile(flat, (slice(n, n + 1), slab, rows), None if grads is None else flat)
                if dz is not None:
                    interpolation.add_in_plane_backward(dz, rows, x)
                del x, flat
            if grads is not None and dz is not None:
                dz = interpolation.along_planes(dz, slab, transposed=True)
                if later is not None:
                    dz[:, : later.shape[1]] += later
                finished = done.stop - done.start
                later = dz[:, finished:]
                into = None if grads.x is None else _as_volume(grads.x)[n, :, done]
                wide.backward_of(dz[:, :finished], part[:, :finished], grads, into)
