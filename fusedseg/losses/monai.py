"""The losses of MONAI (``monai.losses``), with their names and arguments."""

import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from ..ops.check import check_choice
from ..ops.segmentation.checks import check_hard
from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.spec import OVERLAP, PREDICTION, TARGET, SumsInputs, SumsSpec, differs
from ..ops.segmentation.sums import sums
from .cross_entropy import CrossEntropy, binary_total, positions_of


class InputForm(NamedTuple):
    """The arguments that say how input and target are read; ``name`` is the name of the loss in errors."""

    name: str
    include_background: bool
    to_onehot_y: bool
    sigmoid: bool
    softmax: bool
    squared: bool = False
    soft_label: bool = False
    ignore_index: int | None = None

    def check(self, other_act: Callable | None) -> None:
        if other_act is not None:
            raise ValueError(
                f"{self.name}: other_act must be None, got {other_act!r}; its gradient is not known here, so use "
                f"monai.losses.{self.name.rsplit('.', 1)[-1]}"
            )
        if self.sigmoid and self.softmax:
            raise ValueError(f"{self.name}: sigmoid and softmax must not both be True")

    def call(self, x: Logits, target: Tensor) -> tuple[SumsInputs, SumsSpec]:
        """The tensors and the spec of the Dice part, read as MONAI does, with its warnings for one channel."""
        labels = self.to_onehot_y and x.shape[1] > 1
        if x.shape[1] == 1:
            self._warn_of_one_channel()
        probability = "sigmoid" if self.sigmoid else "softmax" if self.softmax and x.shape[1] > 1 else "identity"
        if labels:
            wanted, got = (x.shape[0], 1, *x.shape[2:]), tuple(target.shape)
            if got != wanted:
                raise ValueError(f"{self.name}: target must have shape {wanted} with to_onehot_y=True, got {got}")
        elif target.shape != x.shape:
            raise ValueError(
                f"{self.name}: target must have the shape of input {tuple(x.shape)} without to_onehot_y, "
                f"got {tuple(target.shape)}"
            )
        mask = None if labels else self._mask(target)
        check_hard(self.name, mask, self.ignore_index)
        minimum = self.soft_label and not self.squared and not labels
        ignore = self.ignore_index if labels else None
        spec = SumsSpec(probability, "none", ignore, self.squared, minimum, dense=not labels)
        return SumsInputs(x, target, mask), spec

    def _warn_of_one_channel(self) -> None:
        for name, given in (
            ("softmax=True", self.softmax),
            ("to_onehot_y=True", self.to_onehot_y),
            ("include_background=False", not self.include_background),
        ):
            if given:
                warnings.warn(f"{self.name}: {name} is ignored, because input has one channel", stacklevel=4)

    def _mask(self, target: Tensor) -> Tensor | None:
        """The positions that count in a target with channels."""
        ignore = self.ignore_index
        if ignore is None:
            return None
        if target.shape[1] == 1:
            return differs(target, ignore)
        if not 0 <= ignore < target.shape[1]:
            # Positions of no class.
            return target.sum(1, keepdim=True) > 0
        channel = target[:, ignore : ignore + 1]
        return ~channel if channel.dtype == torch.bool else 1 - channel

    def parts(self, found: Tensor, batch: bool) -> tuple[Tensor, Tensor, Tensor]:
        """True positives, false positives and false negatives of each class."""
        of_classes = found[: TARGET + 1]
        if not self.include_background and found.shape[2] > 1:
            of_classes = of_classes[:, :, 1:]
        if batch:
            of_classes = of_classes.sum(1)
        tp = of_classes[OVERLAP]
        return tp, of_classes[PREDICTION] - tp, of_classes[TARGET] - tp


def _reduced(f: Tensor, reduction: str) -> Tensor:
    return f.mean() if reduction == "mean" else f.sum() if reduction == "sum" else f


