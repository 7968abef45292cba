"""SMPDiceLoss and SMPTverskyLoss follow the formulas of segmentation_models_pytorch, in float64."""

import pytest
import torch

from fusedseg.losses import SMPDiceLoss, SMPTverskyLoss
from tests.losses.compare import check_same
from tests.losses.formulas import smp_dice

N, K = 2, 4
WEIGHTS = [0.5, 1.0, 2.0, 0.7]
OPTIONS = {
    "default": {},
    "log": {"log_loss": True, "smooth": 1.0},
    "classes": {"classes": [1, 3], "class_weights": WEIGHTS},
    "ignore": {"ignore_index": 255, "class_weights": WEIGHTS},
    "tversky": {"alpha": 0.3, "beta": 0.7, "gamma": 1.5},
}


def check(x, target, mode, options):
    loss = (SMPTverskyLoss if "alpha" in options else SMPDiceLoss)(mode, **options)
    check_same((loss, target), (smp_dice, target, mode, options), x)


@pytest.mark.parametrize("name", OPTIONS)
def test_multiclass(name):
    """One class is absent: its loss is 0."""
    x, labels = torch.randn(N, K, 5, 6, dtype=torch.float64), torch.randint(K - 1, (N, 5, 6))
    labels[0, :2] = 255 if name == "ignore" else 0
    check(x, labels, "multiclass", OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_multilabel(name):
    x = torch.randn(N, K, 5, 6, dtype=torch.float64)
    target = (torch.rand(N, K, 5, 6) < 0.4).int()
    target[0, 1, :2] = 255 if name == "ignore" else 0
    check(x, target, "multilabel", OPTIONS[name])
    check(x, torch.rand_like(x), "multilabel", OPTIONS[name])


@pytest.mark.parametrize("name", ["default", "log", "ignore"])
def test_binary(name):
    options = {key: value for key, value in OPTIONS[name].items() if key != "class_weights"}
    x, target = torch.randn(N, 1, 5, 6, dtype=torch.float64), torch.randint(2, (N, 1, 5, 6))
    target[0, 0, :2] = 255 if name == "ignore" else 0
    check(x, target, "binary", options)


def test_probabilities():
    x, labels = torch.rand(N, K, 5, 6, dtype=torch.float64), torch.randint(K, (N, 5, 6))
    check(x, labels, "multiclass", {"from_logits": False})


def test_refused():
    with pytest.raises(ValueError, match="mode must be one of binary, multiclass, multilabel, got 'both'"):
        SMPDiceLoss("both")
    with pytest.raises(ValueError, match="classes and class_weights must be None for mode binary"):
        SMPTverskyLoss("binary", class_weights=[1.0])
