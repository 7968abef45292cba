"""Losses of which no position counts, or none of a sample, and losses of empty tensors: as in the originals.

PyTorch's mean over no position is NaN, and its gradient is exactly 0, so that an unlabelled image changes no weight.
"""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.functional import ConvLogits
from tests.losses.compare import check_same

INF = float("inf")


def labels_of(case, K):
    labels = torch.randint(K, (2, 3, 5))
    if case in ("all ignored", "one sample ignored"):
        labels[0 if case == "one sample ignored" else slice(None)] = 255
    else:
        labels[:, 0] = 255
    return labels


def weight_of(case, K):
    weight = torch.ones(K, dtype=torch.float64)
    return weight * 0 if case == "weights of 0" else weight


CASES = pytest.mark.parametrize("case", ["all ignored", "one sample ignored", "weights of 0", "infinite logits"])


@pytest.mark.parametrize("K", [3, 20])
@CASES
def test_cross_entropy(case, K, backend):
    x, labels = torch.randn(2, K, 3, 5, dtype=torch.float64), labels_of(case, K)
    if case == "infinite logits":
        x[:, 0, 0], x[0, 1, 0] = -INF, INF
    for smoothing in (0.0, 0.1):
        if smoothing and case == "infinite logits":
            # No probability is 0 for a smoothed label.
            continue
        for reduction in ("mean", "sum"):
            options = {"ignore_index": 255, "label_smoothing": smoothing, "reduction": reduction}
            ours, stock = (of(weight_of(case, K), **options) for of in (fusedseg.CrossEntropyLoss, nn.CrossEntropyLoss))
            check_same((ours, labels), (stock, labels), x)


@CASES
@pytest.mark.parametrize("size", [None, (6, 10)], ids=str)
def test_cross_entropy_of_a_convolution(case, size):
    """A convolution whose logits are not formed gets no gradient either."""
    K, labels = 3, labels_of(case, 3)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 3, 5), (K, 4, 1, 1), (K,))]
    if size:
        labels = labels.repeat_interleave(2, 1).repeat_interleave(2, 2)
    grads = []
    for loss, fused in ((fusedseg.CrossEntropyLoss, True), (nn.CrossEntropyLoss, False)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        given = ConvLogits(*leaves, size=size)
        value = loss(weight_of(case, K), ignore_index=255)(given if fused else given.formed(), labels)
        grads.append([*torch.autograd.grad(value, leaves), value.detach()])
    torch.testing.assert_close(*grads, equal_nan=True)


def test_the_mean_over_labels_of_no_weight_is_nan():
    """All labels have the weight 0, but smoothing gives other classes a part: 0 / 0 and x / 0, which is NaN."""
    x, weight = torch.randn(1, 3, 4, dtype=torch.float64), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    options = {"weight": weight, "label_smoothing": 0.1}
    ours, stock = (of(**options) for of in (fusedseg.CrossEntropyLoss, nn.CrossEntropyLoss))
    check_same((ours, torch.zeros(1, 4).long()), (stock, torch.zeros(1, 4).long()), x)


@pytest.mark.parametrize("K", [1, 3])
def test_dice_ce_of_a_masked_target(K, backend):
    """MONAI's DiceCELoss has no ignore_index; as in PyTorch, the cross-entropy is NaN and its gradient 0."""
    loss = fusedseg.DiceCELoss(softmax=K > 1, sigmoid=K == 1, lambda_dice=0, ignore_index=255)
    x = torch.randn(1, K, 4, requires_grad=True)
    value = loss(x, torch.full((1, K, 4), 255.0 if K == 1 else 0.0))
    (dx,) = torch.autograd.grad(value, x)
    assert value.isnan()
    assert not dx.any()
