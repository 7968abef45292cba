"""DiceLoss, DiceCELoss and TverskyLoss follow MONAI's formulas in value and gradient, in float64."""

import pytest
import torch

import fusedseg
from fusedseg.losses import FocalLoss, TverskyLoss
from tests.losses.compare import check_same
from tests.losses.formulas import monai_dice, monai_dice_ce, one_hot

N, K = 2, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
OPTIONS = {
    "default": {},
    "no-background": {"include_background": False, "weight": WEIGHT},
    "squared-batch": {"squared_pred": True, "batch": True, "weight": WEIGHT},
    "jaccard-sum": {"jaccard": True, "reduction": "sum", "smooth_nr": 1e-3, "smooth_dr": 0.1},
    "smoothed": {"label_smoothing": 0.1, "lambda_dice": 0.7, "lambda_ce": 1.3},
    "smoothed-weight": {"label_smoothing": 0.2, "weight": WEIGHT},
    "no-dice": {"lambda_dice": 0.0},
    "no-ce": {"lambda_ce": 0.0},
}
KINDS = {"softmax": {"softmax": True}, "sigmoid": {"sigmoid": True}, "identity": {}}


@pytest.fixture
def data():
    x = torch.randn(N, K, 5, 6, dtype=torch.float64)
    return x, torch.randint(K, (N, 1, 5, 6))


def arguments(kind, options, **more):
    return KINDS[kind] | options | more


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_dice_ce(name, kind, data):
    x, labels = data
    x = x.sigmoid() if kind == "identity" else x
    options, y = OPTIONS[name], one_hot(labels, K, x.dtype)
    # The cross-entropy of a one-hot target divides by the number of positions instead of the weights.
    by_labels = fusedseg.DiceCELoss(**arguments(kind, options, to_onehot_y=True))
    check_same((by_labels, labels.float()), (monai_dice_ce, y, labels[:, 0], kind, options), x)
    by_one_hot = fusedseg.DiceCELoss(**arguments(kind, options))
    check_same((by_one_hot, y.to(torch.uint8)), (monai_dice_ce, y, None, kind, options), x)


def test_one_class(data):
    """One class has a sigmoid and a binary cross-entropy; softmax, one-hot and background do nothing."""
    x, target = data[0][:, :1], (data[1] > 1).double()
    weight = torch.tensor(1.7, dtype=torch.float64)
    options = {"weight": weight, "lambda_ce": 0.4}
    loss = fusedseg.DiceCELoss(sigmoid=True, **options)
    check_same((loss, target), (monai_dice_ce, target, None, "sigmoid", options), x)
    with pytest.warns(UserWarning, match="softmax=True is ignored, because input has one channel"):
        fusedseg.DiceLoss(softmax=True)(x, target)
    with pytest.warns(UserWarning, match="include_background=False is ignored"):
        fusedseg.DiceLoss(include_background=False, sigmoid=True)(x, target)


@pytest.mark.parametrize("batch", [False, True])
def test_dice_without_reduction(batch, data):
    x, labels = data
    options = {"reduction": "none", "batch": batch, "include_background": False, "weight": [1.0, 2.0, 3.0]}
    loss = fusedseg.DiceLoss(softmax=True, to_onehot_y=True, **options)
    y, mask = one_hot(labels, K, x.dtype), torch.ones_like(x[:, :1])
    check_same((loss, labels), (monai_dice, y, mask, "softmax", options), x)
    scalar = fusedseg.DiceLoss(softmax=True, to_onehot_y=True, weight=2)
    check_same((scalar, labels), (lambda x: 2 * monai_dice(x, y, mask, "softmax", {}),), x)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_soft_labels(kind, data):
    x, _ = data
    y = torch.rand_like(x)
    mask = torch.ones_like(x[:, :1])
    for options in ({"soft_label": True}, {"soft_label": True, "squared_pred": True}, {}):
        loss = fusedseg.DiceLoss(**arguments(kind, options))
        check_same((loss, y), (monai_dice, y, mask, kind, options), x)
    options = {"alpha": 0.3, "beta": 0.7, "soft_label": True}
    tversky = TverskyLoss(**arguments(kind, options))
    check_same((tversky, y), (monai_dice, y, mask, kind, options), x)


@pytest.mark.parametrize("ignore", [255, 2, -1])
def test_ignored_labels(ignore, data):
    x, labels = data
    labels[1, 0, :2] = ignore
    mask = (labels != ignore).double()
    y = one_hot(labels, K, x.dtype)
    loss = fusedseg.DiceLoss(softmax=True, to_onehot_y=True, ignore_index=ignore, batch=True)
    check_same((loss, labels), (monai_dice, y, mask, "softmax", {"batch": True}), x)
    # A one-hot target has no class at ignored positions, or the ignored class.
    from_one_hot = fusedseg.DiceLoss(softmax=True, ignore_index=ignore)
    check_same((from_one_hot, y), (monai_dice, y, mask, "softmax", {}), x)
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


def test_tversky(data):
    x, labels = data
    y, mask = one_hot(labels, K, x.dtype), torch.ones_like(x[:, :1])
    for options in ({"alpha": 0.3, "beta": 0.7}, {"alpha": 0.5, "beta": 0.5, "reduction": "none", "batch": True}):
        loss = TverskyLoss(softmax=True, to_onehot_y=True, **options)
        check_same((loss, labels), (monai_dice, y, mask, "softmax", options), x)


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
