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

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .spec import NLL, OTHER_NLL, OVERLAP, PREDICTION, TARGET, Spec


class Axes(NamedTuple):
    """The axes of classes and of positions of a tile; axis 0 counts samples."""

    classes: int
    positions: int


class Tile(NamedTuple):
    """Logits in the dtype of the sums; labels, with one class, or a dense target; and the mask, with one class."""

    logits: Tensor
    target: Tensor
    mask: Tensor | None


def _is_short(spec: Spec) -> bool:
    """Whether labels are looked up; otherwise they become a one-hot target of the tile."""
    looked_up = spec.probability in ("softmax", "argmax", "none") and spec.nll != "sigmoid"
    return not spec.dense and looked_up and not spec.squared


def _weights(of_value: Tensor, mask: Tensor | None, spec: Spec, dtype: torch.dtype) -> Tensor | None:
    """m: the mask, and 0 where the target is the ignored label; None stands for 1 everywhere."""
    if spec.ignore is None:
        return mask
    valid = (of_value != spec.ignore).to(dtype)
    return valid if mask is None else valid * mask


class _Labels(NamedTuple):
    """Labels in int64, in which ignored ones are 0, and their weights m (None: 1 everywhere)."""

    label: Tensor
    m: Tensor | None


def _labels(tile: Tile, spec: Spec) -> _Labels:
    m = _weights(tile.target, tile.mask, spec, tile.logits.dtype)
    index = tile.target.long()
    return _Labels(index if spec.ignore is None else index * (index != spec.ignore), m)


def _target(tile: Tile, spec: Spec, axes: Axes) -> tuple[Tensor, Tensor | None]:
    """y for every class, and m."""
    y = tile.target
    if not spec.dense:
        shape = [1, 1, 1]
        shape[axes.classes] = tile.logits.shape[axes.classes]
        # Numbers of classes in the dtype of small integers would wrap.
        dtype = y.dtype if y.is_floating_point() else torch.int64
        y = y == torch.arange(shape[axes.classes], dtype=dtype, device=y.device).view(shape)
    return y.to(tile.logits.dtype), _weights(tile.target, tile.mask, spec, tile.logits.dtype)


def _probability(x: Tensor, spec: Spec, axes: Axes) -> Tensor:
    if spec.probability == "softmax":
        return torch.softmax(x, axes.classes)
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


def tile_sums(tile: Tile, spec: Spec, axes: Axes, sums: Tensor) -> None:
    """Adds the sums of a tile to ``sums``, (ROWS, samples, K) in float64."""
    if _is_short(spec):
        _sums_of_labels(tile, spec, axes, sums)
    else:
        _sums_of_target(tile, spec, axes, sums)


def _sums_of_labels(tile: Tile, spec: Spec, axes: Axes, sums: Tensor) -> None:
    x, (index, m) = tile.logits, _labels(tile, spec)
    flat = index.squeeze(axes.classes)

    def add_by_class(row: int, values: Tensor, classes: Tensor = flat) -> None:
        sums[row].scatter_add_(1, classes, _times(values, m).squeeze(axes.classes).double())

    p = log_p = None
    if spec.nll == "softmax":
        log_p = torch.log_softmax(x, axes.classes)
        at_label = log_p.gather(axes.classes, index)
        add_by_class(NLL, -at_label * _one_minus(at_label.exp()) ** spec.gamma if spec.gamma else -at_label)
        if spec.other:
            sums[OTHER_NLL] -= _times(log_p, m).sum(axes.positions)
    if spec.probability == "softmax":
        p = torch.softmax(x, axes.classes) if log_p is None else log_p.exp_()
        add_by_class(OVERLAP, p.gather(axes.classes, index))
        sums[PREDICTION] += _times(p, m).sum(axes.positions)
    ones = torch.ones_like(index, dtype=x.dtype)
    add_by_class(TARGET, ones)
    if spec.probability == "argmax":
        predicted = x.argmax(axes.classes, keepdim=True)
        add_by_class(OVERLAP, (predicted == index).to(x.dtype))
        add_by_class(PREDICTION, ones, predicted.squeeze(axes.classes))


def _sums_of_target(tile: Tile, spec: Spec, axes: Axes, sums: Tensor) -> None:
    x, (y, m) = tile.logits, _target(tile, spec, axes)

    def total(values: Tensor) -> Tensor:
        return _times(values, m).sum(axes.positions)

    sums[TARGET] += total(y * y if spec.squared else y)
    log_p = None
    if spec.nll == "softmax":
        log_p = torch.log_softmax(x, axes.classes)
        focal = log_p * _one_minus(log_p.exp()) ** spec.gamma if spec.gamma else log_p
        # A class with a logit of -inf has no part in the sum of labels of other classes.
        sums[NLL] -= total(focal * y if spec.dense else torch.where(y > 0, focal, 0.0))
        if spec.other:
            sums[OTHER_NLL] -= total(log_p)
    elif spec.nll == "sigmoid":
        factor = _sigmoid_factor(x, y, spec.gamma) if spec.gamma else None
        sums[NLL] -= total(_times(F.logsigmoid(x) * y, factor))
        sums[OTHER_NLL] -= total(_times(F.logsigmoid(-x) * (1 - y), factor))
    if spec.probability != "none":
        shared = log_p is not None and spec.probability == "softmax"
        p = log_p.exp_() if shared else _probability(x, spec, axes)  # type: ignore[union-attr]
        sums[PREDICTION] += total(p * p if spec.squared else p)
        sums[OVERLAP] += total(torch.minimum(p, y) if spec.minimum else p * y)


