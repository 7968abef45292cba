"""What the op keeps, its peak, and the op under the compiler."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.functional import segmentation_sums
from fusedseg.memory import SavedBytes, allocator_peak
from fusedseg.memory.meter import LiveBytes
from fusedseg.ops.segmentation import sums as op


def dice_ce(x, labels, **options):
    sums = segmentation_sums(x, labels, **options)
    return sums.nll.sum() / sums.target.sum() - (2 * sums.overlap / (sums.prediction + sums.target + 1)).mean()


def test_keeps_nothing_but_logits_and_target(backend, device):
    x = torch.randn(2, 4, 8, 8, device=device).requires_grad_()
    labels = torch.randint(4, (2, 8, 8), device=device)
    with SavedBytes([x, labels]) as saved:
        sums = op.SumsFunction.apply(x, None, None, labels, None, op.NO_CONV, op.SumsSpec("softmax", "softmax"))
    saved.add_attributes(sums)
    assert saved.nbytes == 0
    del sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_peak_is_the_gradient_and_a_tile(dtype, record_property):
    """At (2, 118, 128**3), on tensors without values: beyond logits and labels, in units of the logits."""
    with FakeTensorMode():
        x = torch.empty(2, 118, 128, 128, 128, dtype=dtype)
        labels = torch.empty(2, 128, 128, 128, dtype=torch.int16)
        given, spec, dsums = op.SumsInputs(x, labels), op.SumsSpec("softmax", "softmax"), torch.empty(5, 2, 118)
        with LiveBytes() as live:
            op.forward(given, spec)
            op.backward(dsums, given, spec, (True, False, False))
    record_property("peak", live.peak / x.nbytes)
    assert live.peak / x.nbytes <= 1.02


class Tagged(torch.Tensor):
    """A subclass such as MONAI's MetaTensor: what functions make of it has its class."""


def test_a_subclass_of_tensor(backend, device):
    x, labels = torch.randn(2, 3, 8, device=device), torch.randint(3, (2, 8), device=device)
    grads = []
    for kind in (torch.Tensor, Tagged):
        leaf = x.clone().requires_grad_()
        dice_ce((leaf * 1).as_subclass(kind), labels.as_subclass(kind)).backward()
        grads.append(leaf.grad.as_subclass(torch.Tensor))
    assert torch.equal(*grads)


# Each thread has a part of its own in memory.
@pytest.mark.usefixtures("one_thread")
def test_a_network_peaks_lower_than_with_the_stock_loss():
    net = nn.Conv2d(1, 40, 1)
    x, labels = torch.randn(1, 1, 256, 256), torch.randint(40, (1, 256, 256))
    stock = allocator_peak(lambda: nn.functional.cross_entropy(net(x), labels).backward())
    ours = allocator_peak(lambda: fusedseg.CrossEntropyLoss()(net(x), labels).backward())
    assert ours < stock - x.nbytes * 20
