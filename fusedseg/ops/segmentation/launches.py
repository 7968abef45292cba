"""The launches of the kernels of losses, and how their results are compared with ``reference.py`` in float64."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from ..at_size import PART, Compared, U, checked, growth, near, rounding
from . import reference
from .reference import Tile
from .spec import NLL, OTHER_NLL, OVERLAP, PREDICTION, TARGET, Sizes, SumsSpec

# The errors of exp and log in fp32, in units of U, beside those of their arguments.
FUNCTION = 64


def _tiles(
    x: Tensor, target: Tensor, mask: Tensor | None, spec: SumsSpec
) -> Iterator[tuple[slice, slice, Tile, Tensor]]:
    """Samples and positions with their values in float64, and whether all their logits are finite."""
    N, K = x.shape[:2]
    flat = x.detach().reshape(N, K, -1)
    target = target.detach().reshape(N, K if spec.dense else 1, -1)
    mask = None if mask is None else mask.detach().reshape(N, 1, -1)
    step = max(1, PART // K)
    for n in (slice(n, n + 1) for n in range(N)):
        for s in (slice(s, s + step) for s in range(0, flat.shape[2], step)):
            part = flat[n, :, s].double()
            tile = reference.tile_of(part, target[n, :, s], None if mask is None else mask[n, :, s], spec)
            yield n, s, tile, part.isfinite().all()


def _absolute(tile: Tile, spec: SumsSpec) -> Tile:
    """The tile whose sums add the absolute values of the terms."""
    x, y, m = tile
    return Tile(x.abs() if spec.probability == "identity" else x, y.abs(), None if m is None else m.abs())


def _forward_results(found: Tensor, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The sums.

    The logarithm of a probability is x minus that of a sum, so that it is off by units of x, and the factor of a focal
    loss by units of 1.  Counts are exact.
    """
    x, target, mask, sizes, spec = before
    exact, terms = torch.zeros(2, *found.shape, dtype=torch.float64, device=x.device)
    errors = exact.new_zeros(1, sizes.N, 1)
    for n, _, tile, finite in _tiles(x, target, mask, spec):
        reference.add_sums(tile, spec, exact[:, n])
        absolute = _absolute(tile, spec)
        reference.add_sums(absolute, spec, terms[:, n])
        weights = 1 + absolute.y.sum(1, keepdim=True)
        if absolute.m is not None:
            weights = weights * absolute.m
        units = FUNCTION * (1 + spec.gamma) + 4 * tile.x.abs().amax(1, keepdim=True)
        errors[:, n] += (weights * units).sum() * U + torch.where(finite, 0.0, torch.inf)
    counts = spec.hard and not (target.is_floating_point() or (mask is not None and mask.is_floating_point()))
    bound = rounding(exact, torch.float32) + torch.where(errors.isfinite(), 0.0, torch.inf)
    if not counts:
        bound = bound + errors + (growth(sizes.S) + FUNCTION * U) * terms
    rows = [TARGET, *((OVERLAP, PREDICTION) if spec.probability != "none" else ())]
    rows += [*((NLL,) if spec.nll != "none" else ()), *((OTHER_NLL,) if spec.other else ())]
    for row in rows:
        yield near("sums", found[row], exact[row], bound[row])


@checked(
    "sums",
    lambda x, *rest: x,
    lambda x, target, mask, sizes, spec: (
        x.shape, x.dtype, x.get_device(), target.dtype, target.shape, None if mask is None else mask.dtype, sizes, spec,
    ),
    _forward_results,
)  # fmt: skip
def forward(x: Tensor, target: Tensor, mask: Tensor | None, sizes: Sizes, spec: SumsSpec) -> Tensor:
    from ...kernels.segmentation_sums import segmentation_sums_fwd

    with _backend.launching(x):
        return segmentation_sums_fwd(x, target, mask, sizes, spec)


def _backward_results(found: None, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[Compared]:
    """The gradient of the logits, which adds and subtracts the gradients of the sums of a position."""
    dsums, x, target, mask, dx, _, spec = before
    dsums = dsums.double().unsqueeze(3)
    most = dsums.abs().amax(0)
    flat = dx.reshape(*x.shape[:2], -1)
    for n, s, tile, finite in _tiles(x, target, mask, spec):
        exact = torch.empty_like(tile.x)
        reference.write_grad(tile, spec, dsums[:, n], exact)
        logits, y, m = _absolute(tile._replace(x=tile.x.abs()), spec)
        terms = (most[n] * y).sum(1, keepdim=True) + most[n].amax(1, keepdim=True)
        if spec.other:
            terms = terms + most[n].sum(1, keepdim=True)
        if m is not None:
            # In a target with a value for each class, some of the classes of a position may be ignored.
            terms = terms * m.amax(1, keepdim=True)
        largest = logits.amax(1, keepdim=True)
        if spec.probability == "identity" or spec.gamma:
            terms = terms * (1 + 2 * max(1.0, spec.gamma) * (1 + largest))
        error = U * (2 * FUNCTION + 4 * largest)
        if 0 < spec.gamma < 1:
            # 1 - p may be off by some units, and its power is steep near 0.
            error = error + 4 * (4 * U) ** spec.gamma
        bound = error * terms + rounding(exact, x.dtype) + torch.where(finite, 0.0, torch.inf)
        if spec.minimum and spec.probability != "none":
            bound = bound.masked_fill_(_at_kink(tile, spec), torch.inf)
        yield near("dx", flat[n, :, s], exact, bound)


def _at_kink(tile: Tile, spec: SumsSpec) -> Tensor:
    """The positions at which rounding decides whether p or y is the smaller one."""
    p, y = reference._probability(tile.x, spec), tile.y
    return (((p - y).abs() < 1e-5) & (y > 0) & (y < 1)).any(1, keepdim=True)


@checked(
    "sums",
    lambda dsums, x, *rest: x,
    lambda dsums, x, target, mask, dx, sizes, spec: (
        x.shape, x.dtype, x.get_device(), target.dtype, target.shape, None if mask is None else mask.dtype, sizes, spec,
    ),
    _backward_results,
)  # fmt: skip
def backward(
    dsums: Tensor, x: Tensor, target: Tensor, mask: Tensor | None, dx: Tensor, sizes: Sizes, spec: SumsSpec
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


@checked(
    "sums",
    lambda x, *rest: x,
    lambda x, labels, sizes: (x.shape, x.dtype, x.get_device(), sizes),
    _argmax_results,
)
def argmax(x: Tensor, labels: Tensor, sizes: Sizes) -> None:
    from ...kernels.segmentation_sums import segmentation_argmax

    with _backend.launching(x):
        segmentation_argmax(x, labels, sizes)
