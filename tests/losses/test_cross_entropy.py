"""CrossEntropyLoss equals the stock loss in value and gradient, in float64."""

import itertools

import pytest
import torch
from torch import nn

import fusedseg
from tests.losses.compare import check_same

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


def test_small_labels_of_many_classes():
    """The default ignore_index, -100, is 156 in uint8, so this class was left out."""
    x, labels = torch.randn(1, 160, 4, dtype=torch.float64), torch.tensor([[156, 159, 0, 3]])
    check_same((fusedseg.CrossEntropyLoss(), labels.byte()), (nn.CrossEntropyLoss(), labels), x)


def test_all_ignored_is_nan_as_in_stock():
    x, labels = torch.randn(1, 3, 4), torch.full((1, 4), -100)
    assert fusedseg.CrossEntropyLoss()(x, labels).isnan()
    assert nn.CrossEntropyLoss()(x, labels).isnan()


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
