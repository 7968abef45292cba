"""The op on aten ops: a plain forward and backward, tile by tile (``tiles.py``).

It serves every device without Triton, and the logits of a convolution everywhere.  ``kernels/segmentation_sums.py`` has
the formulas: u and -v are the gradients of a probability and of its logarithm.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import FakeTensor
from ..check import wide_dtype
from .conv_logits import Conv, tensor_of
from .spec import (
    NLL,
    OP,
    OTHER_NLL,
    OVERLAP,
    PREDICTION,
    ROWS,
    TARGET,
    SumsInputs,
    SumsSpec,
    differs,
    holds,
    sums_dtype,
)
from .tiles import Grads, LogitTile, grid_of, tiles


class Tile(NamedTuple):
    """The values of a tile, (samples, classes, positions), in the dtype of the arithmetic.

    x: the logits.  y: the target of each class.  m: the weights of the positions, with one class; None stands for 1.
    """

    x: Tensor
    y: Tensor
    m: Tensor | None


def _has_cheap_values(t: Tensor) -> bool:
    """Whether Python can read a value without waiting for a device."""
    return t.device.type == "cpu" and not isinstance(t, FakeTensor)


def check_whole(labels: Tensor) -> None:
    """Raises ValueError for a label with a fraction, if Python reads values without waiting for a device."""
    if not labels.is_floating_point() or not _has_cheap_values(labels):
        return
    # Infinity has no fraction that is 0.
    wrong = labels.frac() != 0
    if wrong.any():
        raise ValueError(
            f"{OP}: target must have whole numbers where it has one label for each position, "
            f"got {labels[wrong][0].item():.4g}; a soft target has a channel for each class"
        )


def _check_labels(labels: Tensor, spec: SumsSpec, K: int) -> None:
    """Raises IndexError for a label of no class, and ValueError as ``check_whole``, where values are cheap to read."""
    if spec.dense or not labels.numel() or not _has_cheap_values(labels):
        return
    check_whole(labels)
    low, high = (bound.item() for bound in labels.aminmax())
    if low >= 0 and high < K:
        return
    wrong = labels < 0
    if holds(labels.dtype, K):
        wrong |= labels >= K
    if spec.ignore is not None:
        wrong &= differs(labels, spec.ignore)
    if wrong.any():
        label = int(labels[wrong][0].item())
        raise IndexError(
            f"{OP}: a label must be a class below {K} or ignored, got {label}; ignore_index={label} ignores it"
        )


def _may_have(labels: Tensor, value: int) -> bool:
    """Whether a label may be ``value``.  Where values are cheap to read, the bounds of all labels tell."""
    if not labels.numel() or not _has_cheap_values(labels):
        return True
    low, high = (bound.item() for bound in labels.aminmax())
    return low <= value <= high


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """1 in the class of each label, and 0 in all other classes, in the shape of ``like``."""
    if labels.is_floating_point() and not _has_cheap_values(labels):
        # Where the host reads no value, the fraction is cut off, as by the Triton kernels and the stock losses.
        labels = labels.trunc()
    # Float numbers are compared in half of the time of int64.  No rounded label equals a class, which is below 2^24.
    classes = torch.arange(like.shape[1], dtype=like.dtype, device=like.device).view(1, -1, 1)
    # The comparison writes numbers at once, so that no tensor of truth values has to be converted.
    return torch.eq(labels.to(like.dtype), classes, out=torch.empty_like(like))


def tile_of(x: Tensor, target: Tensor, mask: Tensor | None, spec: SumsSpec) -> Tile:
    """The tile of logits in the dtype of the arithmetic, of labels with one class or a dense target, and of a mask."""
    m = None if mask is None else mask.to(x.dtype)
    if spec.ignore is not None and _may_have(target, spec.ignore):
        valid = differs(target, spec.ignore).to(x.dtype)
        m = valid if m is None else valid * m
    if spec.dense:
        return Tile(x, target.to(x.dtype), m)
    return Tile(x, _one_hot(target, x), m)


def _probability(x: Tensor, spec: SumsSpec) -> Tensor:
    if spec.probability == "softmax":
        return x.softmax(1)
    if spec.probability == "argmax":
        return torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1)
    if spec.probability == "positive":
        return (x > 0).to(x.dtype)
    if spec.probability == "sigmoid":
        return x.sigmoid()
    assert spec.probability == "identity"
    return x


def _one_minus(p: Tensor) -> Tensor:
    """1 - p, above 0, so that negative powers and quotients exist."""
    return (1 - p).clamp_(min=1e-30)


def _focal_slope(p: Tensor, gamma: float) -> Tensor:
    """The gradient of (1 - p)**gamma l in l = log(p)."""
    q = _one_minus(p)
    return q**gamma * (1 - gamma * torch.xlogy(p, p) / q)


def _sigmoid_factor(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    """The factor f of a focal loss, with a sigmoid."""
    return torch.exp(gamma * F.logsigmoid(x * (1 - 2 * y)))


def _times(t: Tensor, m: Tensor | None) -> Tensor:
    return t if m is None else t * m


def _where_counted(t: Tensor, m: Tensor | None) -> Tensor:
    """t, and 0 where m is 0, even if t is infinite or NaN there.

    PyTorch leaves ignored positions out of a likelihood: their logits may be infinite, and where all are ignored, their
    gradient is 0 although the mean is NaN.
    """
    return t if m is None else torch.where(m == 0, 0.0, t)


def add_sums(tile: Tile, spec: SumsSpec, sums: Tensor) -> None:
    """Adds the sums of a tile to ``sums``, (ROWS, samples, K) in float64."""
    _, y, m = tile
    ym = _times(y, m)
    sums[TARGET] += (ym * y if spec.squared else ym).sum(2)
    if spec.nll == "softmax":
        _add_softmax_nll(tile, ym, spec, sums)
    elif spec.nll == "sigmoid":
        _add_sigmoid_nll(tile, ym, spec, sums)
    if spec.probability != "none":
        p = _probability(tile.x, spec)
        sums[OVERLAP] += (_times(torch.minimum(p, y), m) if spec.minimum else p * ym).sum(2)
        sums[PREDICTION] += _times(p * p if spec.squared else p, m).sum(2)


def _add_softmax_nll(tile: Tile, ym: Tensor, spec: SumsSpec, sums: Tensor) -> None:
    log_p = tile.x.log_softmax(1)
    if spec.other:
        sums[OTHER_NLL] -= _times(_where_counted(log_p, tile.m), tile.m).sum(2)
    if spec.gamma:
        log_p = log_p * _one_minus(log_p.exp()) ** spec.gamma
    if not spec.dense:
        # A class with a logit of -inf has no part in the sum of labels of other classes.
        if tile.m is None:
            # The larger one of log(p) and 0 there, and of log(p) and -inf in the class of the label.
            least = tile.y.mul(torch.finfo(log_p.dtype).min).mul_(2)
            log_p = torch.maximum(log_p, least, out=log_p)
        else:
            # Nor has a position that does not count, of which log(p) may be NaN.
            log_p = log_p.masked_fill_(ym == 0, 0)
    sums[NLL] -= log_p.mul_(ym).sum(2)


def _add_sigmoid_nll(tile: Tile, ym: Tensor, spec: SumsSpec, sums: Tensor) -> None:
    x, y, m = tile
    factor = _sigmoid_factor(x, y, spec.gamma) if spec.gamma else None
    sums[NLL] -= _times(F.logsigmoid(x) * ym, factor).sum(2)
    sums[OTHER_NLL] -= _times(_times(F.logsigmoid(-x) * (1 - y), m), factor).sum(2)


def write_grad(tile: Tile, spec: SumsSpec, dsums: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the logits of a tile into ``dx``.  ``dsums`` is (ROWS, samples, K, 1)."""
    x, y, m = tile
    found = []
    if "softmax" in (spec.probability, spec.nll):
        found.append(_grad_of_softmax(tile, spec, dsums))
    if spec.probability in ("sigmoid", "identity"):
        p = _probability(x, spec)
        u = _times(_grad_of_p(p, y, spec, dsums), m)
        found.append(u * p * (1 - p) if spec.probability == "sigmoid" else u)
    if spec.nll == "sigmoid":
        found.append(_times(_where_counted(_grad_of_sigmoid_nll(x, y, spec.gamma, dsums), m), m))
    # Half precision is rounded once, here.
    dx.copy_(sum(found[1:], found[0]) if found else torch.zeros_like(x))


