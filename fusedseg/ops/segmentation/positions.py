"""The cross-entropy of each position, without a gradient: from it a loss chooses the positions that count."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..observer import unwatched
from . import aten, conv_aten
from .checks import check
from .conv_logits import ConvLogits, Logits
from .conv_op import no_autocast
from .op import dense
from .spec import Given, Spec, wide_dtype


@torch.no_grad()
def cross_entropy(logits: Logits, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy(logits, labels, reduction="none", **options)``, (N, S), tile by tile.

    ``labels`` may have any integer or floating dtype, and the shape (N, *spatial) or (N, 1, *spatial).  The result is
    in float64 for float64 logits, otherwise in float32.
    """
    given = Given(logits, labels)
    check(given, Spec("none", "softmax"))
    if torch.compiler.is_compiling():
        # The compiler fuses the stock function into one pass.
        x = logits.formed() if isinstance(logits, ConvLogits) else logits
        values = F.cross_entropy(x, labels.reshape(x.shape[0], *x.shape[2:]).long(), reduction="none", **options)
        return values.flatten(1)
    return _cross_entropy(given, options)


@unwatched
def _cross_entropy(given: Given, options: Mapping[str, Any]) -> Tensor:
    logits = given.logits
    if not logits.numel():
        return given.target.new_empty(logits.shape[0], 0, dtype=wide_dtype(logits))
    with no_autocast(given.target):
        if isinstance(logits, ConvLogits):
            return conv_aten.cross_entropy(logits.conv, logits.form, given.target, options)
        return aten.cross_entropy(dense(given)[0].logits, given.target, options)
