"""The bytes and errors of TopKLoss and DC_and_topk_loss; ``test_values.py`` compares them with nnU-Net."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.losses import DC_and_topk_loss, TopKLoss
from fusedseg.memory.meter import allocator_peak, measure


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
    x, labels = torch.randn(2, 4, 5, 6, dtype=torch.float64), torch.randint(4, (2, 1, 5, 6))
    for k in (0, 101):
        with pytest.raises(ValueError, match="TopKLoss: k must be above 0 and at most 100 per cent, got"):
            TopKLoss(k=k)
    with pytest.raises(ValueError, match="TopKLoss: k must leave at least one of 60 positions, got 1"):
        TopKLoss(k=1)(x, labels)
    with pytest.raises(TypeError, match="may have weight, ignore_index, k and label_smoothing, got reduction"):
        DC_and_topk_loss({}, {"reduction": "sum"})
    with pytest.raises(TypeError, match=r"soft_dice_kwargs may have batch_dice, .*, got wrong"):
        DC_and_topk_loss({"wrong": 1}, {})
