"""``CrossEntropyLoss`` that keeps nothing but the logits, and cross-entropies as functions of the sums of logits."""

import math
from typing import NamedTuple

from torch import Tensor, nn

from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.spec import NLL, OTHER_NLL, TARGET, SumsInputs, SumsSpec
from ..ops.segmentation.sums import sums

OP = "fusedseg.CrossEntropyLoss"


class CrossEntropy(NamedTuple):
    """A softmax cross-entropy, with the arguments of ``nn.CrossEntropyLoss``."""

    weight: Tensor | None = None
    smoothing: float = 0.0
    reduction: str = "mean"

    def likelihood(self) -> str:
        """The likelihood of the sums that it needs.  Raises ValueError for a smoothing that is no probability."""
        if not 0 <= self.smoothing <= 1:
            raise ValueError(f"fusedseg.losses: label_smoothing must be from 0 to 1, got {self.smoothing}")
        return "smoothed" if self.smoothing else "softmax"

    def total(self, sums: Tensor, divisor: Tensor | int = 1) -> Tensor:
        """The sum over all positions, divided by ``divisor``.

        Each term is divided for itself, as in PyTorch: with a divisor of 0 their sum may be NaN instead of infinite.
        """
        total = self._weighted(sums[NLL]) / divisor
        if self.smoothing:
            others = self._weighted(sums[OTHER_NLL]) / divisor
            total = (1 - self.smoothing) * total + self.smoothing / sums.shape[2] * others
        return total

    def value(self, sums: Tensor, positions: Tensor | int | None) -> Tensor:
        """The mean divides by the number of positions, or for labels, which have None, by their weights."""
        if self.reduction == "sum":
            return self.total(sums)
        return self.total(sums, self.weights(sums) if positions is None else positions)

    def weights(self, sums: Tensor) -> Tensor:
        """The sum of the weights of the labels at all positions that are not ignored."""
        return self._weighted(sums[TARGET])

    def _weighted(self, per_class: Tensor) -> Tensor:
        if self.weight is not None:
            _check_weight("weight", self.weight, per_class, self.weight.shape == per_class.shape[-1:])
        return (per_class if self.weight is None else per_class * self.weight.to(per_class)).sum()


def _check_weight(name: str, weight: Tensor, per_class: Tensor, fits: bool) -> None:
    """Raises ValueError unless the weight fits; PyTorch would broadcast a single value, or all classes."""
    if not fits:
        K = per_class.shape[-1]
        raise ValueError(
            f"fusedseg.losses: {name} must have {K} values, one for each class, got shape {tuple(weight.shape)}"
        )


def binary_total(sums: Tensor, pos_weight: Tensor | None) -> Tensor:
    """The sum of ``F.binary_cross_entropy_with_logits`` over all elements; ``pos_weight`` has 1 or K values."""
    if pos_weight is not None:
        _check_weight("pos_weight", pos_weight, sums, pos_weight.numel() in (1, sums.shape[2]))
    nll = sums[NLL] if pos_weight is None else sums[NLL] * pos_weight.flatten().to(sums)
    return (nll + sums[OTHER_NLL]).sum()


def positions_of(logits: Logits) -> int:
    """The number of positions of all samples."""
    return logits.shape[0] * math.prod(logits.shape[2:])


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """Cross-entropy of logits (N, K, *spatial) that keeps nothing but the logits for backward.

    Equals ``nn.CrossEntropyLoss`` with the same arguments for labels (N, *spatial) and for class probabilities
    (N, K, *spatial).  Labels may also have shape (N, 1, *spatial), and any integer or floating dtype; they are never
    widened to int64.

    Args:
        weight, ignore_index, label_smoothing: as in ``nn.CrossEntropyLoss``.
        size_average, reduce: not supported; leave them None.
        reduction: "mean" or "sum".

    Returns:
        The loss, in float64 for float64 logits, otherwise in float32.

    Kept for backward: the logits and the target, which the caller has anyway.  The stock loss keeps as much again as
    the logits, twice that much in half precision under autocast.  The peak falls from 5 times the logits to their
    gradient.

    Raises:
        ValueError: ``reduction`` is "none", which needs a value per position (use ``nn.CrossEntropyLoss``);
            ``ignore_index`` is given with class probabilities; a shape is wrong.
        RuntimeError: backward itself is differentiated.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: None = None,
        ignore_index: int = -100,
        reduce: None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if size_average is not None or reduce is not None:
            raise ValueError(f"{OP}: size_average and reduce must be None; use reduction")
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        check_reduction(OP, reduction, "torch.nn.CrossEntropyLoss")

    def forward(self, input: Logits, target: Tensor) -> Tensor:  # noqa: A002
        entropy = CrossEntropy(self.weight, self.label_smoothing, self.reduction)
        dense = target.shape == input.shape
        if dense and self.ignore_index >= 0:
            raise ValueError(f"{OP}: ignore_index must be < 0 for a target of probabilities, got {self.ignore_index}")
        ignore = None if dense else self.ignore_index
        found = sums(SumsInputs(input, target), SumsSpec("none", entropy.likelihood(), ignore, dense=dense))
        return entropy.value(found, positions_of(input) if dense else None)


def check_reduction(op: str, reduction: str, stock: str) -> None:
    """Raises ValueError unless the loss is one number."""
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"{op}: reduction must be mean or sum, got {reduction!r}; use {stock} for a value per position"
        )
