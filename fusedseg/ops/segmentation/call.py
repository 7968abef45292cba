"""The functional forms of the op: ``segmentation_sums`` and ``tp_fp_fn`` of ``fusedseg.functional``."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .conv_logits import Logits, is_target_dense
from .spec import OVERLAP, PREDICTION, TARGET, SumsInputs, SumsSpec
from .sums import sums


class SegmentationSums(NamedTuple):
    """Sums over the positions of each sample, (N, K) each; None for a sum that was not asked for.

    With the weight m of a position (0 if it is ignored), the probability p and the target y of a class:

    * ``overlap`` sums m p y, or m min(p, y);
    * ``prediction`` sums m p, or m p**2;
    * ``target`` sums m y, or m y**2, and has no gradient;
    * ``nll`` sums -m y log(p);
    * ``other_nll`` sums -m log(p) for "smoothed", and -m (1 - y) log(1 - p) for "sigmoid".

    With a gamma above 0, the terms of ``nll`` have the factor (1 - p)**gamma of a focal loss; for "sigmoid", those of
    ``nll`` and ``other_nll`` have the factor (1 - q)**gamma, where q = sigmoid(x (2 y - 1)) is p for y = 1 and 1 - p
    for y = 0.
    """

    # Any stands for None, so that type checkers need no test for a sum that was asked for.
    overlap: Tensor | Any
    prediction: Tensor | Any
    target: Tensor
    nll: Tensor | Any
    other_nll: Tensor | Any


def segmentation_sums(
    logits: Logits,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    probability: str = "softmax",
    likelihood: str = "softmax",
    ignore_index: int | None = None,
    squared: bool = False,
    minimum: bool = False,
    gamma: float = 0.0,
) -> SegmentationSums:
    """One pass over logits and target gives the sums from which losses of segmentation are a few lines.

    Dice, Jaccard, Tversky, cross-entropy with class weights and label smoothing, and their combinations are functions
    of the sums in stock PyTorch; ``fusedseg.losses`` has those of MONAI, nnU-Net and segmentation_models_pytorch.  For
    example, with labels and a mean over samples and classes::

        sums = segmentation_sums(logits, labels)
        dice = (2 * sums.overlap / (sums.prediction + sums.target)).mean()
        cross_entropy = sums.nll.sum() / sums.target.sum()

    Args:
        logits: (N, K, *spatial), fp16, bf16, fp32 or fp64, contiguous or channels_last; other strides are copied in
            each pass.  Or ``ConvLogits``, which are never formed, and whose features, weight and bias are kept instead.
        target: labels (N, *spatial) or (N, 1, *spatial), bool or of any integer or floating dtype, never widened or
            expanded; or one value for each class, of the shape of ``logits``: one-hot, probabilities, or regions that
            overlap.  A target of the shape of ``logits`` counts as the latter.
        mask: (N, *spatial) or (N, 1, *spatial), the weight of each position; None stands for 1.
        probability: the p of overlap and prediction: "softmax", "sigmoid", "identity" (the logits themselves), "argmax"
            or "positive" (1 or 0, as in ``tp_fp_fn``), or "none" (neither of both sums).
        likelihood: the p of nll: "softmax"; "smoothed" (softmax, and other_nll too); "sigmoid" (and other_nll); or
            "none", which "argmax" and "positive" need.
        ignore_index: positions with this label do not count; in a target with a value for each class, elements with
            this value do not count.
        squared: prediction and target are sums of squares.
        minimum: overlap sums min(p, y), the soft-label form of Wang et al.
        gamma: the power of the focal factor in nll, at least 0; above 0 for "softmax" and "sigmoid" only.

    Returns:
        ``SegmentationSums`` in float64 for float64 logits and for counts, otherwise in float32.  A label that is
        neither a class nor ignored is an error of the caller: it counts for no class, or raises an IndexError on aten.
        On a GPU, where the host waits for no value, the fraction of a label is cut off.

    Kept for backward: ``logits``, ``target`` and ``mask`` of the caller, and no other tensor.  Backward computes the
    probabilities again, and writes the gradient in one pass, when the gradients of the sums, and with them the scale
    of the loss, are known.
    Above 256 classes the Triton kernels read the logits twice in forward and three times in backward.

    Raises:
        ValueError: a shape, a device or a choice does not fit; a label on a CPU has a fraction.
        TypeError: ``logits`` are not floating point, or a tensor is complex.
        RuntimeError: backward itself is differentiated.

    Source: Milletari et al., "V-Net", 3DV 2016 (Dice); Wang et al., "Dice Semimetric Losses", MICCAI 2023 (minimum);
    Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017 (gamma).
    """
    spec = SumsSpec(probability, likelihood, ignore_index, squared, minimum, is_target_dense(logits, target), gamma)
    found = sums(SumsInputs(logits, target, mask), spec)
    has_p, has_nll = probability != "none", spec.nll != "none"
    wanted = (has_p, has_p, True, has_nll, spec.other)
    return SegmentationSums(*(row if want else None for row, want in zip(found.unbind(0), wanted, strict=True)))  # type: ignore[arg-type]


class TpFpFn(NamedTuple):
    """Numbers of positions of each sample and class, (N, K) each, in int64."""

    tp: Tensor
    fp: Tensor
    fn: Tensor


def tp_fp_fn(
    logits: Logits,
    target: Tensor,
    mask: Tensor | None = None,
    *,
    ignore_index: int | None = None,
    regions: bool = False,
) -> TpFpFn:
    """True positives, false positives and false negatives of each sample and class, in one pass over the logits.

    Equals the sums of ``p * y``, ``p * (1 - y)`` and ``(1 - p) * y``, where p is the one-hot tensor of
    ``logits.argmax(1)``, or ``logits > 0`` for regions, and y the one-hot target.  Neither p nor y is formed: the
    metrics of nnU-Net and MONAI, which form both, peak at 14 and 6 times the bytes of half-precision logits.

    The Dice score of a class over a batch is ``2 * tp.sum(0) / (2 * tp + fp + fn).sum(0)``.

    Args:
        logits: (N, K, *spatial), fp16, bf16, fp32 or fp64.
        target: labels (N, *spatial) or (N, 1, *spatial) of any integer or floating dtype; or zeros and ones in the
            shape of ``logits``, which ``regions`` needs.
        mask: (N, *spatial) or (N, 1, *spatial); positions where it is 0 do not count.
        ignore_index: positions with this label do not count.
        regions: whether classes may overlap, so that a logit above 0 predicts a class, whatever the others are.

    Returns:
        ``TpFpFn``; the counts are exact and have no gradient.

    Raises:
        ValueError, TypeError: an argument does not fit, as in ``segmentation_sums``.
    """
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        mask = mask != 0
    spec = SumsSpec("positive" if regions else "argmax", "none", ignore_index, dense=is_target_dense(logits, target))
    counts = sums(SumsInputs(logits, target, mask), spec).long()
    tp = counts[OVERLAP]
    return TpFpFn(tp, counts[PREDICTION] - tp, counts[TARGET] - tp)
