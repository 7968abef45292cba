"""The sums of one tile of logits, and the gradient of the logits of a tile.

With p the probability of a class, l = log(softmax(x)), and the gradients u of p and -v of l, which are

    u = m (dPREDICTION (2 p if squared) + dOVERLAP y)        v = m (dNLL y + dOTHER_NLL)

the gradient of the logits x is

    softmax      p (u - sum of p u over the classes)         p (sum of v) - v
    sigmoid      u p (1 - p)                                 m (dNLL y (p - 1) + dOTHER_NLL (1 - y) p)
    identity     u

where the first column belongs to the probability and the second one to the likelihood.  With the factor f of a focal
loss, dNLL in v is multiplied by the gradient of (1 - p)**gamma l in l, and the gradient of a sigmoid gets the gradient
of its factor as well.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._torch import FakeTensor
from .spec import NLL, OP, OTHER_NLL, OVERLAP, PREDICTION, TARGET, SumsSpec

# Up to this number of classes, a one-hot target of the tile takes less time than looking up and adding by label.
ONE_HOT_CLASSES = 16
# exp2 of a product is faster than exp on a CPU.
LOG2_E = math.log2(math.e)
# The target of each class, and the weights of the positions.
Target = tuple[Tensor, Tensor | None]


class Axes(NamedTuple):
    """The axes of classes and of positions of a tile; axis 0 counts samples."""

    classes: int
    positions: int


class Tile(NamedTuple):
    """Logits in the dtype of the sums; labels, with one class, or a dense target; and the mask, with one class."""

    logits: Tensor
    target: Tensor
    mask: Tensor | None


def _is_looked_up(tile: Tile, spec: SumsSpec, axes: Axes) -> bool:
    """Whether labels are looked up; otherwise they become a one-hot target of the tile."""
    possible = spec.probability in ("softmax", "argmax", "none") and spec.nll != "sigmoid"
    if spec.dense or spec.squared or not possible:
        return False
    return spec.hard or tile.logits.shape[axes.classes] > ONE_HOT_CLASSES


def _has_cheap_values(t: Tensor) -> bool:
    """Whether Python can read a value without waiting for a device."""
    return t.device.type == "cpu" and not isinstance(t, FakeTensor)


def _weights(tile: Tile, ignore: int | None) -> Tensor | None:
    """m: the mask, and 0 where the target is the ignored label; None stands for 1 everywhere."""
    if ignore is None:
        return tile.mask
    valid = (tile.target != ignore).to(tile.logits.dtype)
    return valid if tile.mask is None else valid * tile.mask


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


def _ignored(labels: Tensor, spec: SumsSpec, K: int) -> int | None:
    """The ignored label, or None if it does not occur, which saves the work of a mask.

    Raises IndexError for a label of no class, and ValueError as ``check_whole``.  All of it needs values that Python
    reads without waiting for a device.
    """
    if not _has_cheap_values(labels) or not labels.numel():
        return spec.ignore
    check_whole(labels)
    low, high = (of.item() for of in torch.aminmax(labels))
    ignore = spec.ignore if spec.ignore is not None and low <= spec.ignore <= high else None
    if low < 0 or high >= K:
        wrong = (labels < 0) | (labels >= K)
        wrong = wrong if ignore is None else wrong & (labels != ignore)
        if wrong.any():
            raise IndexError(f"{OP}: a label must be a class below {K} or ignored, got {labels[wrong][0].item()}")
    return ignore


class _Labels(NamedTuple):
    """Labels in int64, in which ignored ones are 0, and their weights m (None: 1 everywhere)."""

    label: Tensor
    m: Tensor | None


def _labels(tile: Tile, spec: SumsSpec, axes: Axes) -> _Labels:
    ignore = _ignored(tile.target, spec, tile.logits.shape[axes.classes])
    index = tile.target.long()
    return _Labels(index if ignore is None else index * (index != ignore), _weights(tile, ignore))


def _target(tile: Tile, spec: SumsSpec, axes: Axes) -> Target:
    """y for every class, and m."""
    y = tile.target
    if spec.dense:
        return y.to(tile.logits.dtype), _weights(tile, spec.ignore)
    shape, K = [1, 1, 1], tile.logits.shape[axes.classes]
    shape[axes.classes] = K
    m = _weights(tile, _ignored(y, spec, K))
    if y.is_floating_point() and not _has_cheap_values(y):
        # Where the host reads no value, the fraction is cut off, as by the Triton kernels and the stock losses.
        y = y.trunc()
    # Numbers of classes in the dtype of small integers would wrap.
    dtype = y.dtype if y.is_floating_point() or torch.iinfo(y.dtype).max >= K else torch.int64
    classes = torch.arange(K, dtype=dtype, device=y.device).view(shape)
    # The comparison writes numbers at once, so that no tensor of truth values has to be converted.
    return torch.eq(y, classes, out=torch.empty_like(tile.logits)), m


def _exponentials(x: Tensor, axes: Axes) -> tuple[Tensor, Tensor]:
    """exp(x), divided by that of the largest class of each position, and its sum over the classes."""
    e = (x - x.amax(axes.classes, keepdim=True)).mul_(LOG2_E).exp2_()
    return e, e.sum(axes.classes, keepdim=True)


def _softmax(x: Tensor, axes: Axes) -> Tensor:
    e, total = _exponentials(x, axes)
    return e.div_(total)


def _softmax_of(log_p: Tensor) -> Tensor:
    """The softmax from its logarithm, over whose memory it is written."""
    return log_p.mul_(LOG2_E).exp2_()


def _probability(x: Tensor, spec: SumsSpec, axes: Axes) -> Tensor:
    if spec.probability == "softmax":
        return _softmax(x, axes)
    if spec.probability == "argmax":
        return torch.zeros_like(x).scatter_(axes.classes, x.argmax(axes.classes, keepdim=True), 1)
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


def tile_sums(tile: Tile, spec: SumsSpec, axes: Axes, sums: Tensor) -> None:
    """Adds the sums of a tile to ``sums``, (ROWS, samples, K) in float64."""
    if _is_looked_up(tile, spec, axes):
        _sums_of_labels(tile, spec, axes, sums)
    else:
        _sums_of_target(tile, spec, axes, sums)


def _sums_of_labels(tile: Tile, spec: SumsSpec, axes: Axes, sums: Tensor) -> None:
    x, (index, m) = tile.logits, _labels(tile, spec, axes)
    flat = index.squeeze(axes.classes)

    def add_by_class(row: int, values: Tensor, classes: Tensor = flat) -> None:
        sums[row].scatter_add_(1, classes, values.squeeze(axes.classes).double())

    p = log_p = None
    if spec.nll == "softmax":
        log_p = torch.log_softmax(x, axes.classes)
        at_label = log_p.gather(axes.classes, index)
        nll = -at_label * _one_minus(at_label.exp()) ** spec.gamma if spec.gamma else -at_label
        add_by_class(NLL, _times(_where_counted(nll, m), m))
        if spec.other:
            sums[OTHER_NLL] -= _times(_where_counted(log_p, m), m).sum(axes.positions)
    if spec.probability == "softmax":
        p = _softmax(x, axes) if log_p is None else _softmax_of(log_p)
        add_by_class(OVERLAP, _times(p.gather(axes.classes, index), m))
        sums[PREDICTION] += _times(p, m).sum(axes.positions)
    ones = torch.ones_like(index, dtype=x.dtype) if m is None else m
    add_by_class(TARGET, ones)
    if spec.probability == "argmax":
        predicted = x.argmax(axes.classes, keepdim=True)
        add_by_class(OVERLAP, _times((predicted == index).to(x.dtype), m))
        add_by_class(PREDICTION, ones, predicted.squeeze(axes.classes))


def _sums_of_target(tile: Tile, spec: SumsSpec, axes: Axes, sums: Tensor) -> None:
    x, (y, m) = tile.logits, _target(tile, spec, axes)
    ym = _times(y, m)

    def total(values: Tensor) -> Tensor:
        return values.sum(axes.positions)

    sums[TARGET] += total(ym * y if spec.squared else ym)
    log_p = None
    if spec.nll == "softmax":
        log_p = torch.log_softmax(x, axes.classes)
        focal = log_p * _one_minus(log_p.exp()) ** spec.gamma if spec.gamma else log_p
        nll = total(focal * ym) if spec.dense or _has_cheap_values(x) else None
        # A class with a logit of -inf has no part in the sum of labels of other classes.
        if nll is None or (not spec.dense and bool(nll.isnan().any())):
            nll = total(torch.where(ym > 0, focal, 0.0) * ym)
        sums[NLL] -= nll
        if spec.other:
            sums[OTHER_NLL] -= total(_times(_where_counted(log_p, m), m))
    elif spec.nll == "sigmoid":
        factor = _sigmoid_factor(x, y, spec.gamma) if spec.gamma else None
        sums[NLL] -= total(_times(F.logsigmoid(x) * ym, factor))
        sums[OTHER_NLL] -= total(_times(_times(F.logsigmoid(-x) * (1 - y), m), factor))
    if spec.probability != "none":
        if log_p is not None and spec.probability == "softmax":
            p = _softmax_of(log_p)
        else:
            p = _probability(x, spec, axes)
        sums[PREDICTION] += total(_times(p * p if spec.squared else p, m))
        sums[OVERLAP] += total(_times(torch.minimum(p, y), m) if spec.minimum else p * ym)


def tile_grad(tile: Tile, spec: SumsSpec, axes: Axes, dsums: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the logits of a tile into ``dx``.

    ``dsums`` has the gradients of the sums, in shapes (ROWS, samples, K, 1) or (ROWS, samples, 1, K).
    """
    if _is_looked_up(tile, spec, axes):
        _grad_of_labels(tile, spec, axes, dsums, dx)
    else:
        _grad_of_target(tile, spec, axes, dsums, dx)


