"""The bytes of TopKLoss and DC_and_topk_loss; ``test_values.py`` compares them with nnU-Net."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.losses import DC_and_topk_loss, TopKLoss
from fusedseg.memory.meter import allocator_peak, measure


def test_memory(one_thread):
    """One byte for each position is kept; at the peak there are one gradient, or that of each of two parts.

    Each thread has tiles of its own, and the limit counts those of one.
    """
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
