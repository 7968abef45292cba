"""Sums, losses, counts and labels of logits that are not formed, against stock convolution and interpolation."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusedseg.functional import ConvLogits, argmax_labels, segmentation_sums, tp_fp_fn
from fusedseg.memory import SavedBytes
from fusedseg.memory.meter import LiveBytes
from fusedseg.ops.segmentation import sums as op
from fusedseg.ops.segmentation import tiles
from fusedseg.ops.segmentation.spec import SumsInputs, SumsSpec
from tests import reference
from tests.ops.test_segmentation_sums import compare_all, dice_ce
from tests.reference import relative_error
from tests.tools.tensors import channels_last

# The spatial shape of the features, the size of the logits, and align_corners.
GEOMETRIES = {
    "rows": ((), None, False),
    "2d": ((5, 4), None, False),
    "3d": ((3, 4, 5), None, False),
    "2d-larger": ((5, 4), (13, 9), False),
    "2d-aligned": ((5, 4), (13, 9), True),
    "3d-larger": ((3, 4, 5), (7, 8, 10), False),
    "3d-aligned": ((3, 4, 5), (7, 8, 10), True),
    # The single plane was never repeated: the sums were wrong, or the shapes of logits and target differed.
    "3d-from-one-plane": ((1, 4, 5), (3, 8, 10), False),
    "3d-smaller": ((9, 8, 7), (2, 3, 3), False),
    "one-axis": ((3, 4, 5), (3, 9, 5), True),
    "to-one": ((9, 8), (1, 1), False),
    "to-one-aligned": ((9, 8), (1, 1), True),
    "from-one-aligned": ((1, 1), (3, 4), True),
}
SPECS = {
    "dice-ce": ({"ignore_index": 2}, "labels"),
    "smoothed": ({"likelihood": "smoothed"}, "labels"),
    "regions": ({"probability": "sigmoid", "likelihood": "sigmoid"}, "regions"),
    "squared": ({"squared": True}, "soft"),
}
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def stock(h, weight, bias, size, align):
    dims = h.dim() - 2
    convolve = (F.linear, F.conv1d, F.conv2d, F.conv3d)[dims]
    z = convolve(h, weight.view(*weight.shape[:2], *(1,) * dims), bias)
    return z if size is None else F.interpolate(z, size, mode=MODES[dims], align_corners=align)


def tensors(spatial, K=4, C=6, dtype=torch.float64):
    h, weight, bias = torch.randn(2, C, *spatial), torch.randn(K, C), torch.randn(K)
    return [t.to(dtype).requires_grad_() for t in (h, weight, bias)]


def target_of(logits, kind="labels"):
    N, K, *spatial = logits.shape
    return torch.randint(K, (N, *spatial)) if kind == "labels" else (
        torch.rand(logits.shape) < 0.4 if kind == "regions" else torch.rand(logits.shape, dtype=torch.float64)
    )  # fmt: skip


def compare(given, size, align, options, target, mask=None, tolerance=1e-13):
    inputs = SumsInputs(ConvLogits(*given, size, align), target, mask)
    return compare_all(given, lambda *leaves: stock(*leaves, size, align), inputs, options, tolerance)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_against_the_reference(name, monkeypatch):
    """Tiles of a few positions, and of all positions of the small cases, in both memory formats."""
    spatial, size, align = GEOMETRIES[name]
    for tile, fmt in ((40, channels_last), (400, torch.clone)):
        monkeypatch.setattr(tiles, "TILE", tile)
        for options, kind in SPECS.values():
            h, weight, bias = tensors(spatial)
            given = [fmt(h.detach()).requires_grad_(), weight, bias]
            target = target_of(ConvLogits(*given, size, align), kind)
            mask = torch.rand(2, 1, *(size or spatial)) if kind == "labels" else None
            dh, *_ = compare(given, size, align, options, target, mask)
            assert dh.stride() == given[0].stride()


def test_half_precision_is_rounded_once(monkeypatch):
    """The gradients of weight and bias are sums over all tiles; in half precision they would lose their small parts."""
    monkeypatch.setattr(tiles, "TILE", 64)
    for dtype, u in ((torch.float16, 2**-11), (torch.bfloat16, 2**-8), (torch.float32, 2**-20)):
        for size in (None, (40, 40)):
            given = tensors((20, 20), dtype=dtype)
            compare(given, size, False, {}, target_of(ConvLogits(*given, size)), tolerance=u)


@pytest.mark.parametrize("size", [None, (9, 9)], ids=["same", "larger"])
def test_autocast(size):
    """Operands are rounded as for a stock convolution, and the products of tiles are not."""
    given = tensors((5, 4), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = ConvLogits(*given, size)
        labels = target_of(logits)
        inside = segmentation_sums(logits, labels).nll.sum()
        assert logits.formed().dtype == torch.bfloat16
    outside = segmentation_sums(logits, labels).nll.sum()
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in given]
    expected = reference.segmentation_sums(stock(*leaves, size, False), labels)[3].sum()
    wanted = torch.autograd.grad(expected, leaves)
    for loss in (inside, outside):
        assert relative_error(loss, expected) <= 1e-6
        for grad, of in zip(torch.autograd.grad(loss, given), wanted, strict=True):
            assert grad.dtype == torch.float32
            assert relative_error(grad, of) <= 1e-5


@pytest.mark.parametrize("name", ["rows", "2d", "2d-aligned", "3d-larger"])
def test_counts_and_labels(name, monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 40)
    spatial, size, align = GEOMETRIES[name]
    logits = ConvLogits(*tensors(spatial), size, align)
    labels = target_of(logits)
    assert torch.equal(argmax_labels(logits), argmax_labels(logits.formed()))
    assert all(map(torch.equal, tp_fp_fn(logits, labels), tp_fp_fn(logits.formed(), labels)))


def test_gradients_that_nobody_needs():
    """A frozen weight, frozen features, no bias, and a weight of two heads."""
    h, weight, bias = tensors((5, 4))
    labels = torch.randint(4, (2, 5, 4))
    loss = lambda *given: dice_ce(ConvLogits(*given), labels)  # noqa: E731
    expected = torch.autograd.grad(loss(h, weight, bias), (h, weight, bias))
    assert torch.equal(torch.autograd.grad(loss(h, weight.detach(), bias.detach()), h)[0], expected[0])
    assert torch.equal(torch.autograd.grad(loss(h.detach(), weight, bias), weight)[0], expected[1])
    assert not loss(h.detach(), weight.detach(), None).requires_grad
    twice = torch.autograd.grad(loss(h, weight, bias) + loss(h, weight, None), weight)[0]
    assert torch.equal(twice, expected[1] + torch.autograd.grad(loss(h, weight, None), weight)[0])


def test_keeps_nothing_but_its_arguments():
    for size in (None, (9, 9)):
        given = tensors((5, 4))
        logits = ConvLogits(*given, size)
        labels = target_of(logits)
        with SavedBytes([*given, labels]) as saved:
            sums = op.sums(SumsInputs(logits, labels), SumsSpec("softmax", "softmax"))
        saved.add_attributes(sums)
        assert saved.nbytes == 0


@pytest.mark.parametrize(
    ("shape", "size", "most"),
    [
        ((2, 32, 128, 128, 128), None, 271),
        ((2, 32, 64, 64, 64), (128, 128, 128), 60),
        ((1, 256, 128, 128), (512, 512), 40),
    ],
    ids=["same", "3d", "2d"],
)
def test_the_peak_is_the_gradient_of_the_features(shape, size, most, record_property):
    """In MiB, for 118 classes in fp16, on tensors without values.  The logits take 944, 944 and 59 MiB."""
    with FakeTensorMode():
        shapes = shape, (118, shape[1]), 118
        h, weight, bias = (torch.empty(of, dtype=torch.float16, requires_grad=True) for of in shapes)
        labels = torch.empty(shape[0], *(size or shape[2:]), dtype=torch.uint8)
        with LiveBytes() as live:
            dice_ce(ConvLogits(h, weight, bias, size), labels).backward()
    record_property("peak", live.peak / 2**20)
    assert h.nbytes <= live.peak <= most * 2**20


def test_empty():
    for spatial, size in (((0, 4), None), ((3, 4), (6, 8))):
        h, weight, bias = tensors(spatial)
        h = h if size is None else h[:0].detach().requires_grad_()
        labels = torch.zeros(h.shape[0], *(size or spatial))
        sums = segmentation_sums(ConvLogits(h, weight, bias, size), labels)
        assert sums.overlap.shape == (h.shape[0], 4)
        assert torch.autograd.grad(sums.overlap.sum(), h)[0].shape == h.shape
