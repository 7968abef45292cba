"""What nnU-Net's losses have beside its values (``test_values.py``): processes, deep supervision, peaks and errors."""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.losses import DC_and_CE_loss, DC_and_topk_loss, DeepSupervision, TopKLoss, nnunet
from fusedseg.memory.meter import allocator_peak, measure
from fusedseg.ops.segmentation import sums as op
from tests.losses.formulas import nnunet_dc_and_ce

N, K = 2, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)


def data():
    x = torch.randn(N, K, 5, 6, dtype=torch.float64)
    return x, torch.randint(K, (N, 1, 5, 6), dtype=torch.int16)


def test_the_host_does_not_wait_for_the_device():
    """A value that Python reads does not exist on tensors without values."""
    loss = DC_and_CE_loss({}, {}, ignore_label=255)
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, 8, requires_grad=True)
        loss(x, torch.empty(2, 1, 8, 8, dtype=torch.uint8)).backward()


def test_deep_supervision():
    x, labels = data()
    loss = DC_and_CE_loss({}, {})
    outputs, targets = [x, x[..., ::2].contiguous(), x[..., :2]], [labels, labels[..., ::2], None]
    found = DeepSupervision(loss, [0.75, 0.25, 0])(outputs, targets)
    assert torch.allclose(found, 0.75 * loss(x, labels) + 0.25 * loss(outputs[1], targets[1]))
    assert torch.allclose(DeepSupervision(loss)([x], [labels]), loss(x, labels))
    with pytest.raises(ValueError, match="a weight must differ from 0"):
        DeepSupervision(loss, [0, 0])
    with pytest.raises(ValueError, match=r"one entry per weight \(2\), got list of 1 and list of 1"):
        DeepSupervision(loss, [1, 1])([x], [labels])


def test_the_sums_of_processes_make_the_loss(monkeypatch):
    """The first of two processes: the second one's sums, and its gradients of the joint sums, come by two gathers."""
    x, labels = data()
    options = {"batch_dice": True, "smooth": 1e-5}
    loss = DC_and_CE_loss(options, {}, weight_ce=0)
    others: list[torch.Tensor] = []
    monkeypatch.setattr(nnunet, "gather", lambda t, group: torch.stack([t, others.pop(0)]))
    leaf, spec = x.clone().requires_grad_(), op.SumsSpec("softmax", "none")
    value = nnunet_dc_and_ce(leaf, labels, options, {}, weight_ce=0)
    (expected,) = torch.autograd.grad(value, leaf)
    own, other = (op.sums(op.SumsInputs(x[i : i + 1], labels[i : i + 1]), spec)[:3].sum(1) for i in range(2))
    joint = (own + other).requires_grad_()
    dsums = torch.autograd.grad(-((2 * joint[0] + 1e-5) / (joint[1] + joint[2] + 1e-5)).mean(), joint)[0]
    others += [other, dsums]
    monkeypatch.setattr(nnunet.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(nnunet.distributed, "group", mock.Mock())
    first = x[:1].clone().requires_grad_()
    found = loss(first, labels[:1])
    (grad,) = torch.autograd.grad(found, first)
    assert abs(found.item() - value.item()) <= 1e-12
    # DDP averages over the processes.
    assert (grad / 2 - expected[:1]).abs().max() <= 1e-12 * expected.abs().max()


def test_the_peak_of_the_hardest_positions(one_thread):
    """There are one gradient, or that of each of two parts.

    Each thread has tiles of its own, and the limit counts those of one.
    """
    with FakeTensorMode():
        x = torch.empty(2, 118, 128, 128, 128, dtype=torch.half, requires_grad=True)
        labels = torch.empty(2, 1, *x.shape[2:], dtype=torch.uint8)
        found = measure(lambda x: TopKLoss()(x, labels), x, loss=lambda v: v, owned=[x, labels])
    assert found.peak <= 1.05 * 2 * x.numel()
    # Autograd adds the gradients of real tensors in place.  The few copies of a tile of 1 MiB are 0.14 of these logits.
    x, labels = torch.randn(1, 118, 32, 32, 32, requires_grad=True), torch.randint(118, (1, 1, 32, 32, 32))
    loss = DC_and_topk_loss({}, {})
    assert allocator_peak(lambda: loss(x, labels).backward()) <= 2.25 * 4 * x.numel()
