"""``CrossEntropyLoss`` that keeps nothing but the logits."""

from torch import Tensor, nn

from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.op import sums
from ..ops.segmentation.spec import Given, SumsSpec
from .likelihood import CrossEntropy, positions_of

OP = "fusedseg.CrossEntropyLoss"


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
        found = sums(Given(input, target), SumsSpec("none", entropy.likelihood(), ignore, dense=dense))
        return entropy.of_probabilities(found, positions_of(input)) if dense else entropy.of_labels(found)


def check_reduction(op: str, reduction: str, stock: str) -> None:
    """Raises ValueError unless the loss is one number."""
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"{op}: reduction must be mean or sum, got {reduction!r}; use {stock} for a value per position"
        )
