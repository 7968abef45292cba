"""The sums and their gradient on aten ops, tile by tile: a tile and its few copies stay in the cache.

A tile holds all classes of some positions.  Its axes are (samples, classes, positions), or (samples, positions,
classes) for channels_last logits.  ``tile.py`` has what one tile computes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import FakeTensor
from .spec import ROWS, Given, Sizes, SumsSpec, sizes_of, sums_dtype, wide_dtype
from .tile import Axes, Tile, tile_grad, tile_sums

# The number of logits of a tile, for each thread.  A tile of fp32 has 1 MiB, beside two or three copies.
TILE = 1 << 18
# The fewest threads that a tile is large enough for: with one thread, a tile of TILE logits takes 5 to 10 % longer.
FEWEST_THREADS = 2
# On a GPU, where each op is one launch.
DEVICE_TILE = 1 << 24


def _views(given: Given, sizes: Sizes, spec: SumsSpec) -> tuple[Tensor, Tensor, Tensor | None, Axes]:
    """Logits, target and mask with three axes each, and the axes of classes and positions."""
    N, K, S, rows = sizes
    axes = Axes(2, 1) if rows else Axes(1, 2)

    def seen(t: Tensor, channels: int) -> Tensor:
        t = t.reshape(N, channels, S)
        return t.transpose(1, 2) if rows else t

    mask = None if given.mask is None else seen(given.mask, 1)
    return seen(given.logits, K), seen(given.target, K if spec.dense else 1), mask, axes


def tile_size(t: Tensor, device_tile: int = DEVICE_TILE) -> int:
    """The number of logits of a tile; ``device_tile`` is that of a GPU."""
    return device_tile if t.is_cuda else TILE * max(FEWEST_THREADS, torch.get_num_threads())


def _tiles(logits: Tensor, sizes: Sizes) -> Iterator[tuple[slice, slice]]:
    """(samples, positions) of each tile.  A tensor without values has one tile, which shows the bytes of a tile."""
    N, K, S, _ = sizes
    tile = tile_size(logits)
    samples, positions = max(1, tile // (K * S)), max(1, tile // K)
    fake = isinstance(logits, FakeTensor) or logits.is_meta
    for n in range(0, N, samples):
        for s in range(0, S, positions):
            yield slice(n, n + samples), slice(s, s + positions)
            if fake:
                return


def forward(given: Given, sizes: Sizes, spec: SumsSpec) -> Tensor:
    """The sums, (ROWS, N, K)."""
    dtype = wide_dtype(given.logits)
    # Sums of tiles are added in float64: one fp32 number for each class would lose 4e-4 of a large class.
    sums = torch.zeros(ROWS, sizes.N, sizes.K, dtype=torch.float64, device=given.logits.device)
    logits, target, mask, axes = _views(given, sizes, spec)
    for n, s in _tiles(given.logits, sizes):
        tile = _tile((logits, target, mask), (n, s), axes, dtype)
        tile_sums(tile, spec, axes, sums[:, n])
    return sums.to(sums_dtype(given.logits, spec))


def argmax(logits: Tensor, sizes: Sizes, labels: Tensor) -> None:
    """Writes the first class with the largest logit of each position into ``labels``, (N, S)."""
    views, _, _, axes = _views(Given(logits, labels), sizes, SumsSpec("none", "none"))
    for n, s in _tiles(logits, sizes):
        labels[n, s] = views[_at(n, s, axes)].argmax(axes.classes)


def cross_entropy(logits: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy`` of each position, (N, S); ``options`` are its weight, ignore_index and label_smoothing."""
    given, sizes = Given(logits, labels), sizes_of(logits)
    assert sizes is not None
    values = torch.empty(sizes.N, sizes.S, dtype=wide_dtype(logits), device=logits.device)
    views, target, _, axes = _views(given, sizes, SumsSpec("none", "none"))
    for n, s in _tiles(logits, sizes):
        at = _at(n, s, axes)
        x = views[at].to(values.dtype).movedim(axes.classes, 1)
        values[n, s] = F.cross_entropy(x, target[at].squeeze(axes.classes).long(), reduction="none", **options)
    return values


def backward(dsums: Tensor, given: Given, sizes: Sizes, spec: SumsSpec, dx: Tensor) -> None:
    """Writes the gradient of the logits into ``dx``, which may have their memory."""
    dtype = wide_dtype(given.logits)
    logits, target, mask, axes = _views(given, sizes, spec)
    out, _, _, _ = _views(given._replace(logits=dx), sizes, spec)
    # The classes of dsums lie along the axis of classes.
    dsums = dsums.to(dtype).unsqueeze(3 - axes.classes + 1)
    for n, s in _tiles(given.logits, sizes):
        tile = _tile((logits, target, mask), (n, s), axes, dtype)
        tile_grad(tile, spec, axes, dsums[:, n], out[_at(n, s, axes)])


def _at(samples: slice, positions: slice, axes: Axes) -> tuple[slice, ...]:
    return (samples, slice(None), positions) if axes.classes == 1 else (samples, positions)


def _tile(
    views: tuple[Tensor, Tensor, Tensor | None], where: tuple[slice, slice], axes: Axes, dtype: torch.dtype
) -> Tile:
    at = _at(*where, axes)
    logits, target, mask = (None if t is None else t[at] for t in views)
    assert logits is not None
    assert target is not None
    return Tile(logits.to(dtype), target, None if mask is None else mask.to(dtype))
