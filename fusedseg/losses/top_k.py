"""The losses of nnU-Net that count the hardest positions only, with their names and arguments."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.op import sums
from ..ops.segmentation.positions import cross_entropy
from ..ops.segmentation.spec import Given, SumsSpec
from .likelihood import CrossEntropy, positions_of
from .nnunet import SoftDice


class TopKLoss(nn.Module):
    """Mean cross-entropy of the k per cent of all positions where it is largest.

    Equals ``nnunetv2.training.loss.robust_ce_loss.TopKLoss`` with the same arguments, in value and gradient; where
    several positions share the smallest value that counts, it may choose other ones.

    Args:
        weight, ignore_index, label_smoothing: as in ``nn.CrossEntropyLoss``; an ignored position has the value 0, and
            is one of all positions, as in nnU-Net.
        k: per cent of the positions of the whole batch.

    Its forward takes logits (N, K, *spatial) and labels (N, 1, *spatial) of any integer or floating dtype.

    One pass without a gradient gives one value per position, from which the positions are chosen; a second pass
    computes the loss of these.

    Kept for backward: the logits and the labels, which the caller has anyway, and one byte for each position.

    Raises:
        ValueError: k leaves no position, or is above 100; a shape is wrong.
        RuntimeError: backward itself is differentiated.
    """

    name = "fusedseg.losses.TopKLoss"

    def __init__(
        self, weight: Tensor | None = None, ignore_index: int = -100, k: float = 10, label_smoothing: float = 0
    ) -> None:
        super().__init__()
        if not 0 < k <= 100:
            raise ValueError(f"{self.name}: k must be above 0 and at most 100 per cent, got {k}")
        self.register_buffer("weight", weight, persistent=False)
        self.weight: Tensor | None
        self.ignore_index, self.k, self.label_smoothing = ignore_index, k, label_smoothing

    def forward(self, inp: Logits, target: Tensor) -> Tensor:
        count = int(positions_of(inp) * self.k / 100)
        # The mean of an empty batch is NaN, as in nnU-Net.
        if not count and positions_of(inp):
            raise ValueError(f"{self.name}: k must leave at least one of {positions_of(inp)} positions, got {self.k}")
        entropy = CrossEntropy(self.weight, self.label_smoothing, "sum")
        found = sums(
            Given(inp, target, self._hardest(inp, target, count)),
            SumsSpec("none", entropy.likelihood(), self.ignore_index),
        )
        return entropy.total(found) / count

    def _hardest(self, inp: Logits, target: Tensor, count: int) -> Tensor:
        """Whether a position counts, (N, *spatial)."""
        weight = self.weight
        if weight is not None:
            weight = weight.to(inp.device, torch.float64 if inp.dtype == torch.float64 else torch.float32)
        options = {"weight": weight, "ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        values = cross_entropy(inp, target, options)
        chosen = torch.zeros(values.numel(), dtype=torch.bool, device=values.device)
        chosen[torch.topk(values.flatten(), count, sorted=False).indices] = True
        return chosen.view(inp.shape[0], *inp.shape[2:])


class DC_and_topk_loss(nn.Module):
    """Soft Dice, and the cross-entropy of the hardest positions, as in nnU-Net.

    Equals ``nnunetv2.training.loss.compound_losses.DC_and_topk_loss`` with the same arguments, in value and gradient:
    ``weight_ce * top_k - weight_dice * dice``.

    Args:
        soft_dice_kwargs: batch_dice, do_bg, smooth, ddp and clip_tp, as in ``DC_and_CE_loss``.
        ce_kwargs: the arguments of ``TopKLoss``.
        weight_ce, weight_dice: the weights of both parts.
        ignore_label: positions with this label count in neither part.

    The two parts read the logits in passes of their own, so that backward holds a gradient of each before it adds them:
    the peak is twice the logits, and one value per position.

    Kept for backward: the logits and the labels, which the caller has anyway, and one byte for each position.

    Raises:
        TypeError: an unknown key in ``soft_dice_kwargs`` or ``ce_kwargs``.
        ValueError: as in ``TopKLoss``.
    """

    name = "fusedseg.losses.DC_and_topk_loss"

    def __init__(
        self,
        soft_dice_kwargs: Mapping[str, Any],
        ce_kwargs: Mapping[str, Any],
        weight_ce: float = 1,
        weight_dice: float = 1,
        ignore_label: int | None = None,
    ) -> None:
        super().__init__()
        self.dice = SoftDice.parse(self.name, soft_dice_kwargs, None)
        unknown = sorted(set(ce_kwargs) - {"weight", "ignore_index", "k", "label_smoothing"})
        if unknown:
            raise TypeError(
                f"{self.name}: ce_kwargs may have weight, ignore_index, k and label_smoothing, got {', '.join(unknown)}"
            )
        ignored = {} if ignore_label is None else {"ignore_index": ignore_label}
        self.top_k = TopKLoss(**{**ce_kwargs, **ignored})
        self.weight_ce, self.weight_dice, self.ignore_label = weight_ce, weight_dice, ignore_label

    def forward(self, net_output: Logits, target: Tensor) -> Tensor:
        loss = torch.zeros((), device=net_output.device)
        # With an ignore label, nnU-Net leaves the cross-entropy out where no position counts.
        if self.weight_ce != 0 and (self.ignore_label is None or positions_of(net_output)):
            loss = loss + self.weight_ce * self.top_k(net_output, target)
        if self.weight_dice != 0:
            found = sums(Given(net_output, target), SumsSpec("softmax", "none", self.ignore_label))
            loss = loss + self.weight_dice * self.dice.loss(found)
        return loss
