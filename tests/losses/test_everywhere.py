"""All losses: autocast, bytes, torch.compile, DDP and half precision."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg import losses
from fusedseg.functional import ConvLogits
from fusedseg.memory.meter import measure
from tests.losses.jobs import LOSSES, REGIONS, labels_or_regions, parallel_step
from tests.reference import relative_error
from tests.tools.ranks import on_ranks

K = 4
EACH = pytest.mark.parametrize("name", LOSSES)


def data(name, spatial=(3, 5), dtype=torch.float64):
    return torch.randn(2, K, *spatial, dtype=dtype), labels_or_regions(name, 2, K, spatial)


def test_every_loss_is_here():
    """A loss that is left out of the table is in no test of this file."""
    found = {type(loss()).__name__ for loss in LOSSES.values()}
    assert found == {*losses.__all__} - {"DeepSupervision"}


@EACH
def test_autocast(name):
    """Autocast makes the logits bf16, and casts nothing in the loss, which is fp32; the gradient is bf16."""
    net, (x, target) = nn.Conv2d(K, K, 1), data(name, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(x)
        loss = LOSSES[name]()(logits, target)
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    (dx,) = torch.autograd.grad(loss, logits)
    leaf = logits.detach().double().requires_grad_()
    expected = LOSSES[name]()(leaf, target)
    (wanted,) = torch.autograd.grad(expected, leaf)
    assert dx.dtype == torch.bfloat16
    # A few roundings of fp32, and one rounding of the gradient to bf16; two and a sum for DC_and_topk_loss.
    assert relative_error(loss, expected) <= 1e-6
    assert relative_error(dx, wanted) <= 2**-7


@EACH
def test_nothing_is_kept_but_the_logits(name):
    """And one byte for each position where some of them are chosen."""
    with FakeTensorMode():
        x, target = torch.empty(2, 20, 64, 64, requires_grad=True), labels_or_regions(name, 2, 20, (64, 64))
        found = measure(lambda x: LOSSES[name]()(x, target), x, loss=lambda v: v, owned=[x, target])
    assert found.saved - ("topk" in name.lower()) * 2 * 64 * 64 <= 8192


@EACH
def test_the_gradient_waits_for_the_scale_of_the_loss(name):
    """In fp16, nearly all entries of a gradient that was written before it was scaled would be 0."""
    x, target = data(name, (48, 48), torch.float16)
    x.requires_grad_()
    loss = LOSSES[name]()(x, target) / 4096
    (unscaled,) = torch.autograd.grad(loss, x, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 2.0**20, x)
    leaf = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(LOSSES[name]()(leaf, target) * 2.0**8, leaf)
    assert (unscaled == 0).float().mean() > 0.3
    assert ((scaled == 0) & (wanted.abs() > 1e-6)).float().mean() < 0.01
    assert relative_error(scaled, wanted) <= 2**-9


@EACH
def test_logits_that_are_not_formed(name):
    """A convolution and an interpolation give the logits tile by tile."""
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 3, 5), (K, 3), (K,))]
    logits, target = ConvLogits(*given, size=(6, 10)), labels_or_regions(name, 2, K, (6, 10))
    found, wanted = (LOSSES[name]()(of, target) for of in (logits, logits.formed()))
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(*(torch.autograd.grad(of, given) for of in (found, wanted)), rtol=1e-11, atol=1e-14)


def truth_values(name):
    """Logits of two classes, and a target of truth values."""
    x = torch.randn(2, 2, 3, 5, dtype=torch.float64)
    return x, labels_or_regions(name, 2, 2, (3, 5)).bool()


def of_two_classes(name):
    """The loss of the table, without its ignored label, which is no truth value."""
    return losses.DC_and_CE_loss({}, {}) if name == "DC_and_CE_loss" else LOSSES[name]()


@EACH
def test_truth_values_are_labels(name, backend):
    """Losses whose target is formed for a few classes raised TypeError of ``torch.iinfo``."""
    loss, (x, target) = of_two_classes(name), truth_values(name)
    leaf = x.requires_grad_()
    values = [loss(leaf, t) for t in (target, target.long())]
    assert torch.equal(*values)
    assert torch.equal(*(torch.autograd.grad(value, leaf)[0] for value in values))
    head = ConvLogits(torch.randn(2, 3, 3, 5), torch.randn(2, 3))
    assert torch.equal(loss(head, target), loss(head, target.long()))


def test_a_truth_value_of_one_class_is_no_label():
    with pytest.raises(IndexError, match="a class below 1 or ignored, got 1; ignore_index=1 ignores it"):
        losses.CrossEntropyLoss()(torch.randn(1, 1, 4), torch.ones(1, 4, dtype=torch.bool))


@EACH
def test_labels_with_a_fraction(name):
    """They counted for no class, so that the loss was NaN or too small."""
    if name in REGIONS:
        pytest.skip("regions may be soft")
    loss, (x, target) = of_two_classes(name), truth_values(name)
    wide, head = torch.randn(2, 20, 3, 5), ConvLogits(torch.randn(2, 3, 3, 5), torch.randn(2, 3))
    for logits in (x, wide, head):
        assert loss(logits, target.half()).isfinite()
        for wrong in (0.5, 1 + 2**-10, float("nan"), float("inf")):
            labels = torch.where(target, wrong, target.half())
            with pytest.raises(ValueError, match="target must have whole numbers where it has one label for each pos"):
                loss(logits, labels)


def test_fullgraph():
    """A compiled network and all losses give the gradients of eager mode, without a break of the graph."""
    net, x = nn.Conv2d(2, K, 1), torch.randn(2, 2, 6, 5)
    given = [(loss(), labels_or_regions(name, 2, K, (6, 5))) for name, loss in LOSSES.items()]

    def step(x):
        total = x.new_zeros(())
        for loss, target in given:
            total = total + loss(net(x), target)
        return total

    torch._dynamo.reset()
    found = torch.autograd.grad(torch.compile(step, fullgraph=True, backend="aot_eager")(x), [*net.parameters()])
    expected = torch.autograd.grad(step(x), [*net.parameters()])
    torch.testing.assert_close(found, expected)


# ``test_nnunet.py`` has the arithmetic of it; starting processes takes seconds.
@pytest.mark.slow
def test_distributed_data_parallel():
    """Two processes with batch_dice have the loss and the gradients of one process that has the whole batch."""
    torch.manual_seed(5)
    net, (x, labels) = nn.Conv2d(K, K, 3, padding=1).double(), data("DC_and_CE_loss")
    results = on_ranks(2, parallel_step, net, x, labels)
    loss = losses.DC_and_CE_loss({"batch_dice": True}, {})(net(x), labels)
    expected = torch.autograd.grad(loss, [*net.parameters()])
    assert abs(sum(value for value, _ in results) / 2 - loss.item()) <= 1e-12
    for _, grads in results:
        for found, wanted in zip(grads, expected, strict=True):
            assert relative_error(found, wanted) <= 1e-12