def _grad_of_labels(tile: Tile, spec: SumsSpec, axes: Axes, dsums: Tensor, dx: Tensor) -> None:
    """With u and v at the label apart, dx = m p (dPREDICTION + factor) - m dOTHER_NLL, and more at the label."""
    x, (index, m) = tile.logits, _labels(tile, spec, axes)
    p = _softmax(x, axes)
    flat = index.squeeze(axes.classes)

    def of_label(row: int) -> Tensor:
        return dsums[row].squeeze(axes.positions).gather(1, flat).unsqueeze(axes.classes)

    factor = extra = of_prediction = None
    if spec.probability == "softmax":
        overlap = of_label(OVERLAP) * p.gather(axes.classes, index)
        of_prediction = p * dsums[PREDICTION]
        factor, extra = -(of_prediction.sum(axes.classes, keepdim=True) + overlap), overlap
    if spec.nll == "softmax":
        nll = _where_counted(of_label(NLL), m)
        if spec.gamma:
            nll = nll * _focal_slope(p.gather(axes.classes, index), spec.gamma)
        extra = -nll if extra is None else extra - nll
        if spec.other:
            nll = nll + _where_counted(dsums[OTHER_NLL].sum(axes.classes, keepdim=True), m)
        factor = nll if factor is None else factor + nll
    if factor is None or extra is None:
        dx.zero_()
        return
    # Half precision is rounded once, at the end.
    out = dx if dx.dtype == p.dtype else p
    if of_prediction is None:
        torch.mul(p, factor, out=out)
    else:
        torch.addcmul(of_prediction, p, factor, out=out)
    out.scatter_add_(axes.classes, index, extra)
    if spec.other:
        out -= _where_counted(dsums[OTHER_NLL], m)
    if m is not None:
        out *= m
    if out is not dx:
        dx.copy_(out)


