"""Values of each position, without a gradient: the predicted labels in a small dtype, and the cross-entropy.

``fusedseg.functional.argmax_labels`` is public.  From the cross-entropy, a loss chooses the positions that count.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import _backend
from ..check import check_input, wide_dtype
from ..registry import graph_op
from . import aten_sums, launches
from .aten_sums import check_whole
from .checks import check
from .conv_logits import Conv, ConvLogits, Logits, tensor_of
from .spec import SumsInputs, SumsSpec
from .sums import dense_logits, no_autocast

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
    if isinstance(logits, Tensor):
        logits = logits.detach()
        return logits.argmax(1).to(dtype) if torch.compiler.is_compiling() else labels_of(logits, dtype)
    parts: list[Any] = [part.detach() if isinstance(part, Tensor) else part for part in logits.conv]
    conv = Conv(*parts)
    if torch.compiler.is_compiling():
        return conv_argmax_op(*conv, dtype)
    # The first call of a custom op imports the compiler, which takes a second.
    return labels_of(conv, dtype)


def labels_of(logits: Tensor | Conv, dtype: torch.dtype) -> Tensor:
    """The predicted labels, (N, *spatial)."""
    x, shape = tensor_of(logits), logits.shape
    labels = torch.empty(shape[0], *shape[2:], dtype=dtype, device=x.device)
    if not labels.numel():
        return labels
    if isinstance(logits, Tensor):
        logits, sizes = dense_logits(logits)
        if _backend.use_triton(logits, launches.FAMILY):
            launches.argmax(logits, labels.view(sizes.N, sizes.S), sizes)
            return labels
    with no_autocast(x):
        aten_sums.argmax(logits, labels)
    return labels


def _conv_argmax(*arguments):
    *conv, labels = arguments
    return labels_of(Conv(*conv), labels)


def _fake(features, *arguments):
    *conv, labels = arguments
    N, _, *spatial = Conv(features, *conv).shape
    return features.new_empty(N, *spatial, dtype=labels)


conv_argmax_op = graph_op(
    "conv_argmax(Tensor features, Tensor weight, Tensor? bias, SymInt[]? size, bool align_corners, ScalarType dtype, "
    "ScalarType labels) -> Tensor",
    _conv_argmax,
    _fake,
)


@torch.no_grad()
def cross_entropy(logits: Logits, labels: Tensor, options: Mapping[str, Any]) -> Tensor:
    """``F.cross_entropy(logits, labels, reduction="none", **options)``, (N, S), tile by tile.

    ``labels`` may have any integer or floating dtype, and the shape (N, *spatial) or (N, 1, *spatial).  The result is
    in float64 for float64 logits, otherwise in float32.
    """
    check(SumsInputs(logits, labels), SumsSpec("none", "softmax"))
    if torch.compiler.is_compiling():
        # The compiler fuses the stock function into one pass.
        x = logits.formed() if isinstance(logits, ConvLogits) else logits
        values = F.cross_entropy(x, labels.reshape(x.shape[0], *x.shape[2:]).long(), reduction="none", **options)
        return values.flatten(1)
    given: Tensor | Conv = logits.conv if isinstance(logits, ConvLogits) else dense_logits(logits)[0]
    if not logits.numel():
        return labels.new_empty(logits.shape[0], 0, dtype=wide_dtype(tensor_of(given).dtype))
    check_whole(labels)
    with no_autocast(labels):
        return aten_sums.cross_entropy(given, labels, options)
