"""nnU-Net's losses as the losses of this package that equal them."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ... import _torch
from ...losses import DC_and_BCE_loss, DC_and_CE_loss, DC_and_topk_loss, DeepSupervision, TopKLoss

# The classes are found by module and name, so that this file needs no import of nnunetv2.
LOSSES = "nnunetv2.training.loss"
OF_CROSS_ENTROPY = ("weight", "ignore_index", "reduction", "label_smoothing")
OF_TOP_K = ("weight", "ignore_index", "k", "label_smoothing")
OF_DICE = ("batch_dice", "do_bg", "smooth", "ddp", "clip_tp")


class UnknownLoss(ValueError):
    """Raised if this package has no equal of a loss."""


def fused_loss(loss: object) -> nn.Module:
    """Returns the loss of this package that equals a loss of nnU-Net, in value and gradient.

    Args:
        loss: ``DC_and_CE_loss``, ``DC_and_BCE_loss``, ``DC_and_topk_loss`` or ``TopKLoss`` of nnunetv2, or a
            ``DeepSupervisionWrapper`` of one, as a trainer's ``_build_loss`` returns it; its Dice may be compiled.

    Raises:
        UnknownLoss: another class, another class of Dice or cross-entropy inside, or another activation.
    """
    make = EQUALS.get(_name_of(loss))
    if make is None:
        raise UnknownLoss(f"a loss of class {type(loss).__name__}")
    return make(loss)


def _dice_and_cross_entropy(loss: Any) -> nn.Module:
    options = _options(_part(loss.ce, f"{LOSSES}.robust_ce_loss.RobustCrossEntropyLoss"), OF_CROSS_ENTROPY)
    if loss.ignore_label is not None:
        # nnU-Net passes its ignore label on to the cross-entropy.
        options["ignore_index"] = -100
    dice, made = _dice(loss.dc, "softmax_helper_dim1")
    return DC_and_CE_loss(
        dice, options, loss.weight_ce, loss.weight_dice, ignore_label=loss.ignore_label, dice_class=made
    )


def _dice_and_top_k(loss: Any) -> nn.Module:
    options = _options(_part(loss.ce, f"{LOSSES}.robust_ce_loss.TopKLoss"), OF_TOP_K)
    dice, _ = _dice(loss.dc, "softmax_helper_dim1")
    return DC_and_topk_loss(dice, options, loss.weight_ce, loss.weight_dice, ignore_label=loss.ignore_label)


def _dice_and_binary_cross_entropy(loss: Any) -> nn.Module:
    entropy = _part(loss.ce, "torch.nn.modules.loss.BCEWithLogitsLoss")
    if entropy.weight is not None:
        raise UnknownLoss("a binary cross-entropy with a weight for each element")
    options = _options(entropy, ("pos_weight", "reduction"))
    dice, made = _dice(loss.dc, "sigmoid")
    return DC_and_BCE_loss(
        options, dice, loss.weight_ce, loss.weight_dice, use_ignore_label=loss.use_ignore_label, dice_class=made
    )


# The name of a class -> a function that makes the equal of an object of this class.
EQUALS: dict[str, Callable[[Any], nn.Module]] = {
    f"{LOSSES}.deep_supervision.DeepSupervisionWrapper": (
        lambda loss: DeepSupervision(fused_loss(loss.loss), loss.weight_factors)
    ),
    f"{LOSSES}.robust_ce_loss.TopKLoss": lambda loss: TopKLoss(**_options(loss, OF_TOP_K)),
    f"{LOSSES}.compound_losses.DC_and_CE_loss": _dice_and_cross_entropy,
    f"{LOSSES}.compound_losses.DC_and_topk_loss": _dice_and_top_k,
    f"{LOSSES}.compound_losses.DC_and_BCE_loss": _dice_and_binary_cross_entropy,
}


def _name_of(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _options(module: object, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names if hasattr(module, name)}


def _part(module: object, expected: str) -> Any:
    if _name_of(module) != expected:
        raise UnknownLoss(f"a part of class {type(module).__name__}")
    return module


def _dice(dice: nn.Module, activation: str) -> tuple[dict[str, Any], type]:
    """The options of a soft Dice loss, and its class."""
    dice = getattr(dice, "_orig_mod", dice) if _torch.is_optimized_module(dice) else dice
    if _name_of(dice) not in (f"{LOSSES}.dice.SoftDiceLoss", f"{LOSSES}.dice.MemoryEfficientSoftDiceLoss"):
        raise UnknownLoss(f"a Dice of class {type(dice).__name__}")
    if getattr(dice.apply_nonlin, "__name__", "") != activation:
        raise UnknownLoss(f"a Dice with the activation {dice.apply_nonlin!r}")
    return _options(dice, OF_DICE), type(dice)
