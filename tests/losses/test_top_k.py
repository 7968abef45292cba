"""TopKLoss and DC_and_topk_loss equal nnU-Net's formulas, in value and gradient; ``test_originals.py`` runs nnU-Net."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.losses import DC_and_topk_loss, TopKLoss
from fusedseg.memory.meter import allocator_peak, measure
from fusedseg.ops.segmentation import tiles
from tests.losses import formulas
from tests.losses.compare import check_same
from tests.tools.tensors import channels_last

K = 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)


def data(ignore=None):
    x, labels = torch.randn(2, K, 5, 6, dtype=torch.float64), torch.randint(K, (2, 1, 5, 6))
    if ignore is not None:
        labels[1, 0, :2] = ignore
    return x, labels


@pytest.mark.parametrize("ignore", [None, 255, 2])
def test_top_k(ignore, backend, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 40)
    x, labels = data(ignore)
    for k, weight, smoothing in itertools.product((10, 55, 100), (None, WEIGHT), (0.0, 0.1)):
        options = {"weight": weight, "label_smoothing": smoothing, "ignore_index": -100 if ignore is None else ignore}
        expected = (lambda x, k=k, o=options: formulas.nnunet_top_k(x, labels, k, o),)
        check_same((TopKLoss(k=k, **options), labels.short()), expected, x)
        check_same((TopKLoss(k=k, **options), labels), expected, channels_last(x))


@pytest.mark.parametrize("ignore", [None, 255])
def test_dc_and_top_k(ignore):
    x, labels = data(ignore)
    y = formulas.one_hot(labels, K, torch.float64)
    mask = torch.ones_like(labels, dtype=torch.float64) if ignore is None else (labels != ignore).double()
    for batch_dice, weight_ce, weight_dice in ((True, 1.2, 0.8), (False, 1, 0), (False, 0, 1)):
        of_dice = {"batch_dice": batch_dice, "smooth": 1e-5}
        loss = DC_and_topk_loss(of_dice, {"k": 20}, weight_ce, weight_dice, ignore)

        def expected(x, of_dice=of_dice, weight_ce=weight_ce, weight_dice=weight_dice):
            ce = formulas.nnunet_top_k(x, labels, 20, {} if ignore is None else {"ignore_index": ignore})
            return weight_ce * ce + weight_dice * formulas.nnunet_dice(x.softmax(1), y, mask, of_dice)

        check_same((loss, labels), (expected,), x)


def test_everything_ignored():
    x, labels = data()
    loss = DC_and_topk_loss({}, {}, ignore_label=255)(x.requires_grad_(), torch.full_like(labels, 255))
    (grad,) = torch.autograd.grad(loss, x)
    assert loss.isfinite()
    assert not grad.any()


def test_memory():
    """One byte for each position is kept; at the peak there are one gradient, or that of each of two parts."""
    with FakeTensorMode():
        x = torch.empty(2, 118, 128, 128, 128, dtype=torch.half, requires_grad=True)
        labels = torch.empty(2, 1, *x.shape[2:], dtype=torch.uint8)
        found = measure(lambda x: TopKLoss()(x, labels), x, loss=lambda v: v, owned=[x, labels])
    assert found.saved - labels.numel() <= 8192
    assert found.peak <= 1.05 * 2 * x.numel()
    # Autograd adds the gradients of real tensors in place.  The few copies of a tile of 1 MiB are 0.14 of these logits.
    x, labels = torch.randn(1, 118, 32, 32, 32, requires_grad=True), torch.randint(118, (1, 1, 32, 32, 32))
    loss = DC_and_topk_loss({}, {})
    assert allocator_peak(lambda: loss(x, labels).backward()) <= 2.25 * 4 * x.numel()


def test_refused():
    x, labels = data()
    for k in (0, 101):
        with pytest.raises(ValueError, match="TopKLoss: k must be above 0 and at most 100 per cent, got"):
            TopKLoss(k=k)
    with pytest.raises(ValueError, match="TopKLoss: k must leave at least one of 60 positions, got 1"):
        TopKLoss(k=1)(x, labels)
    with pytest.raises(TypeError, match="may have weight, ignore_index, k and label_smoothing, got reduction"):
        DC_and_topk_loss({}, {"reduction": "sum"})
    with pytest.raises(TypeError, match=r"soft_dice_kwargs may have batch_dice, .*, got wrong"):
        DC_and_topk_loss({"wrong": 1}, {})
