"""Checks of the arguments of the op."""

import torch
from torch import Tensor

from ..check import check_choice, check_device, check_input, check_tensor, has_values
from .conv_logits import ConvLogits, Logits
from .spec import LIKELIHOODS, OP, PROBABILITIES, SumsInputs, SumsSpec


def check(given: SumsInputs, spec: SumsSpec) -> None:
    """Raises ValueError or TypeError if an argument does not fit."""
    check_choice(OP, "probability", spec.probability, PROBABILITIES)
    check_choice(OP, "likelihood", spec.likelihood, tuple(LIKELIHOODS))
    if spec.hard and spec.likelihood != "none":
        raise ValueError(f"{OP}: likelihood must be none for probability {spec.probability!r}, got {spec.likelihood!r}")
    if spec.gamma and (spec.gamma < 0 or spec.likelihood not in ("softmax", "sigmoid")):
        raise ValueError(
            f"{OP}: gamma must be 0, or above 0 with likelihood softmax or sigmoid, got {spec.gamma} with "
            f"{spec.likelihood!r}"
        )
    if not isinstance(given.logits, ConvLogits):
        check_input(OP, given.logits)
    check_tensor(OP, given.target, "target")
    _check_target(given.logits, given.target, spec.dense)
    if given.mask is not None:
        check_tensor(OP, given.mask, "mask")
        _check_positions("mask", given.logits, given.mask)
        if given.mask.is_complex():
            raise TypeError(f"{OP}: mask must be bool, integer or floating point, got {given.mask.dtype}")
    if spec.ignore is not None and (not isinstance(spec.ignore, int) or isinstance(spec.ignore, bool)):
        raise TypeError(f"{OP}: ignore_index must be an integer or None, got {spec.ignore!r}")


def check_hard(op: str, mask: Tensor | None, ignored: int | None) -> None:
    """Raises ValueError if a position counts in part, because the target is soft in the ignored class.

    ``mask`` is 1 minus the target of the class ``ignored``.  The host waits for the device.
    """
    if mask is None or not mask.is_floating_point():
        return
    if not has_values(mask) or torch.compiler.is_compiling():
        return
    wrong = torch.ne(mask, 0) & torch.ne(mask, 1)
    if wrong.any():
        raise ValueError(
            f"{op}: target must be 0 or 1 in the class {ignored}, which ignore_index names, "
            f"got {1 - mask[wrong][0].item():.4g}; a position cannot be ignored in part"
        )


def _check_target(logits: Logits, target: Tensor, dense: bool) -> None:
    if target.is_complex():
        raise TypeError(f"{OP}: target must be bool, integer or floating point, got {target.dtype}")
    if not dense:
        _check_positions("target", logits, target)
        return
    if target.shape != logits.shape:
        raise ValueError(
            f"{OP}: target must have the shape of logits {tuple(logits.shape)}, or labels without channels, "
            f"got {tuple(target.shape)}"
        )
    check_device(OP, "target", target, logits.device, "logits")


def _check_positions(name: str, logits: Logits, t: Tensor) -> None:
    """Raises an error unless ``t`` has one value per position of the logits."""
    N, _, *spatial = logits.shape
    if t.shape not in ((N, *spatial), (N, 1, *spatial)):
        raise ValueError(
            f"{OP}: {name} must have shape {(N, *spatial)} or {(N, 1, *spatial)}, one value per position of logits "
            f"{tuple(logits.shape)}, got {tuple(t.shape)}"
        )
    check_device(OP, name, t, logits.device, "logits")
