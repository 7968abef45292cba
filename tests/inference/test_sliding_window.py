"""``sliding_window_labels`` gives the labels of sums over the whole image, and holds less."""

import itertools
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusedseg import progress, sliding_window_labels
from fusedseg.inference.windows import Windows, importance
from fusedseg.memory.meter import LiveBytes

K, SINGLE, HALF = 5, torch.float32, torch.float16


class Net(nn.Module):
    """Logits that depend on the position in the window, so that overlapping windows disagree."""

    def __init__(self, dims, dtype=torch.float32):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.conv = conv(2, K, 3, padding=1, dtype=dtype)

    def forward(self, x):
        ramp = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        return self.conv(x) + ramp


def mean_of_windows(model, image, roi, overlap, mode="constant", pad="constant", cval=0.0):
    """Logits of the whole image, window by window, as MONAI defines them."""
    spatial = image.shape[2:]
    missing = [max(r - n, 0) for r, n in zip(roi, spatial, strict=True)]
    pads = [p for m in reversed(missing) for p in (m // 2, m - m // 2)]
    image = F.pad(image, pads, pad, cval) if any(pads) else image
    starts = []
    for n, r, o in zip(image.shape[2:], roi, overlap, strict=True):
        step, found = max(int(r * (1 - o)), 1), [0]
        while found[-1] + r < n:
            found.append(min(found[-1] + step, n - r))
        starts.append(found)
    weight = torch.ones(())
    for r in roi:
        if mode == "gaussian":
            x = torch.arange(r, dtype=torch.float32) - (r - 1) / 2
            line = torch.exp(x**2 / (-2 * (r * 0.125) ** 2))
        else:
            line = torch.ones(r)
        weight = weight.unsqueeze(-1) * line
    weight = weight.clamp(min=1e-3).to(image.dtype)
    total, count = image.new_zeros(image.shape[0], K, *image.shape[2:]), image.new_zeros(image.shape[2:])
    for at in itertools.product(*starts):
        where = tuple(slice(a, a + r) for a, r in zip(at, roi, strict=True))
        total[(..., *where)] += model(image[(..., *where)].contiguous()).detach() * weight
        count[where] += weight
    crop = tuple(slice(m // 2, m // 2 + n) for m, n in zip(missing, spatial, strict=True))
    return (total / count)[(..., *crop)]


CASES = {
    "1d": ((2, 2, 37), (8,), (0.5,)),
    "2d": ((2, 2, 23, 19), (8, 6), (0.25, 0.5)),
    "2d, overlap of most of a window": ((1, 2, 12, 9), (5, 5), (0.9, 0.8)),
    "3d": ((2, 2, 13, 11, 14), (6, 4, 5), (0.5, 0.25, 0.5)),
    "3d, no overlap": ((1, 2, 9, 8, 7), (4, 4, 4), (0.0, 0.0, 0.0)),
    "3d, one axis smaller than a window": ((2, 2, 5, 11, 7), (8, 6, 7), (0.5, 0.5, 0.5)),
    "3d, one window": ((1, 2, 4, 4, 4), (4, 4, 4), (0.5, 0.5, 0.5)),
}
PARAMETRIZE = pytest.mark.parametrize(("shape", "roi", "overlap"), CASES.values(), ids=CASES)


@PARAMETRIZE
@pytest.mark.parametrize("mode", ["constant", "gaussian"])
def test_labels_of_the_whole_image(shape, roi, overlap, mode):
    model, image = Net(len(roi)), torch.randn(shape)
    logits = mean_of_windows(model, image, roi, overlap, mode)
    for batch in (1, 3):
        labels = sliding_window_labels(model, image, roi, overlap, mode=mode, sw_batch_size=batch)
        assert labels.dtype == torch.uint8
        assert labels.is_contiguous()
        assert torch.equal(labels, logits.argmax(1).to(torch.uint8))
    masks = sliding_window_labels(model, image, roi, overlap, mode=mode, regions=True)
    assert torch.equal(masks, logits > 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_near_ties_in_half_precision(dtype):
    """Sums of half precision have many ties, which another order of the windows decides in another way."""
    model, image = Net(3, dtype), torch.randn(1, 2, 12, 14, 10, dtype=dtype)
    model.conv.weight.data.mul_(0.02)
    model.conv.bias.data.zero_()
    roi, overlap = (6, 6, 4), (0.5, 0.7, 0.5)
    logits = mean_of_windows(model, image, roi, overlap, "gaussian")
    labels = sliding_window_labels(model, image, roi, overlap, mode="gaussian")
    assert torch.equal(labels, logits.argmax(1).to(torch.uint8))
    turned = mean_of_windows(
        lambda x: model(x.movedim(2, -1)).movedim(-1, 2), image.movedim(-1, 2), (4, 6, 6), (0.5, 0.5, 0.7), "gaussian"
    )
    assert not torch.equal(turned.movedim(2, -1), logits)


def test_half_precision_of_the_model_alone():
    """A product of weight and prediction is rounded to the dtype of the prediction, as in MONAI."""
    model, image = Net(2, torch.float16), torch.randn(1, 2, 13, 12)
    weight = importance((6, 6), (0.75, 0.75), torch.device("cpu"))
    total, count = torch.zeros(1, K, 13, 12), torch.zeros(13, 12)
    for a, b in itertools.product((0, 3, 6, 7), (0, 3, 6)):
        at = (..., slice(a, a + 6), slice(b, b + 6))
        total[at] += (model(image[at].half()).detach() * weight).half()
        count[at] += weight
    labels = sliding_window_labels(lambda x: model(x.half()), image, 6, 0.5, mode="gaussian")
    assert torch.equal(labels, (total / count).argmax(1).to(torch.uint8))


@pytest.mark.parametrize(("pad", "cval"), [("constant", 1.5), ("reflect", 0.0), ("replicate", 0.0), ("circular", 0.0)])
def test_padding(pad, cval):
    model, image = Net(2), torch.randn(1, 2, 5, 12)
    logits = mean_of_windows(model, image, (8, 6), (0.5, 0.5), pad=pad, cval=cval)
    labels = sliding_window_labels(model, image, (8, 6), 0.5, padding_mode=pad, cval=cval)
    assert torch.equal(labels, logits.argmax(1).to(torch.uint8))


def test_roi_of_the_size_of_the_image():
    model, image = Net(2), torch.randn(1, 2, 9, 12)
    logits = mean_of_windows(model, image, (9, 6), (0.25, 0.25))
    for first in (None, -1, 0):
        assert torch.equal(sliding_window_labels(model, image, (first, 6)), logits.argmax(1).to(torch.uint8))


def test_mirrored_windows():
    model, image = Net(2), torch.randn(2, 2, 13, 12)

    def mirrored(x):
        parts = [model(x), *(model(x.flip(axes)).flip(axes) for axes in ((2,), (3,), (2, 3)))]
        return (parts[0] + parts[1] + parts[2] + parts[3]) / 4

    logits = mean_of_windows(mirrored, image, (6, 6), (0.5, 0.5))
    masks = sliding_window_labels(model, image, 6, 0.5, mirror=(0, 1), regions=True)
    assert torch.equal(masks, logits > 0)


def test_regions_in_an_order():
    model, image = Net(2), torch.randn(2, 2, 13, 12)
    masks = sliding_window_labels(model, image, 6, 0.5, regions=True)
    labels = sliding_window_labels(model, image, 6, 0.5, regions=(1, 300, 2, 7, 3))
    expected = torch.zeros(2, 13, 12, dtype=torch.int16)
    for k, label in enumerate((1, 300, 2, 7, 3)):
        expected[masks[:, k]] = label
    assert labels.dtype == torch.int16
    assert torch.equal(labels, expected)


def test_more_than_256_classes():
    x = torch.randn(1, 300, 7)
    labels = sliding_window_labels(lambda x: x, x, 7)
    assert labels.dtype == torch.int16
    assert torch.equal(labels, x.argmax(1).short())


def test_nothing_of_the_caller_changes():
    """Windows and predictions are no views that the function or the model could write over."""
    image = torch.randn(1, 3, 12)
    kept, answer = image.clone(), torch.randn(1, 3, 6)
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)).train()
    sliding_window_labels(model, image, 6)
    assert torch.equal(image, kept)
    assert model.training
    assert model[1].training
    kept = answer.clone()
    sliding_window_labels(lambda x: answer, image, 6, 0.5, mode="gaussian", mirror=(0,))
    assert torch.equal(answer, kept)


@PARAMETRIZE
def test_no_window_touches_a_cell_after_its_last_one(shape, roi, overlap):
    image = tuple(max(n, r) for n, r in zip(shape[2:], roi, strict=True))
    windows = Windows.of(image, roi, overlap)
    touched = [(at, windows.last(at), window) for window in windows.indices for at, _, _ in windows.cells(window)]
    for where in {str(where) for where, _, _ in touched}:
        of_cell = [(last, window) for found, last, window in touched if str(found) == where]
        assert {last for last, _ in of_cell} == {of_cell[-1][1]}
    # The cells fill the image without gaps and overlaps.
    covered = torch.zeros(image)
    for where, last, window in touched:
        if last == window:
            covered[where] += 1
    assert (covered == 1).all()


def of_118_classes(x):
    return x.new_empty(len(x), 118, *x.shape[2:])


def live_peak(model, shape, dtype, **options):
    with FakeTensorMode(), LiveBytes() as live:
        sliding_window_labels(model, torch.empty(shape, dtype=dtype), **options)
    return live.peak


def test_sums_of_the_whole_image_are_never_held():
    """118 classes, 320 x 320 x 400, windows of 128, overlap 0.5: nnU-Net holds 9.5 GiB, MONAI 10.0, or 20.0 in fp32."""
    options = {"roi": 128, "overlap": 0.5, "mode": "gaussian"}
    peak = live_peak(of_118_classes, (1, 1, 320, 320, 400), torch.float16, **options)
    # Half of a window of planes (1.80 GiB), one window of rows in it (0.72), the prediction (0.46), the product of a
    # cell (0.12), image and labels (0.11).
    assert peak < 3.25 * 2**30


def test_a_longer_first_axis_adds_the_bytes_of_image_and_labels_alone():
    options = {"roi": 64, "overlap": 0.5, "mode": "gaussian"}
    peaks = [live_peak(of_118_classes, (1, 1, n, 96, 64), torch.float16, **options) for n in (128, 192)]
    assert peaks[1] - peaks[0] == 64 * 96 * 64 * 3


def test_progress_on_a_terminal(monkeypatch):
    lines = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress.Progress, "update", lambda self, text: lines.append(text))
    sliding_window_labels(Net(1), torch.randn(1, 2, 37), 8, 0.5, sw_batch_size=4, progress=True)
    assert lines == ["window 4 of 9", "window 8 of 9", "window 9 of 9"]


def test_numbers_of_numpy():
    """Sizes from a plan of nnU-Net or a header of NIfTI were refused as no integers."""
    model, image = Net(2), torch.randn(1, 2, 9, 9)
    expected = sliding_window_labels(model, image, (4, 4), (0.5, 0.25), mirror=(0,), regions=(1, 2, 3, 4, 5))
    roi, overlap = np.array([4, 4]), np.array([0.5, 0.25])
    found = sliding_window_labels(model, image, roi, overlap, mirror=np.array([0]), regions=np.arange(1, 6))
    assert torch.equal(found, expected)
    assert torch.equal(sliding_window_labels(model, image, np.int64(4)), sliding_window_labels(model, image, 4))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes of exceptions")
def test_an_error_of_the_model_has_the_shape_of_windows():
    """An image without a batch dimension and one number as roi gave an error of a convolution that named neither."""
    with pytest.raises(RuntimeError, match="expected input") as caught:
        sliding_window_labels(nn.Conv2d(3, 2, 1), torch.randn(3, 20, 20), 8)
    (note,) = caught.value.__notes__
    assert "windows (n, C, *roi) = (1, 20, 8); if image has no batch dimension, pass image[None]" in note
    # PyTorch's convolutions take an image of one channel without a batch dimension.
    with pytest.raises(ValueError, match=r"got \(2, 20, 8\)") as caught:
        sliding_window_labels(nn.Conv2d(1, 2, 1), torch.randn(1, 20, 20), 8)
    assert "pass image[None]" in caught.value.__notes__[0]


@pytest.mark.parametrize(("shape", "roi", "overlap"), list(CASES.values())[::4], ids=list(CASES)[::4])
def test_as_monai(shape, roi, overlap):
    """CI compares with the formula above; monai is needed nowhere else, and ``pip install --no-deps`` is enough."""
    inferers = pytest.importorskip("monai.inferers")
    dims = len(roi)
    options = itertools.product(
        ("constant", "gaussian"),
        (0.125, (0.3, 0.2, 0.1)[:dims]),
        (1, 4),
        ("constant", "replicate"),
        (torch.float32, HALF),
    )
    for mode, sigma_scale, batch, pad, dtype in options:
        model, image = Net(dims, dtype), torch.randn(shape, dtype=dtype)
        given = {"overlap": overlap, "mode": mode, "sigma_scale": sigma_scale, "padding_mode": pad}
        stock = inferers.SlidingWindowInferer(roi, batch, **given)
        with torch.no_grad():
            expected = stock(image, model).argmax(1)
        labels = sliding_window_labels(model, image, roi, sw_batch_size=batch, **given)
        assert torch.equal(labels, expected.to(torch.uint8))
        # Autocast of a CPU takes bf16, and refuses tensors in fp16.
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == SINGLE):
            expected = stock(image, model) > 0
            masks = sliding_window_labels(model, image, roi, sw_batch_size=batch, regions=True, **given)
        assert torch.equal(masks, expected)
