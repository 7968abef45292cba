"""The op on aten ops: a plain forward and backward, tile by tile.  It serves every device without Triton.

With p the probability of a class, l = log(softmax(x)), and the gradients u of p and -v of l, which are

    u = m (dPREDICTION (2 p if squared) + dOVERLAP y)        v = m (dNLL y + dOTHER_NLL)

the gradient of the logits x is

    softmax      p (u - sum of p u over the classes)         p (sum of v) - v
    sigmoid      u p (1 - p)                                 m (dNLL y (p - 1) + dOTHER_NLL (1 - y) p)
    identity     u

where the first column belongs to the probability and the second one to the likelihood.  With the factor f of a focal
loss, dNLL in v is multiplied by the gradient of (1 - p)**gamma l in l, and the gradient of a sigmoid gets the gradient
of its factor as well.

A tile holds all classes of some positions, so that it and its few copies stay in the cache.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import FakeTensor
from ..check import has_values
from .spec import (
    NLL,
    OP,
    OTHER_NLL,
    OVERLAP,
    PREDICTION,
    ROWS,
    TARGET,
    Given,
    Sizes,
    SumsSpec,
    sizes_of,
    sums_dtype,
    wide_dtype,
)

# The number of logits of a tile, for each thread.  A tile of fp32 has 1 MiB, beside a few copies.
TILE = 1 << 18
# On a GPU, where each op is one launch.
DEVICE_TILE = 1 << 24

# The samples and the positions of a tile.
Where = tuple[slice, slice]


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
    wrong = labels != labels.trunc()
    if wrong.any():
        raise ValueError(
            f"{OP}: target must have whole numbers where it has one label for each position, "
            f"got {labels[wrong][0].item():.4g}; a soft target has a channel for each class"
        )


def _check_labels(labels: Tensor, ignore: int | None, K: int) -> None:
    """Raises IndexError for a label of no class, and ValueError as ``check_whole``, where values are cheap to read."""
    if not _has_cheap_values(labels) or not labels.numel():
        return
    check_whole(labels)
    wrong = (labels < 0) | (labels >= K)
    if ignore is not None:
        wrong &= labels != ignore
    if wrong.any():
        raise IndexError(f"{OP}: a label must be a class below {K} or ignored, got {labels[wrong][0].item()}")


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    """1 in the class of each label, and 0 in all other classes, in the shape of ``like``."""
    if labels.is_floating_point() and not _has_cheap_values(labels):
        # Where the host reads no value, the fraction is cut off, as by the Triton kernels and the stock losses.
        labels = labels.trunc()
    K = like.shape[1]
    # Numbers of classes in the dtype of small integers would wrap.
    dtype = labels.dtype if labels.is_floating_point() or torch.iinfo(labels.dtype).max >= K else torch.int64
    classes = torch.arange(K, dtype=dtype, device=labels.device).view(1, K, 1)
    # The comparison writes numbers at once, so that no tensor of truth values has to be converted.
    return torch.eq(labels, classes, out=torch.empty_like(like))


def tile_of(x: Tensor, target: Tensor, mask: Tensor | None, spec: SumsSpec) -> Tile:
    """The tile of logits in the dtype of the arithmetic, of labels with one class or a dense target, and of a mask."""
    m = None if mask is None else mask.to(x.dtype)
    if spec.ignore is not None:
        valid = (target != spec.ignore).to(x.dtype)
        m = valid if m is None else valid * m
    if spec.dense:
        return Tile(x, target.to(x.dtype), m)
    _check_labels(target, spec.ignore, x.shape[1])
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


def tile_size(t: Tensor, device_tile: int = DEVICE_TILE) -> int:
    """The number of logits of a tile; ``device_tile`` is that of a GPU."""
    return device_tile if t.is_cuda else TILE * torch.get_num_threads()


def _tiles(logits: Tensor, sizes: Sizes) -> Iterator[Where]:
    """The samples and positions of each tile.  A tensor without values has one tile, which shows the bytes of all."""
    N, K, S, _ = sizes
    tile = tile_size(logits)
    samples, positions = max(1, tile // (K * S)), max(1, tile // K)
    for n in range(0, N, samples):
        for s in range(0, S, positions):
            yield slice(n, n + samples), slice(s, s + positions)
            if not has_values(logits):
                return


class _Views(NamedTuple):
    """Logits, target and mask with their positions as one axis, (N, K or 1, S)."""

    logits: Tensor
    target: Tensor
    mask: Tensor | None

    @classmethod
    def of(cls, given: Given, sizes: Sizes, dense: bool) -> "_Views":
        N, K, S, _ = sizes
        mask = None if given.mask is None else given.mask.reshape(N, 1, S)
        return cls(given.logits.reshape(N, K, S), given.target.reshape(N, K if dense else 1, S), mask)

    def tile(self, where: Where, spec: SumsSpec) -> Tile:
        n, s = where
        x = self.logits[n, :, s]
        return tile_of(
            x.to(wide_dtype(x)), self.target[n, :, s], None if self.mask is None else self.mask[n, :, s], spec
        )


def forward(given: Given, sizes: Sizes, spec: SumsSpec) -> Tensor:
    """The sums, (ROWS, N, K)."""
    # Sums of tiles are added in float64: one fp32 number for each class would lose 4e-4 of a large class.
    sums = torch.zeros(ROWS, sizes.N, sizes.K, dtype=torch.float64, device=given.logits.device)
    views = _Views.of(given, sizes, spec.dense)
    for where in _tiles(given.logits, sizes):
        add_sums(views.tile(where, spec), spec, sums[:, where[0]])
    return sums.to(sums_dtype(given.logits, spec))


def backward(dsums: Tensor, given: Given, sizes: Sizes, spec: SumsSpec, dx: Tensor) -> None:
    """Writes the gradient of the logits into ``dx``."""
    views, out = _Views.of(given, sizes, spec.dense), dx.view(sizes.N, sizes.K, sizes.S)
    dsums = dsums.to(wide_dtype(given.logits)).unsqueeze(3)
    for n, s in _tiles(given.logits, sizes):
        write_grad(views.tile((n, s), spec), spec, dsums[:, n], out[n, :, s])


def argmax(logits: Tensor, sizes: Sizes, labels: Tensor) -> None:
    """Writes the first class with the largest logit of each position into ``labels``, (N, S)."""
    x = logits.reshape(sizes.N, sizes.K, sizes.S)
    for n, s in _tiles(logits, sizes):
        labels[n, s] = x[n, :, s].argmax(1)


def cross_entropy(logits: Tensor, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy`` of each position, (N, S); ``options`` are its weight, ignore_index and label_smoothing."""
    sizes = sizes_of(logits)
    assert sizes is not None
    values = torch.empty(sizes.N, sizes.S, dtype=wide_dtype(logits), device=logits.device)
    x, target = logits.reshape(sizes.N, sizes.K, sizes.S), labels.reshape(sizes.N, sizes.S)
    for n, s in _tiles(logits, sizes):
        part = x[n, :, s].to(values.dtype)
        values[n, s] = F.cross_entropy(part, target[n, s].long(), reduction="none", **options)
    return values
