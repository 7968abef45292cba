"""What DiceLoss, DiceCELoss and TverskyLoss have beside MONAI's values (``test_values.py``): warnings and errors."""

import pytest
import torch

import fusedseg
from fusedseg.losses import FocalLoss, TverskyLoss
from tests.losses.compare import check_same
from tests.losses.formulas import monai_dice, one_hot

N, K = 2, 4


@pytest.fixture
def data():
    x = torch.randn(N, K, 5, 6, dtype=torch.float64)
    return x, torch.randint(K, (N, 1, 5, 6))


def test_options_without_effect_on_one_class(data):
    x, target = data[0][:, :1], (data[1] > 1).double()
    with pytest.warns(UserWarning, match="softmax=True is ignored, because input has one channel"):
        fusedseg.DiceLoss(softmax=True)(x, target)
    with pytest.warns(UserWarning, match="include_background=False is ignored"):
        fusedseg.DiceLoss(include_background=False, sigmoid=True)(x, target)


@pytest.mark.parametrize("ignore", [255, 2, -1])
def test_ignored_labels_of_dice_ce(ignore, data):
    """MONAI's has no such option."""
    x, labels = data
    labels[1, 0, :2] = ignore
    mask, y = (labels != ignore).double(), one_hot(labels, K, x.dtype)
    both = fusedseg.DiceCELoss(softmax=True, to_onehot_y=True, ignore_index=ignore)

    def expected(x):
        entropy = torch.nn.functional.cross_entropy(x, labels[:, 0], ignore_index=ignore)
        return monai_dice(x, y, mask, "softmax", {}) + entropy

    check_same((both, labels), (expected,), x)


def test_soft_targets_in_an_ignored_class_are_refused(data):
    """MONAI lets such a position count in part."""
    x, y = data[0], torch.rand(N, K, 5, 6, dtype=torch.float64)
    for loss in (fusedseg.DiceLoss, TverskyLoss, fusedseg.DiceCELoss, FocalLoss):
        with pytest.raises(
            ValueError, match=rf"{loss.__name__}: target must be 0 or 1 in the class 2, .* got 0\.\d+; a pos"
        ):
            loss(ignore_index=2)(x, y)


def test_refused(data):
    x, labels = data

    def refused(text, make, *args, **options):
        with pytest.raises(ValueError, match=text):
            make(*args, **options)

    refused("fusedseg.DiceCELoss: other_act must be None, .* use monai.losses.DiceCELoss", fusedseg.DiceCELoss,
            other_act=torch.tanh)  # fmt: skip
    refused("sigmoid and softmax must not both be True", fusedseg.DiceLoss, sigmoid=True, softmax=True)
    refused("DiceLoss: reduction must be one of mean, sum, none, got 'max'", fusedseg.DiceLoss, reduction="max")
    refused("DiceCELoss: reduction must be one of mean, sum, got 'none'", fusedseg.DiceCELoss, reduction="none")
    refused("lambda_ce must be at least 0, got -1", fusedseg.DiceCELoss, lambda_ce=-1)
    refused("weight must not be negative", fusedseg.DiceLoss, weight=[-1.0, 1.0])
    refused(r"target must have the shape of input \(2, 4, 5, 6\) without to_onehot_y, got \(2, 1, 5, 6\)",
            fusedseg.DiceLoss(softmax=True), x, labels)  # fmt: skip
    refused(r"target must have shape \(2, 1, 5, 6\) with to_onehot_y=True, got \(2, 4, 5, 6\)",
            fusedseg.DiceCELoss(softmax=True, to_onehot_y=True), x, x)  # fmt: skip
    refused("weight must have 4 values, one for each class, got", fusedseg.DiceLoss(weight=[1.0, 2.0]), x, x)
