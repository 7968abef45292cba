"""The launches of the kernels of losses, and how their results are compared with ``aten_sums.py`` in float64."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from ..at_size import FUNCTION, PART, Compared, Rounded, U, checked, growth
from ..registry import Result, family
from ..self_test.cases import SHAPE, TOLERANCE, image, stock
from . import aten_sums
from .aten_sums import Tile
from .spec import NLL, OTHER_NLL, OVERLAP, PREDICTION, TARGET, Sizes, SumsSpec, sizes_of

FAMILY = "sums"
# Logits of classes that do not fit in one tile, in the self-test.
MANY_CLASSES = (1, 300, 4, 8)


def _tiles(
    x: Tensor, target: Tensor, mask: Tensor | None, spec: SumsSpec
) -> Iterator[tuple[slice, slice, Tile, Tile, Tensor]]:
    """Samples and positions with their values in float64.

    A second tile has absolute values, whose sums add the sizes of the terms.  The largest size of a position's logits
    is not finite if a logit is not, and then its results say nothing.
    """
    N, K = x.shape[:2]
    flat = x.detach().reshape(N, K, -1)
    target = target.detach().reshape(N, K if spec.dense else 1, -1)
    mask = None if mask is None else mask.detach().reshape(N, 1, -1)
    step = max(1, PART // K)
    for n in (slice(n, n + 1) for n in range(N)):
        for s in (slice(s, s + step) for s in range(0, flat.shape[2], step)):
            part = flat[n, :, s].double()
            tile = aten_sums.tile_of(part, target[n, :, s], None if mask is None else mask[n, :, s], spec)
            sizes = Tile(
                part.abs() if spec.probability == "identity" else part,
                tile.y.abs(),
                None if tile.m is None else tile.m.abs(),
            )
            yield n, s, tile, sizes, part.abs().amax(1, keepdim=True)


def _forward_results(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The sums.

    The logarithm of a probability is x minus that of a sum, so that it is off by units of x, and the factor of a focal
    loss by units of 1.  Counts are exact.
    """
    x, target, mask, sizes, spec = before
    exact, terms = torch.zeros(2, *found.shape, dtype=torch.float64, device=x.device)
    errors = exact.new_zeros(1, sizes.N, 1)
    for n, _, tile, absolute, largest in _tiles(x, target, mask, spec):
        aten_sums.add_sums(tile, spec, exact[:, n])
        aten_sums.add_sums(absolute, spec, terms[:, n])
        weights = 1 + absolute.y.sum(1, keepdim=True)
        units = FUNCTION * (1 + spec.gamma) + 4 * largest
        errors[:, n] += U * aten_sums._times(weights * units, absolute.m).sum()
    counts = spec.hard and not (target.is_floating_point() or (mask is not None and mask.is_floating_point()))
    # Infinity times 0 is NaN, which says nothing either.
    bound = (errors + (growth(sizes.S) + FUNCTION * U) * terms) * (not counts)
    has_p = spec.probability != "none"
    computed = {TARGET: True, OVERLAP: has_p, PREDICTION: has_p, NLL: spec.nll != "none", OTHER_NLL: spec.other}
    for row in (row for row, is_computed in computed.items() if is_computed):
        yield Rounded(exact[row], bound[row]).stored(torch.float32).near("sums", found[row])


@checked(FAMILY, _forward_results)
def forward(x: Tensor, target: Tensor, mask: Tensor | None, sizes: Sizes, spec: SumsSpec) -> Tensor:
    from ...kernels.segmentation_sums import segmentation_sums_fwd

    with _backend.launching(x):
        return segmentation_sums_fwd(x, target, mask, sizes, spec)