def _grad_of_softmax(tile: Tile, spec: SumsSpec, dsums: Tensor) -> Tensor:
    """w - p (sum of w over the classes), where w = p u - v."""
    x, y, m = tile
    p = x.softmax(1)
    w = _grad_of_p(p, y, spec, dsums).mul_(p) if spec.probability == "softmax" else torch.zeros_like(p)
    if spec.nll == "softmax":
        w.addcmul_(y * _focal_slope(p, spec.gamma) if spec.gamma else y, dsums[NLL], value=-1)
        if spec.other:
            w -= dsums[OTHER_NLL]
    if m is not None:
        w *= m
        if spec.nll == "softmax":
            # As in ``_where_counted``, in place.
            w.masked_fill_(m == 0, 0)
    return w.addcmul_(p, w.sum(1, keepdim=True), value=-1)


def _grad_of_p(p: Tensor, y: Tensor, spec: SumsSpec, dsums: Tensor) -> Tensor:
    """u without m, in memory of its own."""
    # At p = y, autograd takes half of the gradient of a minimum.
    u = dsums[OVERLAP] * ((1 - (p - y).sign()) / 2 if spec.minimum else y)
    return u.add_(dsums[PREDICTION] * (2 * p) if spec.squared else dsums[PREDICTION])


def _grad_of_sigmoid_nll(x: Tensor, y: Tensor, gamma: float, dsums: Tensor) -> Tensor:
    p, of_one, of_zero = x.sigmoid(), dsums[NLL] * y, dsums[OTHER_NLL] * (1 - y)
    grad = of_one * (p - 1) + of_zero * p
    if gamma:
        value = of_one * F.logsigmoid(x) + of_zero * F.logsigmoid(-x)
        sign = 2 * y - 1
        grad = (grad + value * gamma * sign * torch.sigmoid(x * sign)) * _sigmoid_factor(x, y, gamma)
    return grad


