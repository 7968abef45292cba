"""What the losses of MONAI have beside its values (``test_values.py``): warnings, errors, tensors and convolutions."""

import pytest
import torch

import fusedseg
from fusedseg.functional import ConvLogits
from fusedseg.losses import DiceFocalLoss, FocalLoss, TverskyLoss
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


@pytest.mark.parametrize("alpha", [0.25, [0.25, 0.875, 0.375, 0.5]], ids=["number", "list"])
def test_alpha_is_a_tensor(alpha, data):
    """MONAI takes tensors too; the one of a number raised TypeError."""
    found, expected = (FocalLoss(to_onehot_y=True, alpha=given)(*data) for given in (torch.tensor(alpha), alpha))
    assert torch.equal(found, expected)


def test_alpha_of_a_soft_target_and_a_convolution():
    loss, soft = DiceFocalLoss(sigmoid=True, alpha=0.25), torch.rand(2, K, 3, 5, dtype=torch.float64)
    features, weight = torch.randn(2, 3, 3, 5, dtype=torch.float64), torch.randn(K, 3, dtype=torch.float64)
    logits = ConvLogits(features, weight)
    assert (loss(logits, soft) - loss(logits.formed(), soft)).abs() <= 1e-12


@pytest.mark.parametrize("K", [1, 3])
def test_dice_ce_of_a_masked_target(K, backend):
    """MONAI's DiceCELoss has no ignore_index; as in PyTorch, the cross-entropy is NaN and its gradient 0."""
    loss = fusedseg.DiceCELoss(softmax=K > 1, sigmoid=K == 1, lambda_dice=0, ignore_index=255)
    x = torch.randn(1, K, 4, requires_grad=True)
    value = loss(x, torch.full((1, K, 4), 255.0 if K == 1 else 0.0))
    (dx,) = torch.autograd.grad(value, x)
    assert value.isnan()
    assert not dx.any()