def _grad_of_target(tile: Tile, spec: SumsSpec, axes: Axes, dsums: Tensor, dx: Tensor) -> None:
    x, target = tile.logits, _target(tile, spec, axes)
    (y, m), found = target, None
    if spec.probability in ("sigmoid", "identity"):
        p = _probability(x, spec, axes)
        found = _times(_grad_of_p(p, y, spec, dsums), m)
        if spec.probability == "sigmoid":
            found = found * p * (1 - p)
    if spec.nll == "sigmoid":
        of_nll = _times(_where_counted(_grad_of_sigmoid_nll(x, y, spec.gamma, dsums), m), m)
        found = of_nll if found is None else found + of_nll
    if "softmax" in (spec.probability, spec.nll):
        _add_grad_of_softmax(x, target, spec, axes, dsums, found, dx)
    elif found is None:
        dx.zero_()
    else:
        dx.copy_(found)


def _add_grad_of_softmax(
    logits: Tensor, target: Target, spec: SumsSpec, axes: Axes, dsums: Tensor, found: Tensor | None, dx: Tensor
) -> None:
    """Writes ``found`` and the gradient by the softmax into ``dx``."""
    (y, m), (e, sum_of_e) = target, _exponentials(logits, axes)
    # With p = e / sum of e, and w = m (p u - v), the gradient is w - p (sum of w over the classes).
    if spec.probability == "softmax":
        p = e.div_(sum_of_e)
        w = _grad_of_p(p, y, spec, dsums).mul_(p)
        if spec.nll == "softmax":
            w.addcmul_(y if not spec.gamma else y * _focal_slope(p, spec.gamma), dsums[NLL], value=-1)
    else:
        w = y * -dsums[NLL]
        if spec.gamma:
            w *= _focal_slope(e / sum_of_e, spec.gamma)
    if spec.other and spec.nll == "softmax":
        w -= dsums[OTHER_NLL]
    if m is not None:
        w *= m
        if spec.nll == "softmax":
            # As in ``_where_counted``, in place.
            w.masked_fill_(m == 0, 0)
    total = w.sum(axes.classes, keepdim=True)
    if spec.probability != "softmax":
        total /= sum_of_e
    # Half precision is rounded once, at the end.
    out = dx if dx.dtype == e.dtype and found is None else w
    torch.addcmul(w, e, total, value=-1, out=out)
    if out is not dx:
        dx.copy_(out if found is None else out.add_(found))


def _grad_of_sigmoid_nll(x: Tensor, y: Tensor, gamma: float, dsums: Tensor) -> Tensor:
    p, of_one, of_zero = x.sigmoid(), dsums[NLL] * y, dsums[OTHER_NLL] * (1 - y)
    grad = of_one * (p - 1) + of_zero * p
    if gamma:
        value = of_one * F.logsigmoid(x) + of_zero * F.logsigmoid(-x)
        sign = 2 * y - 1
        grad = (grad + value * gamma * sign * torch.sigmoid(x * sign)) * _sigmoid_factor(x, y, gamma)
    return grad


def _grad_of_p(p: Tensor, y: Tensor, spec: SumsSpec, dsums: Tensor) -> Tensor:
    """u without m, in memory of its own."""
    # At p = y, autograd takes half of the gradient of a minimum.
    u = dsums[OVERLAP] * ((1 - (p - y).sign()) / 2 if spec.minimum else y)
    return u.add_(dsums[PREDICTION] * (2 * p) if spec.squared else dsums[PREDICTION])
