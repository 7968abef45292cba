"""The sums of logits that a 1x1 convolution gives, tile by tile: no tensor of the size of the logits is formed.

``tiles`` computes the logits of one tile after the other.  In backward its consumer replaces the logits of a tile by
their gradient, from which ``tiles`` goes on to the gradients of features, weight and bias.

With an interpolation, the convolution comes first, because both are linear and interpolation weights sum to one.  The
spatial axes are planes, rows and columns; two dimensions are volumes of one plane.  A slab of planes is interpolated
along the first axis, and rows of it along the other two.  Neighbouring slabs need the same planes of features: the
gradient of a plane is finished, and its memory given back, when no later slab adds to it.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..check import has_values
from ..layout import dense
from . import reference
from .conv_logits import Conv, ConvForm
from .reference import Tile, add_sums, tile_of, write_grad
from .spec import ROWS, SumsSpec, sums_dtype, wide_dtype

# The number of logits of a tile on a GPU.  The tile has 16 MiB in fp32, beside three or four copies.
DEVICE_TILE = 1 << 22

Where = tuple[slice, ...]


class LinearAxis(NamedTuple):
    """Linear interpolation along one axis as a matrix, of which a tile uses a part.

    Output position i is (1 - second[i]) times input position first[i], plus second[i] times the next one.
    """

    n_in: int
    first: tuple[int, ...]
    second: tuple[float, ...]

    @property
    def n_out(self) -> int:
        return len(self.first)

    def inputs(self, start: int, stop: int) -> slice:
        """The input positions that the output positions from ``start`` to ``stop`` need."""
        return slice(self.first[start], min(self.first[stop - 1] + 2, self.n_in))

    def matrix(self, like: Tensor) -> Tensor:
        """(n_out, n_in), in the dtype and on the device of ``like``."""
        first = torch.tensor(self.first, device=like.device).unsqueeze(1)
        second = torch.tensor(self.second, dtype=like.dtype, device=like.device).unsqueeze(1)
        matrix = like.new_zeros(self.n_out, self.n_in).scatter_(1, first, 1 - second)
        return matrix.scatter_add_(1, (first + 1).clamp(max=self.n_in - 1), second)


@functools.lru_cache(maxsize=64)
def axis_of(n_in: int, n_out: int, align_corners: bool) -> LinearAxis:
    """The positions and weights of ``torch.nn.functional.interpolate`` with mode "linear"."""
    if align_corners:
        scale = (n_in - 1) / (n_out - 1) if n_out > 1 else 0.0
        source = [i * scale for i in range(n_out)]
    else:
        source = [max(0.0, n_in / n_out * (i + 0.5) - 0.5) for i in range(n_out)]
    first = [min(int(x), n_in - 1) for x in source]
    return LinearAxis(n_in, tuple(first), tuple(min(x - i, 1.0) for x, i in zip(source, first, strict=True)))


class ConvSums(NamedTuple):
    """One call: the convolution, and what the sums are taken of."""

    conv: Conv
    form: ConvForm
    target: Tensor
    mask: Tensor | None
    spec: SumsSpec


class Grads(NamedTuple):
    """Gradients, into which tiles are written or added; None for a gradient that nobody needs."""

    features: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Wide(NamedTuple):
    """Weight (K, C) and bias (1, K, 1), rounded to the dtype of the form, in the dtype of the arithmetic."""

    weight: Tensor
    bias: Tensor | None
    form: ConvForm

    @classmethod
    def of(cls, conv: Conv, form: ConvForm) -> "Wide":
        dtype = wide_dtype(conv.features)
        weight = conv.weight.reshape(conv.weight.shape[:2]).to(form.dtype).to(dtype)
        return cls(weight, None if conv.bias is None else conv.bias.to(form.dtype).to(dtype).view(1, -1, 1), form)

    def features(self, part: Tensor) -> Tensor:
        return part.to(self.form.dtype).to(self.weight.dtype)

    def logits(self, h: Tensor) -> Tensor:
        """(n, K, s) of (n, C, s)."""
        weight = self.weight.expand(h.shape[0], -1, -1)
        return torch.bmm(weight, h) if self.bias is None else torch.baddbmm(self.bias, weight, h)

    def backward(self, dx: Tensor, h: Tensor, grads: Grads) -> Tensor | None:
        """Adds to the gradients of weight and bias, and returns that of ``h``."""
        if grads.weight is not None:
            grads.weight.add_(torch.bmm(dx, h.mT).sum(0))
        if grads.bias is not None:
            grads.bias.add_(dx.sum((0, 2)))
        return None if grads.features is None else torch.bmm(self.weight.mT.expand(dx.shape[0], -1, -1), dx)

    def chunks(self, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Positions of (C, *spatial), and the features of these, (1, C, s)."""
        flat = features.reshape(1, features.shape[0], -1)
        step = max(1, reference.tile_size(features, DEVICE_TILE) // max(self.weight.shape))
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
            dh = self.backward(dz[None, :, where], h, grads)
            if dh is not None:
                assert into is not None
                into.view(into.shape[0], -1)[:, where] = dh[0]


def _grid(conv: Conv, form: ConvForm) -> tuple[int, ...]:
    """The axes of positions of the logits to which the slices of ``tiles`` belong."""
    if form.size is None:
        return (math.prod(conv.features.shape[2:]),)
    return (1,) * (3 - len(form.size)) + form.size


def tiles(conv: Conv, form: ConvForm, grads: Grads | None = None) -> Iterator[tuple[Tensor, Where]]:
    """The logits (n, K, s) of each tile, and the slices of samples and of each axis of the grid that they belong to.

    If there are ``grads``, the consumer of a tile replaces its logits by their gradient.
    """
    return _tiles(conv, form, grads) if form.size is None else _interpolated_tiles(conv, form, grads)


def _tiles(conv: Conv, form: ConvForm, grads: Grads | None) -> Iterator[tuple[Tensor, Where]]:
    wide, (N, C) = Wide.of(conv, form), conv.features.shape[:2]
    features = conv.features.reshape(N, C, -1)
    S, widest, tile = features.shape[2], max(*conv.weight.shape[:2]), reference.tile_size(features, DEVICE_TILE)
    samples, positions = max(1, tile // (widest * S)), max(1, tile // widest)
    for start in range(0, N, samples):
        for s in range(0, S, positions):
            where = slice(start, start + samples), slice(s, s + positions)
            h = wide.features(features[where[0], :, where[1]])
            x = wide.logits(h)
            yield x, where
            if grads is not None:
                dh = wide.backward(x, h, grads)
                if dh is not None:
                    assert grads.features is not None
                    grads.features.view(N, C, S)[where[0], :, where[1]] = dh
            if not has_values(features):
                # One tile shows the bytes of all.
                return


def _as_volume(t: Tensor) -> Tensor:
    return t.view(*t.shape[:2], *(1,) * (5 - t.dim()), *t.shape[2:])


def _interpolated_tiles(conv: Conv, form: ConvForm, grads: Grads | None) -> Iterator[tuple[Tensor, Where]]:
    wide, features = Wide.of(conv, form), _as_volume(conv.features)
    K, tile = conv.weight.shape[0], reference.tile_size(features, DEVICE_TILE)
    axes = [axis_of(n, m, form.align_corners) for n, m in zip(features.shape[2:], _grid(conv, form), strict=True)]
    planes, rows, columns = axes
    of_planes, of_rows, of_columns = (axis.matrix(wide.weight) for axis in axes)
    # The numbers of planes and rows of a tile.
    D = max(1, min(planes.n_out, tile // (K * rows.n_out * columns.n_out)))
    H = max(1, tile // (K * D * columns.n_out))
    for n in range(features.shape[0]):
        later = None
        for d in range(0, planes.n_out, D):
            used, end = planes.inputs(d, min(d + D, planes.n_out)), min(d + D, planes.n_out)
            part = features[n, :, used]
            shape = (K, *part.shape[1:])
            z = wide.logits_of(part).view(shape)
            weights = of_planes[d:end, used]
            if planes.n_in > 1:
                z = torch.matmul(weights, z.flatten(2)).view(K, end - d, *shape[2:])
            dz = None if grads is None else torch.zeros_like(z)
            for r in range(0, rows.n_out, H):
                stop = min(r + H, rows.n_out)
                near = rows.inputs(r, stop)
                wider = torch.matmul(z[:, :, near], of_columns.mT)
                x = torch.matmul(of_rows[r:stop, near], wider)
                del wider
                yield x.view(1, K, -1), (slice(n, n + 1), slice(d, end), slice(r, stop))
                if dz is not None:
                    dz[:, :, near] += torch.matmul(torch.matmul(of_rows[r:stop, near].mT, x), of_columns)
                del x
                if not has_values(features):
                    break
            if grads is not None and dz is not None:
                if planes.n_in > 1:
                    dz = torch.matmul(weights.mT, dz.flatten(2)).view(shape)
                if later is not None:
                    dz[:, : later.shape[1]] += later
                # The first plane that a later slab adds to.
                first = used.stop if end == planes.n_out else min(planes.first[end], used.stop)
                done = first - used.start
                later = dz[:, done:]
                into = None if grads.features is None else _as_volume(grads.features)[n, :, used.start : first]
                wide.backward_of(dz[:, :done], part[:, :done], grads, into)
            if not has_values(features) and d > 0:
                break


def _tile(x: Tensor, where: Where, target: Tensor, mask: Tensor | None, spec: SumsSpec) -> Tile:
    at, shape = (where[0], slice(None), *where[1:]), (x.shape[0], -1, x.shape[2])
    return tile_of(x, target[at].reshape(shape), None if mask is None else mask[at].reshape(shape), spec)


def _on_grid(call: ConvSums) -> tuple[Tensor, Tensor | None]:
    """Target and mask as (N, channels, *grid)."""
    N, K, dense = call.conv.features.shape[0], call.conv.weight.shape[0], call.spec.dense
    grid = _grid(call.conv, call.form)
    mask = None if call.mask is None else call.mask.reshape(N, 1, *grid)
    return call.target.reshape(N, K if dense else 1, *grid), mask


def forward(call: ConvSums) -> Tensor:
    """The sums, (ROWS, N, K)."""
    conv, spec = call.conv, call.spec
    shape = ROWS, conv.features.shape[0], conv.weight.shape[0]
    # As in ``reference.py``, sums of tiles are added in float64.
    sums = torch.zeros(shape, dtype=torch.float64, device=conv.features.device)
    if conv.features.numel():
        target, mask = _on_grid(call)
        for x, where in tiles(conv, call.form):
            add_sums(_tile(x, where, target, mask, spec), spec, sums[:, where[0]])
    return sums.to(sums_dtype(conv.features, spec))


def backward(dsums: Tensor, call: ConvSums, needs: tuple[bool, bool, bool]) -> tuple[Tensor | None, ...]:
    """The gradients of features, weight and bias; None for those that ``needs`` leaves out."""
    # Both passes need features whose positions are one axis.
    conv = call.conv._replace(features=dense(call.conv.features)[0])
    dtype = wide_dtype(conv.features)
    # With an interpolation, no logit may depend on some of the features.
    like = torch.empty_like if call.form.size is None else torch.zeros_like
    grads = Grads(
        like(conv.features) if needs[0] else None,
        torch.zeros(conv.weight.shape[:2], dtype=dtype, device=conv.weight.device) if needs[1] else None,
        None if conv.bias is None or not needs[2] else torch.zeros_like(conv.bias, dtype=dtype),
    )
    if conv.features.numel():
        target, mask = _on_grid(call)
        dsums = dsums.to(dtype).unsqueeze(3)
        for x, where in tiles(conv, call.form, grads):
            write_grad(_tile(x, where, target, mask, call.spec), call.spec, dsums[:, where[0]], x)
    dweight = None if grads.weight is None else grads.weight.to(conv.weight.dtype).view(conv.weight.shape)
    return grads.features, dweight, None if grads.bias is None else grads.bias.to(conv.weight.dtype)


def cross_entropy(conv: Conv, form: ConvForm, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy`` of each position, (N, S); ``options`` are its weight, ignore_index and label_smoothing."""
    N, grid = labels.shape[0], _grid(conv, form)
    values, on_grid = labels.new_empty(N, *grid, dtype=wide_dtype(conv.features)), labels.reshape(N, *grid)
    for x, where in tiles(conv, form):
        target = on_grid[where].reshape(x.shape[0], -1).long()
        values[where] = F.cross_entropy(x, target, reduction="none", **options).view_as(values[where])
    return values.view(N, -1)


def argmax(conv: Conv, form: ConvForm, labels: Tensor) -> None:
    """Writes the first class with the largest logit of each position into ``labels``, (N, *spatial)."""
    on_grid = labels.view(labels.shape[0], *_grid(conv, form))
    for x, where in tiles(conv, form):
        part = on_grid[where]
        part.copy_(x.argmax(1).view(part.shape))
