"""The op on both backends: sums and gradients against float64, forms of targets, memory formats, and bytes."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.functional import argmax_labels, segmentation_sums, tp_fp_fn
from fusedseg.memory import SavedBytes, allocator_peak
from fusedseg.memory.meter import LiveBytes
from fusedseg.ops.segmentation import aten_sums as plain
from fusedseg.ops.segmentation import sums as op
from fusedseg.ops.segmentation import tiles
from fusedseg.ops.segmentation.spec import SumsInputs, SumsSpec
from tests import reference
from tests.reference import relative_error
from tests.tools.tensors import channels_last

FORMATS = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])
# Options, and the kind of target: labels, or values for each class.
CASES = {
    "dice-ce": ({}, "labels"),
    "dice": ({"likelihood": "none"}, "labels"),
    "ce-ignore": ({"probability": "none", "ignore_index": 2}, "labels"),
    "smoothed-ignore": ({"likelihood": "smoothed", "ignore_index": 255}, "labels"),
    "squared": ({"squared": True}, "labels"),
    "sigmoid-labels": ({"probability": "sigmoid", "likelihood": "smoothed"}, "labels"),
    "one-hot": ({"ignore_index": 1}, "regions"),
    "regions": ({"probability": "sigmoid", "likelihood": "sigmoid"}, "regions"),
    "probabilities": ({"likelihood": "smoothed", "squared": True}, "soft"),
    "minimum": ({"likelihood": "none", "minimum": True}, "soft"),
    "raw-and-softmax": ({"probability": "identity"}, "soft"),
    "focal": ({"gamma": 2.0, "ignore_index": 255}, "labels"),
    "focal-soft": ({"probability": "none", "gamma": 0.5}, "soft"),
    "focal-sigmoid": ({"likelihood": "sigmoid", "gamma": 1.5}, "labels"),
    "focal-sigmoid-soft": ({"probability": "sigmoid", "likelihood": "sigmoid", "gamma": 2.0}, "soft"),
}
# The shape of the logits: planes of several tiles, a volume, one class, and no spatial dimension.
SHAPES = {"2d": (2, 5, 6, 7), "3d": (1, 4, 3, 4, 5), "one-class": (3, 1, 8), "rows": (7, 3)}


def targets(shape, kind):
    N, K, *spatial = shape
    if kind == "labels":
        labels = torch.randint(K, (N, *spatial), dtype=torch.int16)
        labels.view(N, -1)[0, :1] = 255
        return labels
    values = torch.rand(shape)
    return values < 0.4 if kind == "regions" else values


def compare(x, target, options, mask=None, tolerance=1e-13):
    """Compares sums and the gradient of logits with the reference."""
    if target.shape != x.shape and options.get("ignore_index") != 255:
        target = target.clamp(max=x.shape[1] - 1)
    x.requires_grad_()
    (dx,) = compare_all([x], lambda x: x, SumsInputs(x, target, mask), options, tolerance)
    return dx


def compare_all(given, stock, inputs, options, tolerance):
    """Compares sums and the gradients of ``given``, of which ``stock`` makes the logits, with the reference."""
    logits, target, mask = inputs
    spec = {"probability": "softmax", "likelihood": "softmax", "ignore_index": None} | options
    ignore = spec.pop("ignore_index")
    sums = op.sums(inputs, SumsSpec(ignore=ignore, dense=target.shape == logits.shape, **spec))
    leaves = [t.detach().double().requires_grad_() for t in given]
    expected = reference.segmentation_sums(stock(*leaves), target, mask, **options)
    assert relative_error(sums, expected) <= tolerance
    dsums = torch.randn_like(sums)
    found = torch.autograd.grad(sums, given, dsums)
    wanted = torch.autograd.grad(expected, leaves, dsums.double(), materialize_grads=True)
    for t, mine, theirs in zip(given, found, wanted, strict=True):
        assert mine.dtype == t.dtype
        assert relative_error(mine, theirs) <= tolerance
    return found


@FORMATS
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(device, name, rows, monkeypatch):
    """Tiles hold few positions, or few samples.  ``tests/kernels/test_segmentation_sums.py`` has Triton's kernels."""
    options, kind = CASES[name]
    for shape in SHAPES.values():
        if shape[1] == 1 and kind == "labels":
            continue
        for size in (8, 100):
            monkeypatch.setattr(tiles, "TILE", size)
            x = torch.randn(shape, dtype=torch.float64, device=device)
            x = channels_last(x) if rows else x
            dx = compare(x, targets(shape, kind).to(device), options)
            assert dx.stride() == x.stride()


