"""What the op keeps, its peak, and the op under the compiler."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.functional import segmentation_sums
from fusedseg.memory import SavedBytes, allocator_peak
from fusedseg.memory.meter import LiveBytes
from fusedseg.ops.segmentation import op
from tests.tools.tensors import channels_last


def dice_ce(x, labels, **options):
    sums = segmentation_sums(x, labels, **options)
    return sums.nll.sum() / sums.target.sum() - (2 * sums.overlap / (sums.prediction + sums.target + 1)).mean()


def test_keeps_nothing_but_logits_and_target(backend, device):
    x = torch.randn(2, 4, 8, 8, device=device).requires_grad_()
    labels = torch.randint(4, (2, 8, 8), device=device)
    with SavedBytes([x, labels]) as saved:
        sums = op.SumsFunction.apply(x, None, None, labels, None, None, op.SumsSpec("softmax", "softmax"))
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


def test_gradients_of_gradients_are_refused():
    x = torch.randn(1, 3, 4, requires_grad=True)
    (dx,) = torch.autograd.grad(dice_ce(x, torch.zeros(1, 4)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="segmentation_sums: double backward is not supported"):
        dx.sum().backward()


def test_batches_of_gradients_are_refused():
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    sums = op.sums(op.SumsInputs(x, torch.zeros(1, 4)), op.SumsSpec("softmax", "softmax"))
    several = torch.randn(3, *sums.shape, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"segmentation_sums: a batch of gradients .* is not supported"):
        torch.autograd.grad(sums, x, several, is_grads_batched=True)


def test_opcheck(backend, device):
    x = torch.randn(2, 3, 4, device=device)
    labels, mask = torch.randint(3, (2, 4), device=device), torch.rand(2, 4, device=device) < 0.5
    regions = torch.rand(2, 3, 4, device=device)
    spec = ("softmax", "smoothed", 1, False, False)
    torch.library.opcheck(op.sums_op, (x.requires_grad_(), None, None, labels, mask, *op.NO_FORM, *spec, False))
    dsums = torch.randn(5, 2, 3, device=device)
    given = channels_last(x.detach()), None, None, regions, None
    torch.library.opcheck(op.sums_backward_op, (dsums, [True, False, False], *given, *op.NO_FORM, *spec, True))


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
