"""The focal losses of MONAI (``monai.losses``), with their names and arguments."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.loss import _Loss

from ..ops.segmentation.conv_logits import ConvLogits, Logits
from ..ops.segmentation.spec import NLL, OTHER_NLL, ROWS, SumsInputs, SumsSpec, differs
from ..ops.segmentation.sums import sums
from .monai import DiceLoss, InputForm, check_not_negative, checked_reduction, class_weight


class Focal(NamedTuple):
    """The arguments of the focal part of a loss; ``name`` is the name of the loss in errors."""

    name: str
    include_background: bool
    alpha: Sequence[float] | float | None
    reduction: str
    softmax: bool = False

    def is_soft(self, given: SumsInputs, spec: SumsSpec) -> bool:
        """Whether alpha depends on each value of the target, which may be soft, so that the sums do not have it.

        It is decided by the dtype, because the host would have to wait for values.
        """
        soft = spec.dense and given.target.is_floating_point()
        return soft and self.alpha is not None and not self.softmax

    def soft_sums(self, given: SumsInputs, gamma: float) -> Tensor:
        """The sums, (ROWS, N, K), in which each element of the target has the weight that MONAI derives from alpha."""
        logits, y, mask = given
        x = logits.formed() if isinstance(logits, ConvLogits) else logits
        N, K, *spatial = x.shape
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        if isinstance(self.alpha, (int, float)):
            weight = y * self.alpha + (1 - y) * (1 - self.alpha)
        else:
            first = 0 if self.include_background or K == 1 else 1
            of_classes = F.pad(self._alpha_of_classes(K - first).to(y), (first, 0))
            weight = torch.where(y == 1, of_classes.view(K, *(1,) * len(spatial)), 1.0)
        weight = weight if mask is None else weight * mask
        # Sigmoids of different classes have nothing in common, so each class may be a sample of its own.
        apart = [t.reshape(N * K, 1, *spatial) for t in (x, y, weight)]
        return sums(SumsInputs(*apart), SumsSpec("none", "sigmoid", dense=True, gamma=gamma)).view(ROWS, N, K)

    def value(self, found: Tensor, given: SumsInputs, spec: SumsSpec, weight: Tensor | None) -> Tensor:
        """The loss from its sums, (ROWS, N, K), and the weight of the classes, which is a buffer of the loss."""
        per_class = self._weighted(self._balanced(found, None if self.is_soft(given, spec) else self.alpha), weight)
        S = math.prod(given.logits.shape[2:])
        valid = self._valid(given, spec)
        if self.reduction == "sum":
            # As in MONAI, a mean over positions, and a sum over samples and classes.
            return (per_class / S).sum() if valid is None else (per_class.sum(1) / valid.clamp(min=_EPS)).sum()
        if valid is not None:
            return per_class.sum() / valid.sum().clamp(min=_EPS)
        return per_class.sum() / (per_class.numel() * S)

    def _balanced(self, found: Tensor, alpha: Sequence[float] | float | None) -> Tensor:
        """The sums of each sample and class that counts, with alpha."""
        nll, other = found[NLL], found[OTHER_NLL]
        if not self.include_background and nll.shape[1] > 1:
            nll, other = nll[:, 1:], other[:, 1:]
        K = nll.shape[1]
        if alpha is None:
            return nll if self.softmax else nll + other
        if isinstance(alpha, (int, float)):
            if self.softmax:
                return nll.new_tensor([1 - alpha] + [alpha] * (K - 1)) * nll
            return alpha * nll + (1 - alpha) * other
        of_classes = self._alpha_of_classes(K).to(nll)
        return of_classes * nll if self.softmax else of_classes * nll + other

    def _alpha_of_classes(self, K: int) -> Tensor:
        of_classes = torch.as_tensor(self.alpha)
        if of_classes.shape != (K,):
            raise ValueError(f"{self.name}: alpha must have {K} values, one for each class, got {of_classes.tolist()}")
        return of_classes

    def _weighted(self, per_class: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return per_class
        if weight.dim() and (weight.shape != per_class.shape[1:] or per_class.shape[1] == 1):
            raise ValueError(
                f"{self.name}: weight must be one number, or have one value for each of several classes that count, "
                f"got {tuple(weight.shape)} for {per_class.shape[1]}"
            )
        return per_class * weight.to(per_class)

    def _valid(self, given: SumsInputs, spec: SumsSpec) -> Tensor | None:
        """The number of positions of each sample that are not ignored, (N,); None if none can be ignored."""
        mask = given.mask
        if mask is None and spec.ignore is not None:
            mask = differs(given.target, spec.ignore)
        return None if mask is None else mask.flatten(1).sum(1).to(torch.get_default_dtype())


def number_or_values(alpha: Sequence[float] | float | Tensor | None) -> Sequence[float] | float | None:
    """A number or a list of an alpha that may be a tensor or an array, as in MONAI."""
    return None if alpha is None else torch.as_tensor(alpha, dtype=torch.float64).tolist()


_EPS = torch.finfo(torch.float32).eps


class FocalLoss(_Loss):
    """Focal loss of logits (N, K, *spatial) that keeps nothing but the logits for backward.

    Equals ``monai.losses.FocalLoss`` with the same arguments, in value and gradient: the cross-entropy of each position
    and class times ``(1 - p) ** gamma``, where p is the probability of what the target says.  MONAI computes it in
    float32, whatever the dtype; here it is computed in float64 for float64 logits.

    Args:
        include_background, to_onehot_y, gamma, alpha, weight: as in MONAI.
        use_softmax: as in MONAI; include_background must be True then, because MONAI leaves the logits of the first
            class out of the softmax.
        ignore_index: as in MONAI.  A target with channels must be 0 or 1 in a class that is ignored, because MONAI
            multiplies the logits by other values; the host waits for the device to know.
        reduction: "mean" or "sum", which is a mean over positions and a sum over samples and classes, as in MONAI.

    Its forward takes the logits and a target: labels (N, 1, *spatial) with to_onehot_y, of any integer or floating
    dtype, which are never expanded; otherwise a tensor of the shape of the logits.

    Kept for backward: the logits and the target, which the caller has anyway, and a mask of the positions if a target
    with channels has an ignore_index.  With alpha and sigmoids, a floating-point target with channels may be soft; then
    a weight for each of its values is kept as well, which labels, or a target of truth values or integers, do not need.

    Raises:
        ValueError: the reduction is "none", which needs a value per position, or use_softmax is given without the
            background (use ``monai.losses.FocalLoss``); gamma is negative; a shape, a weight or an alpha is wrong; a
            target is soft in a class that is ignored.
        RuntimeError: backward itself is differentiated.

    Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017.
    """

    def __init__(
        self,
        include_background: bool = True,
        to_onehot_y: bool = False,
        gamma: float = 2.0,
        alpha: float | Sequence[float] | None = None,
        weight: Sequence[float] | float | Tensor | None = None,
        reduction: str = "mean",
        use_softmax: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        name = "fusedseg.losses.FocalLoss"
        super().__init__(reduction=checked_reduction(name, reduction, "mean", "sum"))
        check_not_negative(name, gamma=gamma)
        if use_softmax and not include_background:
            raise ValueError(
                f"{name}: include_background must be True with use_softmax=True; use monai.losses.FocalLoss, or leave "
                "the first class out of input and target"
            )
        self.form = InputForm(name, include_background, to_onehot_y, not use_softmax, False, ignore_index=ignore_index)
        self.gamma = float(gamma)
        self.focal = Focal(name, include_background, number_or_values(alpha), self.reduction, use_softmax)
        self.register_buffer("class_weight", class_weight(name, weight))
        self.class_weight: Tensor | None

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        given, spec = self.form.call(input, target)
        if self.focal.is_soft(given, spec):
            found = self.focal.soft_sums(given, self.gamma)
        else:
            likelihood = "softmax" if self.focal.softmax else "sigmoid"
            found = sums(given, spec.using("none", likelihood, self.gamma))
        return self.focal.value(found, given, spec, self.class_weight)


class DiceFocalLoss(_Loss):
    """Dice loss and focal loss of logits (N, K, *spatial) in one pass that keeps nothing but the logits.

    Equals ``monai.losses.DiceFocalLoss`` with the same arguments, in value and gradient: ``lambda_dice`` times
    ``DiceLoss``, plus ``lambda_focal`` times ``FocalLoss``.  As in MONAI, the focal part is that of sigmoids, even with
    ``softmax=True``.

    Args:
        include_background, to_onehot_y, sigmoid, softmax, squared_pred, jaccard, smooth_nr, smooth_dr: as in MONAI.
        batch, gamma, weight, lambda_dice, lambda_focal, alpha: as in MONAI.
        other_act: not supported; leave it None.
        reduction: "mean" or "sum".

    Target, errors and sources are those of ``fusedseg.DiceLoss`` and ``FocalLoss``.

    Kept for backward: as in ``FocalLoss``.
    """

    def __init__(
        self,
        include_background: bool = True,
        to_onehot_y: bool = False,
        sigmoid: bool = False,
        softmax: bool = False,
        other_act: Callable | None = None,
        squared_pred: bool = False,
        jaccard: bool = False,
        reduction: str = "mean",
        smooth_nr: float = 1e-5,
        smooth_dr: float = 1e-5,
        batch: bool = False,
        gamma: float = 2.0,
        weight: Sequence[float] | float | Tensor | None = None,
        lambda_dice: float = 1.0,
        lambda_focal: float = 1.0,
        alpha: float | None = None,
    ) -> None:
        name = "fusedseg.losses.DiceFocalLoss"
        super().__init__(reduction=checked_reduction(name, reduction, "mean", "sum"))
        check_not_negative(name, gamma=gamma, lambda_dice=lambda_dice, lambda_focal=lambda_focal)
        InputForm(name, include_background, to_onehot_y, sigmoid, softmax).check(other_act)
        self.dice = DiceLoss(
            include_background, to_onehot_y, sigmoid, softmax, None, squared_pred, jaccard, self.reduction,
            smooth_nr=smooth_nr, smooth_dr=smooth_dr, batch=batch, weight=class_weight(name, weight),
        )  # fmt: skip
        self.dice.form = self.dice.form._replace(name=name)
        self.focal = Focal(name, include_background, number_or_values(alpha), self.reduction)
        self.lambda_dice, self.lambda_focal, self.gamma = lambda_dice, lambda_focal, float(gamma)

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        given, spec = self.dice.form.call(input, target)
        probability = spec.probability if self.lambda_dice else "none"
        soft = self.focal.is_soft(given, spec)
        focal = ("sigmoid", self.gamma) if self.lambda_focal and not soft else ("none",)
        found = sums(given, spec.using(probability, *focal))
        loss = found.new_zeros(())
        if self.lambda_dice:
            loss = loss + self.lambda_dice * self.dice.value(found, input.dim())
        if self.lambda_focal:
            of_focal = self.focal.soft_sums(given, self.gamma) if soft else found
            loss = loss + self.lambda_focal * self.focal.value(of_focal, given, spec, self.dice.class_weight)
        return loss
