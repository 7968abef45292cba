"""The Dice and Tversky losses of segmentation_models_pytorch, with their arguments."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.loss import _Loss

from ..ops.check import check_choice
from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.spec import TARGET, SumsInputs, SumsSpec
from ..ops.segmentation.sums import sums

MODES = ("binary", "multiclass", "multilabel")


def _as_tensor(values: Sequence[float] | Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else torch.as_tensor(values).to(dtype)


class SMPDiceLoss(_Loss):
    """Dice loss of a whole batch that keeps nothing but the logits for backward.

    Equals ``segmentation_models_pytorch.losses.DiceLoss`` with the same arguments, in value and gradient.

    Args:
        mode: "binary", "multiclass" or "multilabel".
        classes: the classes that count, or None for all.
        log_loss: -log(dice) instead of 1 - dice.
        from_logits: False takes the input as probabilities, which must not be negative.
        smooth, eps: dice is (tp + smooth) / max(tp + fp / 2 + fn / 2 + smooth, eps).
        ignore_index: the target value that is ignored; in a target with channels, only that element is.
        class_weights: one weight for each class.

    Its forward takes logits (N, K, *spatial) and labels (N, *spatial) of any integer dtype ("multiclass"), or a target
    of the shape of the logits ("multilabel"); for "binary", logits and target have N values per position.  Classes that
    the batch does not contain have loss 0.

    Kept for backward: the logits and the target, which the caller has anyway.  The original keeps six times the bytes
    of the logits in half precision, and peaks at twelve times; this loss peaks at their gradient.

    Raises:
        ValueError: the mode is unknown; class_weights or classes are given for "binary"; a shape is wrong.
    """

    name = "fusedseg.losses.SMPDiceLoss"
    # The weights of false positives and false negatives, and the power of the loss.
    alpha, beta, gamma = 0.5, 0.5, 1.0

    def __init__(
        self,
        mode: str,
        classes: Sequence[int] | None = None,
        log_loss: bool = False,
        from_logits: bool = True,
        smooth: float = 0.0,
        ignore_index: int | None = None,
        eps: float = 1e-7,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_choice(self.name, "mode", mode, MODES)
        if mode == "binary" and (classes is not None or class_weights is not None):
            raise ValueError(f"{self.name}: classes and class_weights must be None for mode binary")
        self.mode, self.log_loss, self.from_logits = mode, log_loss, from_logits
        self.smooth, self.eps, self.ignore_index = smooth, eps, ignore_index
        self.register_buffer("classes", _as_tensor(classes, torch.long), persistent=False)
        self.register_buffer("class_weights", _as_tensor(class_weights, torch.float), persistent=False)
        self.classes: Tensor | None
        self.class_weights: Tensor | None

    def forward(self, y_pred: Logits, y_true: Tensor) -> Tensor:
        tp, prediction, target = self._sums(y_pred, y_true)
        area = tp + self.alpha * (prediction - tp) + self.beta * (target - tp) + self.smooth
        score = (tp + self.smooth) / area.clamp_min(self.eps)
        loss = -torch.log(score.clamp_min(self.eps)) if self.log_loss else 1 - score
        # Dice of a class that is not there is undefined.
        loss = loss * (target > 0).to(loss.dtype)
        weights = self.class_weights
        if self.classes is not None:
            loss, weights = loss[self.classes], None if weights is None else weights[self.classes]
        mean = loss.mean() if weights is None else (loss * weights).sum() / weights.sum()
        return mean if self.gamma == 1 else mean**self.gamma

    def _sums(self, x: Logits, target: Tensor) -> Tensor:
        """Overlap, prediction and target of the whole batch, (3, K)."""
        if self.mode == "binary":
            if isinstance(x, Tensor):
                x = x.reshape(x.shape[0], 1, -1)
            target = target.reshape(x.shape)
        dense = self.mode != "multiclass"
        function = "identity" if not self.from_logits else "sigmoid" if dense else "softmax"
        # The product of two truth values or labels is their minimum.
        minimum = dense and target.is_floating_point()
        spec = SumsSpec(function, "none", self.ignore_index, minimum=minimum, dense=dense)
        return sums(SumsInputs(x, target), spec)[: TARGET + 1].sum(1)


class SMPTverskyLoss(SMPDiceLoss):
    """Tversky loss of a whole batch that keeps nothing but the logits for backward.

    Equals ``segmentation_models_pytorch.losses.TverskyLoss`` with the same arguments: false positives have the weight
    ``alpha``, false negatives the weight ``beta``, and the loss is raised to the power of ``gamma``.  ``SMPDiceLoss``
    describes all other arguments, what is kept, and the errors.
    """

    name = "fusedseg.losses.SMPTverskyLoss"

    def __init__(
        self,
        mode: str,
        classes: Sequence[int] | None = None,
        log_loss: bool = False,
        from_logits: bool = True,
        smooth: float = 0.0,
        ignore_index: int | None = None,
        eps: float = 1e-7,
        alpha: float = 0.5,
        beta: float = 0.5,
        gamma: float = 1.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        super().__init__(
            mode, classes, log_loss, from_logits, smooth, ignore_index, eps=eps, class_weights=class_weights
        )
        self.alpha, self.beta, self.gamma = alpha, beta, gamma
