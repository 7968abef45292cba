"""nnU-Net's losses as the losses of this package that equal them."""

from typing import Any

import torch
from torch import nn

from ...losses import DC_and_BCE_loss, DC_and_CE_loss, DeepSupervision

OF_CROSS_ENTROPY = ("weight", "ignore_index", "reduction", "label_smoothing")
OF_DICE = ("batch_dice", "do_bg", "smooth", "ddp", "clip_tp")


class UnknownLoss(ValueError):
    """Raised if this package has no equal of a loss."""


def fused_loss(loss: Any) -> nn.Module:
    """Returns the loss of this package that equals a loss of nnU-Net, in value and gradient.

    Args:
        loss: ``DC_and_CE_loss`` or ``DC_and_BCE_loss`` of nnunetv2, or a ``DeepSupervisionWrapper`` of one, as a
            trainer's ``_build_loss`` returns it; its Dice may be compiled.

    Raises:
        UnknownLoss: another class, another class of Dice or cross-entropy inside, or another activation.
    """
    # The classes are found by module and name, so that this function needs no import of nnunetv2.
    kind = _name_of(loss)
    if kind == "nnunetv2.training.loss.deep_supervision.DeepSupervisionWrapper":
        return DeepSupervision(fused_loss(loss.loss), loss.weight_factors)
    if kind == "nnunetv2.training.loss.compound_losses.DC_and_CE_loss":
        entropy: Any = _part(loss.ce, "nnunetv2.training.loss.robust_ce_loss.RobustCrossEntropyLoss")
        options = {name: getattr(entropy, name) for name in OF_CROSS_ENTROPY}
        if loss.ignore_label is not None:
            # nnU-Net passes its ignore label on to the cross-entropy.
            options["ignore_index"] = -100
        dice, made = _dice(loss.dc, "softmax_helper_dim1")
        return DC_and_CE_loss(
            dice, options, loss.weight_ce, loss.weight_dice, ignore_label=loss.ignore_label, dice_class=made
        )
    if kind == "nnunetv2.training.loss.compound_losses.DC_and_BCE_loss":
        entropy = _part(loss.ce, "torch.nn.modules.loss.BCEWithLogitsLoss")
        if entropy.weight is not None:
            raise UnknownLoss("a binary cross-entropy with a weight for each element")
        options = {"pos_weight": entropy.pos_weight, "reduction": entropy.reduction}
        dice, made = _dice(loss.dc, "sigmoid")
        return DC_and_BCE_loss(
            options, dice, loss.weight_ce, loss.weight_dice, use_ignore_label=loss.use_ignore_label, dice_class=made
        )
    raise UnknownLoss(f"a loss of class {type(loss).__name__}")


def _name_of(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _part(module: Any, expected: str) -> Any:
    if _name_of(module) != expected:
        raise UnknownLoss(f"a part of class {type(module).__name__}")
    return module


def _dice(dice: Any, activation: str) -> tuple[dict[str, Any], type]:
    """The options of a soft Dice loss, and its class."""
    dice = getattr(dice, "_orig_mod", dice) if isinstance(dice, torch._dynamo.OptimizedModule) else dice
    if type(dice).__module__ != "nnunetv2.training.loss.dice":
        raise UnknownLoss(f"a Dice of class {type(dice).__name__}")
    if getattr(dice.apply_nonlin, "__name__", "") != activation:
        raise UnknownLoss(f"a Dice with the activation {dice.apply_nonlin!r}")
    return {name: getattr(dice, name) for name in OF_DICE if hasattr(dice, name)}, type(dice)