class DiceLoss(_Loss):
    """Dice loss of logits (N, K, *spatial) that keeps nothing but the logits for backward.

    Equals ``monai.losses.DiceLoss`` with the same arguments, in value and gradient.

    Args:
        include_background, to_onehot_y, squared_pred, jaccard, smooth_nr, smooth_dr, batch, weight: as in MONAI.
        sigmoid, softmax: as in MONAI; without both, the input are the probabilities themselves.
        soft_label: as in MONAI; probabilities must not be negative.
        ignore_index: as in MONAI.  A target with channels must be 0 or 1 in a class that is ignored; the host waits for
            the device to know.
        other_act: not supported; leave it None.
        reduction: "mean", "sum" or "none".

    Its forward takes the logits and a target: labels (N, 1, *spatial) with to_onehot_y, of any integer or floating
    dtype, which are never expanded; otherwise a tensor of the shape of the logits.

    Kept for backward: the logits and the target, which the caller has anyway, and a mask of the positions if a target
    with channels has an ignore_index.  With 118 classes in half precision MONAI's loss keeps six times the bytes of the
    logits.  With three classes the peak of a network is elsewhere, and this loss does not lower it.

    Raises:
        ValueError: other_act is given; sigmoid and softmax are both True; a shape, a reduction or a weight is wrong; a
            target is soft in a class that is ignored.
        RuntimeError: backward itself is differentiated.

    Source: Milletari et al., "V-Net", 3DV 2016; Wang et al., "Jaccard Metric Losses", NeurIPS 2023 (soft_label).
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
        weight: Sequence[float] | float | Tensor | None = None,
        soft_label: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        name = "fusedseg.DiceLoss"
        super().__init__(reduction=checked_reduction(name, reduction, "mean", "sum", "none"))
        self.form = InputForm(
            name, include_background, to_onehot_y, sigmoid, softmax, squared_pred, soft_label, ignore_index
        )
        self.form.check(other_act)
        self.jaccard, self.batch = jaccard, batch
        self.smooth_nr, self.smooth_dr = float(smooth_nr), float(smooth_dr)
        self.register_buffer("class_weight", class_weight(name, weight))
        self.class_weight: Tensor | None

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        return self.value(sums(*self.form.call(input, target)), input.dim())

    def value(self, found: Tensor, dims: int) -> Tensor:
        """The loss from its sums, for logits of ``dims`` dimensions."""
        tp, fp, fn = self.form.parts(found, self.batch)
        if not self.jaccard:
            fp, fn = fp * 0.5, fn * 0.5
        f = 1 - (2 * tp + self.smooth_nr) / (2 * (tp + fp + fn) + self.smooth_dr)
        if self.class_weight is not None and f.shape[-1] != 1:
            if self.class_weight.dim() and self.class_weight.shape != f.shape[-1:]:
                raise ValueError(
                    f"{self.form.name}: weight must have {f.shape[-1]} values, one for each class"
                    f"{'' if self.form.include_background else ' but the background'}, "
                    f"got {tuple(self.class_weight.shape)}"
                )
            f = f * self.class_weight.to(f)
        if self.reduction == "none":
            return f.view(*f.shape[:2], *(1,) * (dims - 2))
        return _reduced(f, self.reduction)


class TverskyLoss(_Loss):
    """Tversky loss of logits (N, K, *spatial) that keeps nothing but the logits for backward.

    Equals ``monai.losses.TverskyLoss`` with the same arguments, in value and gradient: one minus
    (tp + smooth_nr) / (tp + alpha fp + beta fn + smooth_dr).  ``DiceLoss`` describes all other arguments, what is kept,
    and the errors.

    Source: Salehi et al., "Tversky loss function for image segmentation using 3D fully convolutional deep networks",
    MLMI 2017.
    """

    def __init__(
        self,
        include_background: bool = True,
        to_onehot_y: bool = False,
        sigmoid: bool = False,
        softmax: bool = False,
        other_act: Callable | None = None,
        alpha: float = 0.5,
        beta: float = 0.5,
        reduction: str = "mean",
        smooth_nr: float = 1e-5,
        smooth_dr: float = 1e-5,
        batch: bool = False,
        soft_label: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        name = "fusedseg.losses.TverskyLoss"
        super().__init__(reduction=checked_reduction(name, reduction, "mean", "sum", "none"))
        self.form = InputForm(name, include_background, to_onehot_y, sigmoid, softmax, False, soft_label, ignore_index)
        self.form.check(other_act)
        self.alpha, self.beta, self.batch = alpha, beta, batch
        self.smooth_nr, self.smooth_dr = float(smooth_nr), float(smooth_dr)

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        tp, fp, fn = self.form.parts(sums(*self.form.call(input, target)), self.batch)
        score = 1 - (tp + self.smooth_nr) / (tp + self.alpha * fp + self.beta * fn + self.smooth_dr)
        return _reduced(score, self.reduction)


class DiceCELoss(_Loss):
    """Dice loss and cross-entropy of logits (N, K, *spatial) in one pass that keeps nothing but the logits.

    Equals ``monai.losses.DiceCELoss`` with the same arguments, in value and gradient: ``lambda_dice`` times
    ``DiceLoss``, plus ``lambda_ce`` times ``nn.CrossEntropyLoss``, or ``nn.BCEWithLogitsLoss`` if there is one class.
    As in MONAI, ``sigmoid=True`` changes the Dice part only: with several classes the cross-entropy stays that of a
    softmax.

    Args:
        include_background, to_onehot_y, sigmoid, softmax, squared_pred, jaccard, smooth_nr, smooth_dr: as in MONAI.
        batch, weight, lambda_dice, lambda_ce, label_smoothing: as in MONAI.
        other_act: not supported; leave it None.
        reduction: "mean" or "sum".
        ignore_index: as in ``DiceLoss``, for both parts; MONAI's ``DiceCELoss`` has no such argument.

    Target, errors and source are those of ``DiceLoss``.

    Kept for backward: as in ``DiceLoss``.  With 118 classes in half precision MONAI's loss peaks at nine times the
    bytes of the logits, and this one at their gradient.
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
        weight: Tensor | None = None,
        lambda_dice: float = 1.0,
        lambda_ce: float = 1.0,
        label_smoothing: float = 0.0,
        *,
        ignore_index: int | None = None,
    ) -> None:
        name = "fusedseg.DiceCELoss"
        super().__init__(reduction=checked_reduction(name, reduction, "mean", "sum"))
        check_not_negative(name, lambda_dice=lambda_dice, lambda_ce=lambda_ce)
        InputForm(name, include_background, to_onehot_y, sigmoid, softmax).check(other_act)
        self.dice = DiceLoss(
            include_background, to_onehot_y, sigmoid, softmax, None, squared_pred, jaccard, self.reduction,
            smooth_nr=smooth_nr, smooth_dr=smooth_dr, batch=batch, ignore_index=ignore_index,
            weight=class_weight(name, weight if weight is None or include_background else weight[1:]),
        )  # fmt: skip
        self.dice.form = self.dice.form._replace(name=name)
        self.register_buffer("weight", weight)
        self.weight: Tensor | None
        self.lambda_dice, self.lambda_ce, self.label_smoothing = lambda_dice, lambda_ce, label_smoothing

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        given, spec = self.dice.form.call(input, target)
        entropy = CrossEntropy(self.weight, self.label_smoothing, self.reduction)
        likelihood = "sigmoid" if input.shape[1] == 1 else entropy.likelihood()
        probability = spec.probability if self.lambda_dice else "none"
        found = sums(given, spec.using(probability, likelihood if self.lambda_ce else "none"))
        loss = found.new_zeros(())
        if self.lambda_dice:
            loss = loss + self.lambda_dice * self.dice.value(found, input.dim())
        if self.lambda_ce:
            loss = loss + self.lambda_ce * self._entropy(found, entropy, given, spec)
        return loss

    def _entropy(self, found: Tensor, entropy: CrossEntropy, given: SumsInputs, spec: SumsSpec) -> Tensor:
        positions = positions_of(given.logits) if given.mask is None else given.mask.sum()
        if given.logits.shape[1] == 1:
            total = binary_total(found, self.weight)
            return total if self.reduction == "sum" else total / positions
        return entropy.value(found, positions if spec.dense else None)


def class_weight(name: str, weight: Sequence[float] | float | Tensor | None) -> Tensor | None:
    """The weights of classes as a tensor; ``name`` is the loss for the error."""
    found = None if weight is None else torch.as_tensor(weight)
    if found is not None and found.min() < 0:
        raise ValueError(f"{name}: weight must not be negative, got {found.tolist()}")
    return found


def checked_reduction(name: str, reduction: str, *choices: str) -> str:
    """The reduction as a text; MONAI also takes an enumeration."""
    found = str(getattr(reduction, "value", reduction))
    check_choice(name, "reduction", found, choices)
    return found


def check_not_negative(name: str, **factors: float) -> None:
    for key, value in factors.items():
        if value < 0:
            raise ValueError(f"{name}: {key} must be at least 0, got {value}")
