"""CrossEntropyLoss equals the stock loss in value and gradient, in float64.

PyTorch's mean over no position is NaN, and its gradient is exactly 0, so that an unlabelled image changes no weight.
"""

import itertools

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.functional import ConvLogits
from tests.losses.compare import check_same

INF = float("inf")
WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    "shape", [(2, 3, 5), (2, 3, 4, 5), (1, 3, 2, 3, 4), (6, 3), (0, 3, 5), (2, 3, 0), (0, 3, 0)], ids=str
)
def test_as_stock(shape):
    x = torch.randn(shape, dtype=torch.float64)
    labels = torch.randint(3, (shape[0], *shape[2:]))
    labels.view(-1)[:3] = -100
    for weight, reduction, smoothing in itertools.product((None, WEIGHT), ("mean", "sum"), (0.0, 0.1)):
        options = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        stock, ours = nn.CrossEntropyLoss(**options), fusedseg.CrossEntropyLoss(**options)
        check_same((ours, labels.short()), (stock, labels), x)
        soft = torch.rand_like(x)
        check_same((ours, soft), (stock, soft), x)
        stock, ours = (of(**options, ignore_index=1) for of in (nn.CrossEntropyLoss, fusedseg.CrossEntropyLoss))
        check_same((ours, labels.clamp(min=0)), (stock, labels.clamp(min=0)), x)


@pytest.mark.parametrize("values", [1, 4])
def test_weights_of_other_classes_are_refused(values):
    """A single weight was broadcast over all classes, where the stock loss raises an error."""
    x, labels, weight = torch.randn(2, 3, 4), torch.randint(3, (2, 1, 4)), torch.ones(values)
    text = rf"fusedseg.losses: weight must have 3 values, one for each class, got shape \({values},\)"
    for loss in (fusedseg.CrossEntropyLoss(weight), fusedseg.losses.DC_and_CE_loss({}, {"weight": weight})):
        with pytest.raises(ValueError, match=text):
            loss(x, labels)


def test_weights_of_other_classes_are_refused_for_one_class():
    """Three weights counted the cross-entropy of one class three times."""
    x, target = torch.randn(2, 1, 4), torch.rand(2, 1, 4)
    with pytest.raises(ValueError, match=r"pos_weight must have 1 values, one for each class, got shape \(3,\)"):
        fusedseg.DiceCELoss(sigmoid=True, weight=torch.ones(3))(x, target)


def labels_of(case, K):
    labels = torch.randint(K, (2, 3, 5))
    labels[{"all ignored": slice(None), "one sample ignored": 0}.get(case, (slice(None), 0))] = 255
    return labels


def weight_of(case, K):
    weight = torch.ones(K, dtype=torch.float64)
    return weight * 0 if case == "weights of 0" else weight


CASES = pytest.mark.parametrize("case", ["all ignored", "one sample ignored", "weights of 0", "infinite logits"])


@pytest.mark.parametrize("K", [3, 20])
@CASES
def test_nothing_counts(case, K, backend):
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
def test_nothing_counts_of_a_convolution(case, size):
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