def tile_grad(tile: Tile, spec: Spec, axes: Axes, dsums: Tensor, dx: Tensor) -> None:
    """Writes the gradient of the logits of a tile into ``dx``.

    ``dsums`` has the gradients of the sums, in shapes (ROWS, samples, K, 1) or (ROWS, samples, 1, K).
    """
    if _is_short(spec):
        _grad_of_labels(tile, spec, axes, dsums, dx)
    else:
        dx.copy_(_grad_of_target(tile, spec, axes, dsums))


def _grad_of_labels(tile: Tile, spec: Spec, axes: Axes, dsums: Tensor, dx: Tensor) -> None:
    """With u and v at the label apart, dx = m p (dPREDICTION + factor) - m dOTHER_NLL, and more at the label."""
    x, (index, m) = tile.logits, _labels(tile, spec)
    p = torch.softmax(x, axes.classes)
    flat = index.squeeze(axes.classes)

    def of_label(row: int) -> Tensor:
        return dsums[row].squeeze(axes.positions).gather(1, flat).unsqueeze(axes.classes)

    factor = extra = of_prediction = None
    if spec.probability == "softmax":
        overlap = of_label(OVERLAP) * p.gather(axes.classes, index)
        of_prediction = p * dsums[PREDICTION]
        factor, extra = -(of_prediction.sum(axes.classes, keepdim=True) + overlap), overlap
    if spec.nll == "softmax":
        nll = of_label(NLL)
        if spec.gamma:
            nll = nll * _focal_slope(p.gather(axes.classes, index), spec.gamma)
        extra = -nll if extra is None else extra - nll
        if spec.other:
            nll = nll + dsums[OTHER_NLL].sum(axes.classes, keepdim=True)
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
        out -= dsums[OTHER_NLL]
    if m is not None:
        out *= m
    if out is not dx:
        dx.copy_(out)


def _grad_of_target(tile: Tile, spec: Spec, axes: Axes, dsums: Tensor) -> Tensor:
    x, (y, m) = tile.logits, _target(tile, spec, axes)
    dx = u = softmax = None
    if "softmax" in (spec.probability, spec.nll):
        softmax = torch.softmax(x, axes.classes)
    if spec.probability != "none":
        p = softmax if softmax is not None and spec.probability == "softmax" else _probability(x, spec, axes)
        # At p = y, autograd takes half of the gradient of a minimum.
        u = dsums[OVERLAP] * ((1 - (p - y).sign()) / 2 if spec.minimum else y)
        u = _times(u.add_(dsums[PREDICTION] * (2 * p) if spec.squared else dsums[PREDICTION]), m)
        if spec.probability == "sigmoid":
            dx = u * p * (1 - p)
        elif spec.probability == "identity":
            dx = u
    if softmax is not None:
        v = None
        if spec.nll == "softmax":
            v = dsums[NLL] * y
            if spec.gamma:
                v = v * _focal_slope(softmax, spec.gamma)
            v = _times(v + dsums[OTHER_NLL] if spec.other else v, m)
        of_softmax = _grad_of_softmax(softmax, u if spec.probability == "softmax" else None, v, axes)
        dx = of_softmax if dx is None else dx + of_softmax
    if spec.nll == "sigmoid":
        of_nll = _times(_grad_of_sigmoid_nll(x, y, spec.gamma, dsums), m)
        dx = of_nll if dx is None else dx + of_nll
    return torch.zeros_like(x) if dx is None else dx


def _grad_of_sigmoid_nll(x: Tensor, y: Tensor, gamma: float, dsums: Tensor) -> Tensor:
    p, of_one, of_zero = x.sigmoid(), dsums[NLL] * y, dsums[OTHER_NLL] * (1 - y)
    grad = of_one * (p - 1) + of_zero * p
    if gamma:
        value = of_one * F.logsigmoid(x) + of_zero * F.logsigmoid(-x)
        sign = 2 * y - 1
        grad = (grad + value * gamma * sign * torch.sigmoid(x * sign)) * _sigmoid_factor(x, y, gamma)
    return grad


def _grad_of_softmax(p: Tensor, u: Tensor | None, v: Tensor | None, axes: Axes) -> Tensor:
    """p (u + r) - v, where r is the sum of v - p u over the classes; None stands for 0."""
    r = None if v is None else v.sum(axes.classes, keepdim=True)
    if u is not None:
        pu = (p * u).sum(axes.classes, keepdim=True)
        r = u - pu if r is None else u + (r - pu)
    assert r is not None
    dx = r * p
    return dx if v is None else dx.sub_(v)
