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