def _on_grid(given: SumsInputs, spec: SumsSpec) -> tuple[Tensor, Tensor | None]:
    """Target and mask as (N, channels, *grid)."""
    (N, K), grid = given.logits.shape[:2], grid_of(given.logits)
    mask = None if given.mask is None else given.mask.reshape(N, 1, *grid)
    return given.target.reshape(N, K if spec.dense else 1, *grid), mask


def _at(of: LogitTile, target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Target and mask of a tile: (samples, channels, positions)."""
    n, *positions = of.where
    at, shape = (n, slice(None), *positions), (of.x.shape[0], -1, of.x.shape[2])
    return target[at].reshape(shape), None if mask is None else mask[at].reshape(shape)


def forward(given: SumsInputs, spec: SumsSpec) -> Tensor:
    """The sums, (ROWS, N, K)."""
    (N, K), x = given.logits.shape[:2], tensor_of(given.logits)
    # Sums of tiles are added in float64: one fp32 number for each class would lose 4e-4 of a large class.
    sums = torch.zeros(ROWS, N, K, dtype=torch.float64, device=x.device)
    on_grid = _on_grid(given, spec)
    for tile in tiles(given.logits):
        target, mask = _at(tile, *on_grid)
        _check_labels(target, spec, K)
        add_sums(tile_of(tile.x, target, mask, spec), spec, sums[:, tile.where[0]])
    return sums.to(sums_dtype(x, spec))


def backward(dsums: Tensor, given: SumsInputs, spec: SumsSpec, grads: Grads) -> None:
    """Writes the gradient of the logits, or of the features, and adds to the gradients of weight and bias."""
    dsums = dsums.to(wide_dtype(tensor_of(given.logits).dtype)).unsqueeze(3)
    on_grid = _on_grid(given, spec)
    for tile in tiles(given.logits, grads):
        assert tile.into is not None
        write_grad(tile_of(tile.x, *_at(tile, *on_grid), spec), spec, dsums[:, tile.where[0]], tile.into)


def argmax(logits: Tensor | Conv, labels: Tensor) -> None:
    """Writes the first class with the largest logit of each position into ``labels``, (N, *spatial)."""
    on_grid = labels.view(labels.shape[0], *grid_of(logits))
    for x, where, _ in tiles(logits):
        part = on_grid[where]
        part.copy_(x.argmax(1).view(part.shape))


def cross_entropy(logits: Tensor | Conv, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy`` of each position, (N, S); ``options`` are its weight, ignore_index and label_smoothing."""
    N, grid = labels.shape[0], grid_of(logits)
    on_grid = labels.reshape(N, *grid)
    values = labels.new_empty(N, *grid, dtype=wide_dtype(tensor_of(logits).dtype))
    for x, where, _ in tiles(logits):
        target = on_grid[where].reshape(x.shape[0], -1).long()
        values[where] = F.cross_entropy(x, target, reduction="none", **options).view_as(values[where])
    return values.view(N, -1)
