"""FocalLoss and DiceFocalLoss equal MONAI's formulas, in value and gradient; ``test_originals.py`` runs MONAI."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.functional import ConvLogits
from fusedseg.losses import DiceFocalLoss, FocalLoss
from fusedseg.memory.meter import measure
from tests.losses import formulas
from tests.losses.compare import check_same

K = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)


def data(ignore=None):
    x, labels = torch.randn(2, K, 3, 5, dtype=torch.float64), torch.randint(K, (2, 1, 3, 5))
    if ignore is not None:
        labels[1, 0, :2] = ignore
    return x, labels


def focal(labels, options):
    """The formula as a function of the logits."""
    ignore = options.get("ignore_index")
    mask = None if ignore is None else (labels != ignore).double()
    y = formulas.one_hot(labels, K, torch.float64)
    return lambda x: formulas.monai_focal(x, y, mask, options)


@pytest.mark.parametrize("ignore", [None, 255, 2])
@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
def test_focal(softmax, ignore, backend):
    x, labels = data(ignore)
    sets = itertools.product(
        (True, False), (1.5, 2.0), (None, [0.25, 0.875, 0.375, 0.5], 0.25), (None, WEIGHT), ("mean", "sum")
    )
    for background, gamma, alpha, weight, reduction in itertools.islice(sets, 0, None, 1 if backend == "aten" else 7):
        if not background:
            if softmax:
                continue
            alpha = alpha[1:] if isinstance(alpha, list) else alpha
            weight = None if weight is None else weight[1:]
        options = {
            "include_background": background, "gamma": gamma, "alpha": alpha, "weight": weight, "reduction": reduction,
            "use_softmax": softmax, "ignore_index": ignore,
        }  # fmt: skip
        loss = FocalLoss(to_onehot_y=True, **options)
        check_same((loss, labels.short()), (focal(labels, options),), x)


def test_targets_with_channels():
    x, labels = data()
    y = formulas.one_hot(labels, K, torch.float64)
    for softmax in (True, False):
        soft = torch.rand_like(x) if softmax else y
        options = {"use_softmax": softmax, "include_background": softmax}
        loss = FocalLoss(**options)
        check_same((loss, soft), (lambda x, soft=soft, o=options: formulas.monai_focal(x, soft, None, o),), x)
    mask = y[:, 1:2] == 0
    loss = FocalLoss(ignore_index=1)
    check_same((loss, y), (lambda x: formulas.monai_focal(x, y, mask.double(), {}),), x)


@pytest.mark.parametrize("alpha", [0.25, [0.25, 0.875, 0.375, 0.5]], ids=["number", "list"])
def test_alpha_is_a_tensor(alpha):
    """MONAI takes tensors too; the one of a number raised TypeError."""
    (x, labels), given = data(), torch.tensor(alpha)
    loss = FocalLoss(to_onehot_y=True, alpha=given)
    assert torch.equal(loss(x, labels), FocalLoss(to_onehot_y=True, alpha=alpha)(x, labels))


@pytest.mark.parametrize("alpha", [0.25, [0.25, 0.875, 0.375, 0.5]], ids=["number", "list"])
def test_alpha_of_a_soft_target(alpha, backend):
    """Alpha depends on each value of the target; the sums of a soft target had it as if the target were one-hot."""
    x, labels = data()
    y = formulas.one_hot(labels, K, torch.float64)
    # Some positions are hard, and the classes differ.
    soft = torch.where(labels < 2, y, torch.rand_like(x))
    for background, ignore in ((True, None), (False, None), (True, 0)):
        # MONAI takes no soft value of a class that is ignored.
        target = soft if ignore is None else torch.cat([y[:, :1], soft[:, 1:]], 1)
        mask = None if ignore is None else 1 - y[:, :1]
        options = {"include_background": background, "gamma": 1.5, "weight": 2.0}
        options["alpha"] = alpha[1:] if isinstance(alpha, list) and not background else alpha
        loss = FocalLoss(ignore_index=ignore, **options)
        expected = lambda x, t=target, m=mask, o=options: formulas.monai_focal(x, t, m, o)  # noqa: E731
        check_same((loss, target), (expected,), x)
    loss, ones = DiceFocalLoss(sigmoid=True, alpha=alpha), torch.ones(2, 1, 3, 5, dtype=torch.float64)

    def expected(x):
        return formulas.monai_dice(x, soft, ones, "sigmoid", {}) + formulas.monai_focal(x, soft, None, {"alpha": alpha})

    check_same((loss, soft), (expected,), x)
    features, weight = torch.randn(2, 3, 3, 5, dtype=torch.float64), torch.randn(K, 3, dtype=torch.float64)
    logits = ConvLogits(features, weight)
    assert (loss(logits, soft) - expected(logits.formed())).abs() <= 1e-12


def test_gamma_zero_is_cross_entropy():
    x, labels = data()
    loss, stock = FocalLoss(to_onehot_y=True, gamma=0, use_softmax=True), nn.CrossEntropyLoss()
    check_same((loss, labels), (lambda x: stock(x, labels[:, 0]) / K,), x)


@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
def test_dice_focal(softmax):
    x, labels = data()
    y, ones = formulas.one_hot(labels, K, torch.float64), torch.ones(2, 1, 3, 5, dtype=torch.float64)
    kind = "softmax" if softmax else "sigmoid"
    for background, batch, weight, alpha in itertools.product(
        (True, False), (True, False), (None, WEIGHT), (None, 0.25)
    ):
        weight = weight if weight is None or background else weight[1:]
        options = {"include_background": background, "batch": batch, "weight": weight, "gamma": 1.5}
        for of_dice, of_focal in ((0.7, 1.3), (0.0, 1.0), (1.0, 0.0)):
            loss = DiceFocalLoss(
                to_onehot_y=True, alpha=alpha, lambda_dice=of_dice, lambda_focal=of_focal, **{kind: True}, **options
            )

            def expected(x, options=options, alpha=alpha, of_dice=of_dice, of_focal=of_focal):
                dice = formulas.monai_dice(x, y, ones, kind, options)
                return of_dice * dice + of_focal * formulas.monai_focal(x, y, None, options | {"alpha": alpha})

            check_same((loss, labels), (expected,), x)


@pytest.mark.parametrize("loss", [FocalLoss(to_onehot_y=True), DiceFocalLoss(to_onehot_y=True, softmax=True)])
def test_nothing_is_kept_but_the_logits(loss):
    with FakeTensorMode():
        x, labels = torch.empty(2, 20, 64, 64, requires_grad=True), torch.empty(2, 1, 64, 64, dtype=torch.uint8)
        assert measure(lambda x: loss(x, labels), x, loss=lambda v: v, owned=[x, labels]).saved <= 8192


def test_refused():
    x, labels = data()

    def refused(text, make, *args):
        with pytest.raises(ValueError, match=text):
            make()(*args)

    refused("FocalLoss: reduction must be one of mean, sum, got 'none'", lambda: FocalLoss(reduction="none"))
    refused("FocalLoss: gamma must be at least 0, got -1", lambda: FocalLoss(gamma=-1))
    refused("FocalLoss: weight must not be negative", lambda: FocalLoss(weight=[-1.0, 1.0]))
    refused("FocalLoss: weight must be one number, or have one value for each of several classes that count, got",
            lambda: FocalLoss(to_onehot_y=True, weight=[1.0, 1.0]), x, labels)  # fmt: skip
    refused("FocalLoss: alpha must have 4 values, one for each class, got",
            lambda: FocalLoss(to_onehot_y=True, alpha=[1.0, 1.0]), x, labels)  # fmt: skip
    refused(r"FocalLoss: target must have shape \(2, 1, 3, 5\)", lambda: FocalLoss(to_onehot_y=True), x, labels[:, 0])
    refused("DiceFocalLoss: lambda_focal must be at least 0", lambda: DiceFocalLoss(lambda_focal=-1))
    refused("DiceFocalLoss: other_act must be None", lambda: DiceFocalLoss(other_act=torch.tanh))
    refused("FocalLoss: include_background must be True with use_softmax=True; use monai.losses.FocalLoss",
            lambda: FocalLoss(use_softmax=True, include_background=False))  # fmt: skip
