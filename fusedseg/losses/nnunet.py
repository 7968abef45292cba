"""The losses of nnU-Net (``nnunetv2.training.loss.compound_losses``), with their names and arguments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ..ops.norm.sync import gather
from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.op import sums
from ..ops.segmentation.spec import TARGET, Given, SumsSpec
from .cross_entropy import check_reduction
from .likelihood import CrossEntropy, binary_total

DICE_CLASSES = ("SoftDiceLoss", "MemoryEfficientSoftDiceLoss")


class _SumOfProcesses(torch.autograd.Function):
    """The sum of a tensor over all processes, in the order of the ranks; so is its gradient."""

    @staticmethod
    def forward(ctx, t):
        world = distributed.group.WORLD
        assert world is not None
        ctx.group = world.group_name
        return gather(t, ctx.group).sum(0)

    @staticmethod
    def backward(ctx, dt):
        return gather(dt.contiguous(), ctx.group).sum(0)


class SoftDice(NamedTuple):
    """The arguments of nnU-Net's ``SoftDiceLoss`` and ``MemoryEfficientSoftDiceLoss``, which agree in value."""

    batch_dice: bool = False
    do_bg: bool = True
    smooth: float = 1.0
    ddp: bool = True
    clip_tp: float | None = None

    @classmethod
    def parse(cls, op: str, options: Mapping[str, Any], dice_class: type | None) -> "SoftDice":
        unknown = sorted(set(options) - set(cls._fields))
        if unknown:
            raise TypeError(f"{op}: soft_dice_kwargs may have {', '.join(cls._fields)}, got {', '.join(unknown)}")
        if dice_class is not None and dice_class.__name__ not in DICE_CLASSES:
            raise ValueError(f"{op}: dice_class must be one of {', '.join(DICE_CLASSES)}, got {dice_class.__name__}")
        return cls(**options)

    def loss(self, found: Tensor) -> Tensor:
        """Minus the mean of the Dice coefficients."""
        dice = found[: TARGET + 1, :, 0 if self.do_bg else 1 :]
        if self.batch_dice:
            dice = dice.sum(1)
            if self.ddp and distributed.is_available() and distributed.is_initialized():
                dice = _SumOfProcesses.apply(dice)
        overlap, prediction, target = dice
        area = target + prediction
        if self.clip_tp is not None:
            clipped = overlap.clamp_min(self.clip_tp)
            overlap, area = clipped, area + 2 * (clipped - overlap)
        return -((2 * overlap + self.smooth) / (area + float(self.smooth)).clamp_min(1e-8)).mean()


class DC_and_CE_loss(nn.Module):
    """Soft Dice and cross-entropy of logits (N, K, *spatial) and labels (N, 1, *spatial), as in nnU-Net.

    Equals ``nnunetv2.training.loss.compound_losses.DC_and_CE_loss`` with the same arguments, in value and gradient:
    ``weight_ce * cross_entropy - weight_dice * dice``.  nnU-Net's losses keep six times the bytes of the logits for
    backward in half precision, and peak at nine times; this one keeps nothing and peaks at their gradient.

    Args:
        soft_dice_kwargs: batch_dice, do_bg, smooth, ddp and clip_tp, as in ``SoftDiceLoss``.  With batch_dice and ddp,
            the sums of all processes of the default process group are added; without a process group there is one
            process.
        ce_kwargs: weight, ignore_index, reduction ("mean" or "sum") and label_smoothing, as in ``nn.CrossEntropyLoss``.
        weight_ce, weight_dice: the weights of both parts.
        ignore_label: positions with this label count in neither part.
        dice_class: None, ``SoftDiceLoss`` or ``MemoryEfficientSoftDiceLoss``, which agree in value.

    If all positions are ignored, the cross-entropy is 0, as in nnU-Net, but the host does not wait for the device.
    Labels may have any integer or floating dtype.

    Kept for backward: the logits and the labels, which the caller has anyway.

    Raises:
        TypeError: an unknown key in ``soft_dice_kwargs`` or ``ce_kwargs``.
        ValueError: another ``dice_class``; a reduction "none"; a shape is wrong.
    """

    name = "fusedseg.losses.DC_and_CE_loss"

    def __init__(
        self,
        soft_dice_kwargs: Mapping[str, Any],
        ce_kwargs: Mapping[str, Any],
        weight_ce: float = 1,
        weight_dice: float = 1,
        ignore_label: int | None = None,
        dice_class: type | None = None,
    ) -> None:
        super().__init__()
        self.dice = SoftDice.parse(self.name, soft_dice_kwargs, dice_class)
        stock = nn.CrossEntropyLoss(**ce_kwargs)
        check_reduction(self.name, stock.reduction, "torch.nn.CrossEntropyLoss")
        self.register_buffer("ce_weight", stock.weight, persistent=False)
        self.ce_weight: Tensor | None
        self.entropy = CrossEntropy(None, stock.label_smoothing, stock.reduction)
        # The label that only the cross-entropy ignores.
        self.ce_ignore = stock.ignore_index if ignore_label is None else -100
        self.weight_ce, self.weight_dice, self.ignore_label = weight_ce, weight_dice, ignore_label

    def forward(self, net_output: Logits, target: Tensor) -> Tensor:
        given = Given(net_output, target)
        entropy = CrossEntropy(self.ce_weight, self.entropy.smoothing, self.entropy.reduction)
        probability = "softmax" if self.weight_dice != 0 else "none"
        likelihood = entropy.likelihood() if self.weight_ce != 0 else "none"
        apart = self.ce_ignore != -100 and self.weight_ce != 0
        found = sums(given, SumsSpec(probability, "none" if apart else likelihood, self.ignore_label))
        of_entropy = sums(given, SumsSpec("none", likelihood, self.ce_ignore)) if apart else found
        loss = found.new_zeros(())
        if self.weight_ce != 0:
            loss = loss + self.weight_ce * self._entropy(of_entropy, entropy)
        if self.weight_dice != 0:
            loss = loss + self.weight_dice * self.dice.loss(found)
        return loss

    def _entropy(self, found: Tensor, entropy: CrossEntropy) -> Tensor:
        if self.ignore_label is None:
            return entropy.of_labels(found)
        # Where all positions are ignored, nnU-Net leaves the cross-entropy out.
        if entropy.reduction == "sum":
            return entropy.total(found)
        some = found[TARGET].sum() > 0
        return torch.where(some, entropy.total(found, torch.where(some, entropy.weights(found), 1.0)), 0.0)


