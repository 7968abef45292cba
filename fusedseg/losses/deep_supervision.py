"""A loss of several outputs of one network."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class DeepSupervision(nn.Module):
    """The weighted sum of a loss over several outputs, as networks with deep supervision return them.

    Equals ``DeepSupervisionWrapper`` of nnU-Net: ``sum(w * loss(output, target) for each w, output, target)``, without
    the outputs whose weight is 0.

    Args:
        loss: a function of an output and a target, such as another loss of ``fusedseg.losses``.
        weights: one number for each output; None stands for 1 everywhere.

    Its forward takes the list of outputs and the list of targets, of equal length.

    Raises:
        ValueError: all weights are 0; the lists differ in length, or are no lists.
    """

    def __init__(self, loss: Callable[..., Tensor], weights: Sequence[float] | None = None) -> None:
        super().__init__()
        self.loss = loss
        self.weights = None if weights is None else tuple(float(w) for w in weights)
        if self.weights is not None and not any(self.weights):
            raise ValueError(f"fusedseg.losses.DeepSupervision: a weight must differ from 0, got {self.weights}")

    def forward(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        weights = (1.0,) * len(outputs) if self.weights is None else self.weights
        lists = isinstance(outputs, (list, tuple)) and isinstance(targets, (list, tuple))
        if not lists or not len(outputs) == len(targets) == len(weights):
            raise ValueError(
                "fusedseg.losses.DeepSupervision: outputs and targets must be lists with one entry per weight "
                f"({len(weights)}), got {type(outputs).__name__} of {len(outputs)} and {type(targets).__name__} of "
                f"{len(targets)}"
            )
        pairs = zip(outputs, targets, strict=True)
        losses = [w * self.loss(*pair) for w, pair in zip(weights, pairs, strict=True) if w]
        return sum(losses[1:], losses[0])
