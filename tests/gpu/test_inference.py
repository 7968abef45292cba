"""Labels of images that are larger than an input of the model, against sums over the whole image in float64."""

import copy

import pytest
import torch

from fusedseg import sliding_window_labels
from fusedseg.functional import argmax_labels
from tests.inference.test_sliding_window import CASES, Net, mean_of_windows

pytestmark = pytest.mark.gpu
# Windows in several axes, padding, and one window.
CHOSEN = ("2d", "3d", "3d, one axis smaller than a window")
# A convolution and a weighted mean in each dtype: logits that are nearer to each other than this may change places.
NEAR = {torch.float32: 1e-4, torch.float16: 2e-2}


@pytest.mark.parametrize("name", CHOSEN)
def test_labels(device, name):
    shape, roi, overlap = CASES[name]
    for dtype, near in NEAR.items():
        model, image = Net(len(roi), dtype), torch.randn(shape).to(dtype)
        for mode in ("constant", "gaussian"):
            exact = copy.deepcopy(model).double()
            # The ramp of the model, in the dtype of its input.
            logits = mean_of_windows(exact, image.double(), roi, overlap, mode)
            options = {"mode": mode, "sw_batch_size": 3}
            run = copy.deepcopy(model).to(device)
            labels = sliding_window_labels(run, image.to(device), roi, overlap, **options)
            assert labels.device.type == device.type
            assert labels.dtype == torch.uint8
            best = logits.topk(2, dim=1).values
            clear = best[:, 0] - best[:, 1] > near
            assert clear.double().mean() > 0.9
            assert torch.equal(labels.cpu()[clear], argmax_labels(logits)[clear])
            masks = sliding_window_labels(run, image.to(device), roi, overlap, regions=True, **options)
            clear = logits.abs() > near
            assert torch.equal(masks.cpu()[clear], (logits > 0)[clear])
            again = sliding_window_labels(run, image.to(device), roi, overlap, **options)
            assert torch.equal(again, labels)