def _backward_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The gradient of the logits, which adds and subtracts the gradients of the sums of a position."""
    x, target, mask, _, spec, dsums, dx = before
    dsums = dsums.double().unsqueeze(3)
    most = dsums.abs().amax(0)
    flat = dx.reshape(*x.shape[:2], -1)
    for n, s, tile, absolute, largest in _tiles(x, target, mask, spec):
        exact = torch.empty_like(tile.x)
        aten_sums.write_grad(tile, spec, dsums[:, n], exact)
        terms = (most[n] * absolute.y).sum(1, keepdim=True) + most[n].amax(1, keepdim=True)
        if spec.other:
            terms = terms + most[n].sum(1, keepdim=True)
        if absolute.m is not None:
            # In a target with a value for each class, some of the classes of a position may be ignored.
            terms = terms * absolute.m.amax(1, keepdim=True)
        if spec.probability == "identity" or spec.gamma:
            terms = terms * (1 + 2 * max(1.0, spec.gamma) * (1 + largest))
        error = U * (2 * FUNCTION + 4 * largest)
        if 0 < spec.gamma < 1:
            # 1 - p may be off by some units, and its power is steep near 0.
            error = error + 4 * (4 * U) ** spec.gamma
        bound = (error * terms).expand_as(exact)
        if spec.minimum and spec.probability != "none":
            # Rounding decides whether p or y is the smaller one.
            p, y = aten_sums._probability(tile.x, spec), tile.y
            at_kink = (((p - y).abs() < 1e-5) & (y > 0) & (y < 1)).any(1, keepdim=True)
            bound = bound.masked_fill(at_kink, torch.inf)
        yield Rounded(exact, bound).stored(x.dtype).near("dx", flat[n, :, s])


@checked(FAMILY, _backward_results)
def backward(
    x: Tensor, target: Tensor, mask: Tensor | None, sizes: Sizes, spec: SumsSpec, dsums: Tensor, dx: Tensor
) -> None:
    from ...kernels.segmentation_sums import segmentation_sums_bwd

    with _backend.launching(x):
        segmentation_sums_bwd(dsums, x, target, mask, dx, sizes, spec)


def _argmax_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """A label is right if it names a largest logit."""
    x, labels, sizes = before
    for n in range(sizes.N):
        part = x[n].detach().reshape(sizes.K, -1)
        largest, exact = part.max(0)
        named = part.gather(0, labels[n : n + 1].long().clamp(0, sizes.K - 1))
        says = largest.isfinite()
        yield Compared("labels", labels[n], exact.to(labels.dtype), (named[0] == largest) | ~says, says)


@checked(FAMILY, _argmax_results)
def argmax(x: Tensor, labels: Tensor, sizes: Sizes) -> None:
    from ...kernels.segmentation_sums import segmentation_argmax

    with _backend.launching(x):
        segmentation_argmax(x, labels, sizes)


def _sums_float64(x: Tensor, labels: Tensor) -> Tensor:
    """The sums of ``segmentation_sums``, from stock functions."""
    log_p = x.flatten(2).log_softmax(1)
    p, y = log_p.exp(), torch.zeros_like(log_p).scatter_(1, labels.flatten(1)[:, None].long(), 1.0)
    return torch.stack([(p * y).sum(2), p.sum(2), y.sum(2), -(log_p * y).sum(2), -log_p.sum(2)])


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    from ...kernels.segmentation_sums import segmentation_sums_bwd, segmentation_sums_fwd

    spec = SumsSpec("softmax", "smoothed")
    for fmt, shape in (("contiguous", SHAPE), ("channels_last", SHAPE), ("contiguous", MANY_CLASSES)):
        x = image(shape, dtype, device, fmt, 0)
        labels = image(shape, torch.float32, device, fmt, 1).argmax(1).short()
        sizes, dx = sizes_of(x), torch.empty_like(x)
        found = segmentation_sums_fwd(x, labels, None, sizes, spec)
        segmentation_sums_bwd(torch.ones_like(found), x, labels, None, dx, sizes, spec)
        sums, of_logits = stock(partial(_sums_float64, labels=labels.cpu()), x, dy=torch.ones_like(found))
        what = f"({fmt}, {shape[1]} classes)"
        yield Result(f"sums {what}", found, sums, TOLERANCE[found.dtype])
        yield Result(f"dx {what}", dx, of_logits, TOLERANCE[dtype])
