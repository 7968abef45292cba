"""What FocalLoss and DiceFocalLoss have beside MONAI's values (``test_values.py``): tensors and bytes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.functional import ConvLogits
from fusedseg.losses import DiceFocalLoss, FocalLoss
from fusedseg.memory.meter import measure
from tests.losses.compare import check_same

K = 4


def data():
    return torch.randn(2, K, 3, 5, dtype=torch.float64), torch.randint(K, (2, 1, 3, 5))


@pytest.mark.parametrize("alpha", [0.25, [0.25, 0.875, 0.375, 0.5]], ids=["number", "list"])
def test_alpha_is_a_tensor(alpha):
    """MONAI takes tensors too; the one of a number raised TypeError."""
    (x, labels), given = data(), torch.tensor(alpha)
    loss = FocalLoss(to_onehot_y=True, alpha=given)
    assert torch.equal(loss(x, labels), FocalLoss(to_onehot_y=True, alpha=alpha)(x, labels))


def test_alpha_of_a_soft_target_and_a_convolution():
    loss, soft = DiceFocalLoss(sigmoid=True, alpha=0.25), torch.rand(2, K, 3, 5, dtype=torch.float64)
    features, weight = torch.randn(2, 3, 3, 5, dtype=torch.float64), torch.randn(K, 3, dtype=torch.float64)
    logits = ConvLogits(features, weight)
    assert (loss(logits, soft) - loss(logits.formed(), soft)).abs() <= 1e-12


def test_gamma_zero_is_cross_entropy():
    x, labels = data()
    loss, stock = FocalLoss(to_onehot_y=True, gamma=0, use_softmax=True), nn.CrossEntropyLoss()
    check_same((loss, labels), (lambda x: stock(x, labels[:, 0]) / K,), x)


@pytest.mark.parametrize("loss", [FocalLoss(to_onehot_y=True), DiceFocalLoss(to_onehot_y=True, softmax=True)])
def test_nothing_is_kept_but_the_logits(loss):
    with FakeTensorMode():
        x, labels = torch.empty(2, 20, 64, 64, requires_grad=True), torch.empty(2, 1, 64, 64, dtype=torch.uint8)
        assert measure(lambda x: loss(x, labels), x, loss=lambda v: v, owned=[x, labels]).saved <= 8192
