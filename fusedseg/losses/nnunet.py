"""The losses of nnU-Net (``nnunetv2.training.loss``), with their names and arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from ..ops.check import check_choice
from ..ops.norm.sync import gather
from ..ops.segmentation.conv_logits import Logits
from ..ops.segmentation.positions import cross_entropy
from ..ops.segmentation.spec import TARGET, SumsInputs, SumsSpec
from ..ops.segmentation.sums import sums
from .cross_entropy import CrossEntropy, binary_total, check_reduction, positions_of

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


def _check_keys(op: str, name: str, given: Mapping[str, Any], *keys: str) -> None:
    unknown = sorted(set(given) - set(keys))
    if unknown:
        raise TypeError(f"{op}: {name} may have {', '.join(keys)}, got {', '.join(unknown)}")


class SoftDice(NamedTuple):
    """The arguments of nnU-Net's ``SoftDiceLoss`` and ``MemoryEfficientSoftDiceLoss``, which agree in value."""

    batch_dice: bool = False
    do_bg: bool = True
    smooth: float = 1.0
    ddp: bool = True
    clip_tp: float | None = None

    @classmethod
    def parse(cls, op: str, options: Mapping[str, Any], dice_class: type | None) -> "SoftDice":
        _check_keys(op, "soft_dice_kwargs", options, *cls._fields)
        if dice_class is not None:
            check_choice(op, "dice_class", dice_class.__name__, DICE_CLASSES)
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
        given = SumsInputs(net_output, target)
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
            return entropy.value(found, None)
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
        _check_keys(self.name, "bce_kwargs", bce_kwargs, "pos_weight", "reduction")
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
        found = sums(SumsInputs(net_output, target, mask), SumsSpec("sigmoid", "sigmoid", dense=True))
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


class TopKLoss(nn.Module):
    """Mean cross-entropy of the k per cent of all positions where it is largest.

    Equals ``nnunetv2.training.loss.robust_ce_loss.TopKLoss`` with the same arguments, in value and gradient; where
    several positions share the smallest value that counts, it may choose other ones.

    Args:
        weight, ignore_index, label_smoothing: as in ``nn.CrossEntropyLoss``.
        k: per cent of the positions of the whole batch.

    An ignored position has the value 0, and is one of all positions, as in nnU-Net.

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
            SumsInputs(inp, target, self._hardest(inp, target, count)),
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
        _check_keys(self.name, "ce_kwargs", ce_kwargs, "weight", "ignore_index", "k", "label_smoothing")
        ignored = {} if ignore_label is None else {"ignore_index": ignore_label}
        self.top_k = TopKLoss(**{**ce_kwargs, **ignored})
        self.weight_ce, self.weight_dice, self.ignore_label = weight_ce, weight_dice, ignore_label

    def forward(self, net_output: Logits, target: Tensor) -> Tensor:
        loss = torch.zeros((), device=net_output.device)
        # With an ignore label, nnU-Net leaves the cross-entropy out where no position counts.
        if self.weight_ce != 0 and (self.ignore_label is None or positions_of(net_output)):
            loss = loss + self.weight_ce * self.top_k(net_output, target)
        if self.weight_dice != 0:
            found = sums(SumsInputs(net_output, target), SumsSpec("softmax", "none", self.ignore_label))
            loss = loss + self.weight_dice * self.dice.loss(found)
        return loss


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