def test_masks_and_forms_of_labels(backend, device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device)
    labels = torch.randint(3, (2, 4, 5), device=device)
    weights = torch.rand(2, 4, 5, device=device)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float16):
        compare(x.clone(), labels.to(dtype), {"ignore_index": 1})
    compare(x.clone(), labels[:, None], {}, weights)
    compare(x.clone(), labels, {}, weights[:, None] < 0.5)


@pytest.mark.gpu
def test_uint8_labels_of_more_than_256_classes(backend, device):
    """The numbers of classes wrapped in uint8, so that label 0 also counted for class 256."""
    x = torch.randn(1, 300, 7, dtype=torch.float64, device=device)
    compare(x, torch.arange(7, dtype=torch.uint8, device=device).view(1, 7), {"squared": True, "ignore_index": 255})


@pytest.mark.gpu
@pytest.mark.parametrize("ignore", [-100, -1, 511, None], ids=str)
def test_uint8_labels_of_256_classes(ignore, backend, device):
    """Labels 156 and 255 were ignored, because -100 and -1 wrapped in uint8; without them, all labels were refused."""
    x = torch.randn(1, 256, 4, dtype=torch.float64, device=device)
    labels = torch.tensor([[156, 255, 0, 3]], dtype=torch.uint8, device=device)
    compare(x, labels, {"ignore_index": ignore})
    assert sum(count.sum() for count in tp_fp_fn(x, labels, ignore_index=ignore)[::2]) == 4


@pytest.mark.parametrize("K", [3, 20])
def test_a_fraction_is_cut_off_where_the_host_reads_no_value(backend, device, K, monkeypatch):
    """On a GPU, a label with a fraction counted for no class on aten."""
    monkeypatch.setattr(plain, "_has_cheap_values", lambda t: False)
    x, labels = torch.randn(2, K, 7, device=device), torch.randint(K, (2, 7), device=device)
    torch.testing.assert_close(segmentation_sums(x, labels + 0.25)[:4], segmentation_sums(x, labels)[:4])


@pytest.mark.gpu
@FORMATS
def test_half_precision(backend, device, rows):
    """The sums are computed in fp32, and rounded nowhere else; the gradient is rounded once; two steps are equal."""
    for dtype, u in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 2**-20)):
        x = torch.randn(2, 5, 4, 6, device=device).to(dtype)
        x = (channels_last(x) if rows else x).requires_grad_()
        labels = torch.randint(5, (2, 4, 6), device=device)
        sums = op.sums(SumsInputs(x, labels), SumsSpec("softmax", "softmax"))
        assert sums.dtype == torch.float32
        leaf = x.detach().double().requires_grad_()
        expected = reference.segmentation_sums(leaf, labels)
        assert relative_error(sums, expected) <= 1e-6
        dsums = torch.randn_like(sums)
        (dx,) = torch.autograd.grad(sums, x, dsums)
        (wanted,) = torch.autograd.grad(expected, leaf, dsums.double())
        assert relative_error(dx, wanted) <= u
        assert dx.stride() == x.stride()
        again = op.sums(SumsInputs(x, labels), SumsSpec("softmax", "softmax"))
        assert torch.equal(again, sums)
        assert torch.equal(torch.autograd.grad(again, x, dsums)[0], dx)


def test_a_class_of_many_positions_loses_nothing(device):
    """One fp32 number for a class lost 4e-4 of a class of 700,000 positions."""
    x = torch.zeros(1, 2, 1 << 20, device=device)
    x[:, 0] = 1.0
    sums = segmentation_sums(x, torch.zeros(1, 1 << 20, dtype=torch.uint8, device=device))
    p = torch.tensor(1.0).sigmoid().double()
    expected = torch.stack([p, p, torch.tensor(1.0), -p.log()]) * (1 << 20)
    found = torch.stack([sums.overlap[0, 0], sums.prediction[0, 0], sums.target[0, 0], sums.nll[0, 0]])
    assert relative_error(found, expected) <= 1e-6


