"""DC_and_CE_loss, DC_and_BCE_loss and DeepSupervision follow nnU-Net's formulas in value and gradient, in float64."""

from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg.losses import DC_and_BCE_loss, DC_and_CE_loss, DeepSupervision, nnunet
from fusedseg.ops.segmentation import sums as op
from tests.losses.compare import check_same
from tests.losses.formulas import nnunet_dc_and_bce, nnunet_dc_and_ce

N, K = 2, 4
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.7], dtype=torch.float64)
# Options of Dice, of the cross-entropy, the weights of both and the ignored label.
CASES = {
    "nnunet": ({"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}, {}, 1, 1, None),
    "default-dice": ({}, {"weight": WEIGHT, "label_smoothing": 0.1}, 1.2, 0.8, None),
    "ignore": ({"batch_dice": True, "ddp": False}, {"weight": WEIGHT}, 1, 1, 255),
    "ignore-a-class": ({"do_bg": False}, {"label_smoothing": 0.1}, 1, 1, 2),
    "clip": ({"clip_tp": 3.0}, {"reduction": "sum"}, 1, 1, None),
    "ce-alone-ignores": ({}, {"ignore_index": 1, "label_smoothing": 0.1}, 1, 1, None),
    "dice-alone": ({"smooth": 0.5}, {}, 0, 1, None),
    "ce-alone": ({}, {}, 1, 0, 255),
}


def data():
    x = torch.randn(N, K, 5, 6, dtype=torch.float64)
    return x, torch.randint(K, (N, 1, 5, 6), dtype=torch.int16)


@pytest.mark.parametrize("name", CASES)
def test_dc_and_ce(name):
    dice, ce, weight_ce, weight_dice, ignore = CASES[name]
    x, labels = data()
    if ignore is not None:
        labels[1, 0, :2] = ignore
    loss = DC_and_CE_loss(dice, ce, weight_ce, weight_dice, ignore)
    for target in (labels, labels.float()):
        check_same(
            (loss, target),
            (nnunet_dc_and_ce, labels, dice, ce, weight_ce, weight_dice, ignore), x,
        )  # fmt: skip


def test_everything_is_ignored():
    x, labels = data()
    loss = DC_and_CE_loss({"smooth": 1e-5}, {}, ignore_label=255)
    leaf = x.requires_grad_()
    value = loss(leaf, torch.full_like(labels, 255))
    value.backward()
    assert value.item() == pytest.approx(-1)
    assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_the_host_does_not_wait_for_the_device():
    """A value that Python reads does not exist on tensors without values."""
    loss = DC_and_CE_loss({}, {}, ignore_label=255)
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, 8, requires_grad=True)
        loss(x, torch.empty(2, 1, 8, 8, dtype=torch.uint8)).backward()


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32], ids=str)
def test_dc_and_bce(dtype, ignored):
    x, _ = data()
    regions = torch.rand(N, K + ignored, 5, 6) < 0.4
    pos_weight = WEIGHT.view(K, 1, 1)
    for dice, bce in (({"batch_dice": True, "ddp": False}, {}), ({"smooth": 1e-5}, {"pos_weight": pos_weight})):
        loss = DC_and_BCE_loss(dict(bce), dice, 1.5, 0.5, use_ignore_label=ignored)
        last = regions[:, -1:] if ignored else None
        check_same(
            (loss, regions.to(dtype)),
            (nnunet_dc_and_bce, regions[:, :K], dice, bce, 1.5, 0.5, last), x,
        )  # fmt: skip


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


def test_refused():
    with pytest.raises(TypeError, match=r"DC_and_CE_loss: soft_dice_kwargs may have batch_dice, .* got apply_nonlin"):
        DC_and_CE_loss({"apply_nonlin": None}, {})
    with pytest.raises(ValueError, match=r"dice_class must be one of SoftDiceLoss, .* got Tensor"):
        DC_and_CE_loss({}, {}, dice_class=torch.Tensor)
    with pytest.raises(ValueError, match="reduction must be mean or sum, got 'none'"):
        DC_and_CE_loss({}, {"reduction": "none"})
    with pytest.raises(TypeError, match="bce_kwargs may have pos_weight and reduction, got weight"):
        DC_and_BCE_loss({"weight": None}, {})
    x, _ = data()
    with pytest.raises(ValueError, match=r"pos_weight must have one value, or shape \(4, 1, 1\) .* got \(4,\)"):
        DC_and_BCE_loss({"pos_weight": WEIGHT}, {})(x, x > 0)
