"""Values of each position, without a gradient: the predicted labels in a small dtype, and the cross-entropy.

``fusedseg.functional.argmax_labels`` is public.  From the cross-entropy, a loss chooses the positions that count.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..check import check_input
from . import conv_aten, conv_op, reference
from .checks import check
from .conv_logits import ConvLogits, Logits
from .op import dense
from .reference import check_whole
from .spec import Given, SumsSpec, wide_dtype

OP = "fusedseg.argmax_labels"


def labels_dtype(K: int) -> torch.dtype:
    """The smallest dtype that holds the labels of K classes."""
    return torch.uint8 if K <= 256 else torch.int16 if K <= 2**15 else torch.int32


def argmax_labels(logits: Logits) -> Tensor:
    """The predicted label of each position, ``logits.argmax(1)``, in the smallest dtype that holds all classes.

    ``logits.argmax(1)`` takes 8 bytes for each position; this function takes one byte for up to 256 classes, two for
    up to 32768, and no other memory.

    Args:
        logits: (N, K, *spatial), fp16, bf16, fp32 or fp64; or ``ConvLogits``, which are never formed.

    Returns:
        (N, *spatial), uint8, int16 or int32.  The first of equal classes wins.  There is no gradient.

    Raises:
        ValueError: ``logits`` have fewer than two dimensions, or no class.
        TypeError: ``logits`` are no floating-point tensor.
    """
    if not isinstance(logits, ConvLogits):
        check_input(OP, logits)
    K = logits.shape[1]
    if K < 1:
        raise ValueError(f"{OP}: logits must have at least one class, got {tuple(logits.shape)}")
    dtype = labels_dtype(K)
    if isinstance(logits, ConvLogits):
        return conv_op.argmax(logits, dtype)
    if torch.compiler.is_compiling():
        return logits.detach().argmax(1).to(dtype)
    given, sizes = dense(Given(logits.detach(), logits))
    labels = torch.empty(sizes.N, sizes.S, dtype=dtype, device=logits.device)
    if labels.numel() == 0:
        pass
    elif _backend.use_triton(logits, "sums"):
        from ...kernels.segmentation_sums import segmentation_argmax

        with _backend.launching(logits):
            segmentation_argmax(given.logits, labels, sizes)
    else:
        reference.argmax(given.logits, sizes, labels)
    return labels.view(logits.shape[0], *logits.shape[2:])


@torch.no_grad()
def cross_entropy(logits: Logits, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy(logits, labels, reduction="none", **options)``, (N, S), tile by tile.

    ``labels`` may have any integer or floating dtype, and the shape (N, *spatial) or (N, 1, *spatial).  The result is
    in float64 for float64 logits, otherwise in float32.
    """
    given = Given(logits, labels)
    check(given, SumsSpec("none", "softmax"))
    if torch.compiler.is_compiling():
        # The compiler fuses the stock function into one pass.
        x = logits.formed() if isinstance(logits, ConvLogits) else logits
        values = F.cross_entropy(x, labels.reshape(x.shape[0], *x.shape[2:]).long(), reduction="none", **options)
        return values.flatten(1)
    return _cross_entropy(given, options)


def _cross_entropy(given: Given, options: Mapping[str, Any]) -> Tensor:
    logits = given.logits
    if not logits.numel():
        return given.target.new_empty(logits.shape[0], 0, dtype=wide_dtype(logits))
    check_whole(given.target)
    with conv_op.no_autocast(given.target):
        if isinstance(logits, ConvLogits):
            return conv_aten.cross_entropy(logits.conv, logits.form, given.target, options)
        return reference.cross_entropy(dense(given)[0].logits, given.target, options)