class DC_and_BCE_loss(nn.Module):
    """Soft Dice and binary cross-entropy of regions, as in nnU-Net.

    Equals ``nnunetv2.training.loss.compound_losses.DC_and_BCE_loss`` with the same arguments, in value and gradient.
    Logits are (N, K, *spatial); the target has a channel for each region, bool, integer or floating point, and with
    ``use_ignore_label`` one more, which is true where a position is ignored.

    Args:
        bce_kwargs: pos_weight, with one value or with one value per region, and reduction ("mean" or "sum"), as in
            ``nn.BCEWithLogitsLoss``.
        soft_dice_kwargs, weight_ce, weight_dice, dice_class: as in ``DC_and_CE_loss``.
        use_ignore_label: whether the last channel of the target says which positions are ignored.

    As in nnU-Net, the binary cross-entropy with an ignore label is the sum over all regions, divided by the number of
    positions that are not ignored; without an ignore label it is the mean over positions and regions.

    Kept for backward: the logits, the target, and with an ignore label one byte per position.

    Raises:
        TypeError: an unknown key in ``soft_dice_kwargs`` or ``bce_kwargs``.
        ValueError: another ``dice_class``; a reduction "none"; a shape is wrong.
    """

    name = "fusedseg.losses.DC_and_BCE_loss"

    def __init__(
        self,
        bce_kwargs: Mapping[str, Any],
        soft_dice_kwargs: Mapping[str, Any],
        weight_ce: float = 1,
        weight_dice: float = 1,
        use_ignore_label: bool = False,
        dice_class: type | None = None,
    ) -> None:
        super().__init__()
        self.dice = SoftDice.parse(self.name, soft_dice_kwargs, dice_class)
        unknown = sorted(set(bce_kwargs) - {"pos_weight", "reduction"})
        if unknown:
            raise TypeError(f"{self.name}: bce_kwargs may have pos_weight and reduction, got {', '.join(unknown)}")
        self.reduction = bce_kwargs.get("reduction", "mean")
        if not use_ignore_label:
            check_reduction(self.name, self.reduction, "torch.nn.BCEWithLogitsLoss")
        self.register_buffer("pos_weight", bce_kwargs.get("pos_weight"), persistent=False)
        self.pos_weight: Tensor | None
        self.weight_ce, self.weight_dice, self.use_ignore_label = weight_ce, weight_dice, use_ignore_label

    def forward(self, net_output: Logits, target: Tensor) -> Tensor:
        mask = None
        if self.use_ignore_label:
            ignored = target[:, -1:]
            mask, target = (~ignored if ignored.dtype == torch.bool else (1 - ignored).bool()), target[:, :-1]
        self._check_pos_weight(net_output)
        found = sums(Given(net_output, target, mask), SumsSpec("sigmoid", "sigmoid", dense=True))
        entropy = binary_total(found, self.pos_weight)
        if mask is not None:
            entropy = entropy / mask.sum().clamp_min(1e-8)
        elif self.reduction == "mean":
            entropy = entropy / net_output.numel()
        return self.weight_ce * entropy + self.weight_dice * self.dice.loss(found)

    def _check_pos_weight(self, logits: Logits) -> None:
        """Stock PyTorch broadcasts pos_weight against the logits; here it may differ between regions only."""
        if self.pos_weight is None or self.pos_weight.numel() == 1:
            return
        K, dims = logits.shape[1], logits.dim() - 2
        if self.pos_weight.shape not in ((K, *(1,) * dims), (1, K, *(1,) * dims)):
            raise ValueError(
                f"{self.name}: pos_weight must have one value, or shape {(K, *(1,) * dims)} with one value per region, "
                f"got {tuple(self.pos_weight.shape)}"
            )
