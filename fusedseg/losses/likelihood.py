"""Cross-entropies as functions of the sums of ``fusedseg.functional.segmentation_sums``."""

import math
from typing import NamedTuple

from torch import Tensor

from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.spec import NLL, OTHER_NLL, TARGET


class CrossEntropy(NamedTuple):
    """A softmax cross-entropy, with the arguments of ``nn.CrossEntropyLoss``."""

    weight: Tensor | None = None
    smoothing: float = 0.0
    reduction: str = "mean"

    def likelihood(self) -> str:
        """The likelihood of the sums that it needs."""
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

    def of_labels(self, sums: Tensor) -> Tensor:
        """For labels: the mean divides by the weights of the labels."""
        return self.total(sums, 1 if self.reduction == "sum" else self.weights(sums))

    def of_probabilities(self, sums: Tensor, positions: Tensor | int) -> Tensor:
        """For a target with a channel for each class: the mean divides by the number of positions."""
        return self.total(sums, 1 if self.reduction == "sum" else positions)

    def weights(self, sums: Tensor) -> Tensor:
        """The sum of the weights of the labels at all positions that are not ignored."""
        return self._weighted(sums[TARGET])

    def _weighted(self, per_class: Tensor) -> Tensor:
        return (per_class if self.weight is None else per_class * self.weight.to(per_class)).sum()


def binary_total(sums: Tensor, pos_weight: Tensor | None) -> Tensor:
    """The sum of ``F.binary_cross_entropy_with_logits`` over all elements; ``pos_weight`` has 1 or K values."""
    nll = sums[NLL] if pos_weight is None else sums[NLL] * pos_weight.flatten().to(sums)
    return (nll + sums[OTHER_NLL]).sum()


def positions_of(logits: Logits) -> int:
    """The number of positions of all samples."""
    return logits.shape[0] * math.prod(logits.shape[2:])