def test_extreme_logits(backend, device):
    """A class with a logit of -inf counts for nothing, and large logits neither overflow nor lose the likelihood."""
    x = torch.tensor([[[-300.0, 90.0], [300.0, -90.0], [-torch.inf, -torch.inf]]], dtype=torch.float64, device=device)
    labels = torch.tensor([[0, 1]], device=device)
    compare(x, labels, {}, tolerance=1e-14)
    leaf = x[:, :2].detach()
    compare(leaf, torch.tensor([[[1.0, 0.0], [1.0, 1.0]]], device=device), CASES["regions"][0])
    for gamma in (0.5, 1.0, 2.0):
        compare(x.detach(), labels, {"gamma": gamma})
        compare(leaf.detach(), labels, {"likelihood": "sigmoid", "gamma": gamma})


def test_only_what_was_asked_for(device):
    x, labels = torch.randn(1, 3, 4, device=device), torch.zeros(1, 4, device=device)
    found = segmentation_sums(x, labels, probability="none")
    assert found.overlap is found.prediction is found.other_nll is None
    assert found.nll is not None
    found = segmentation_sums(x, labels, likelihood="none")
    assert found.nll is found.other_nll is None
    assert found.overlap is not None


@pytest.mark.gpu
@FORMATS
@pytest.mark.parametrize("kind", ["labels", "regions"])
def test_counts(backend, device, kind, rows):
    """Counts equal those of one-hot tensors, and ties go to the first class."""
    x = torch.randint(-2, 3, (2, 5, 4, 6), device=device).half()
    x = channels_last(x) if rows else x
    target, mask = targets(x.shape, kind).to(device), torch.rand(2, 4, 6, device=device) < 0.8
    classes = torch.arange(5, device=device).view(1, 5, 1, 1)
    for regions in (False, True) if kind == "regions" else (False,):
        counts = tp_fp_fn(x.requires_grad_(), target, mask, ignore_index=None if kind == "regions" else 255,
                          regions=regions)  # fmt: skip
        p = x > 0 if regions else x.argmax(1, keepdim=True) == classes
        y = target if kind == "regions" else target[:, None] == classes
        m = mask[:, None] & ((target != 255) if kind == "regions" else (target[:, None] != 255))
        expected = [(m & of).sum((2, 3)) for of in (p & y, p & ~y, ~p & y)]
        assert all(torch.equal(a, b) for a, b in zip(counts, expected, strict=True))
        assert counts.tp.dtype == torch.int64
    assert not counts.tp.requires_grad


@pytest.mark.gpu
@FORMATS
def test_argmax_labels(backend, device, rows, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 16)
    for K, dtype in ((1, torch.uint8), (5, torch.uint8), (300, torch.int16)):
        x = torch.randint(-9, 9, (2, K, 3, 4), device=device).float()
        labels = argmax_labels(channels_last(x) if rows else x)
        assert labels.dtype == dtype
        assert torch.equal(labels, x.argmax(1).to(dtype))
    assert argmax_labels(x[:0]).shape == (0, 3, 4)
    compiled = torch.compile(argmax_labels, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), labels)


def dice_ce(x, labels, **options):
    sums = segmentation_sums(x, labels, **options)
    return sums.nll.sum() / sums.target.sum() - (2 * sums.overlap / (sums.prediction + sums.target + 1)).mean()


def test_keeps_nothing_but_logits_and_target(backend, device):
    x = torch.randn(2, 4, 8, 8, device=device).requires_grad_()
    labels = torch.randint(4, (2, 8, 8), device=device)
    with SavedBytes([x, labels]) as saved:
        sums = op.sums(SumsInputs(x, labels), SumsSpec("softmax", "softmax"))
    saved.add_attributes(sums)
    assert saved.nbytes == 0
    del sums


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_peak_is_the_gradient_and_a_tile(dtype, record_property):
    """At (2, 118, 128**3), on tensors without values: beyond logits and labels, in units of the logits."""
    with FakeTensorMode():
        x = torch.empty(2, 118, 128, 128, 128, dtype=dtype)
        labels = torch.empty(2, 128, 128, 128, dtype=torch.int16)
        given, spec, dsums = SumsInputs(x, labels), SumsSpec("softmax", "softmax"), torch.empty(5, 2, 118)
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
