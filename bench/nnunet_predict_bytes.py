"""Time and bytes of a prediction with 118 classes, nnU-Net's predictor beside ours.

python -m bench.nnunet_predict_bytes                 # 80 x 80 x 100 on this machine, a process each
python -m bench.nnunet_predict_bytes count           # ours at 320 x 320 x 400, on tensors without values
"""

import contextlib
import hashlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from torch._subclasses import FakeTensorMode

from fusedseg.integrations.nnunet.predictor import FusedPredictor
from fusedseg.integrations.nnunet.resampling import ResampledAxis, SlabLabels
from fusedseg.memory.meter import LiveBytes
from tests.integrations.nnunet_plans import dataset_json, image, planned, predictor

CLASSES = 118
KINDS = {"nnU-Net": nnUNetPredictor, "fusedseg": FusedPredictor}
MIB = 2**20


def made(kind: type, patch: tuple[int, ...]):
    described = dataset_json(CLASSES)
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched, quiet:
        plans = planned(Path(folder), patched, described, (48, 48, 48), (1.0, 1.0, 1.0))
    plans["configurations"]["3d_fullres"]["patch_size"] = list(patch)
    return predictor(kind, plans, described, "3d_fullres")


def measured(name: str) -> None:
    """One prediction in this process, of an image whose spacing is not that of the plans."""
    prediction = made(KINDS[name], (40, 40, 48))
    values, properties = image((80, 80, 100), (1.1, 1.1, 1.1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    labels = prediction.predict_single_npy_array(values, properties)
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    digest = hashlib.sha256(labels.tobytes()).hexdigest()[:8]
    print(f"RESULT {name}: {(peak - before) / MIB:.0f} MiB beyond the imports, {took:.1f} s, labels {digest}")


def counted() -> None:
    """The peak of our predictor for 320 x 320 x 400 and windows of 128, with predictions in half precision as on a GPU.

    The image, the labels, and the predictions of a window count; the network's own activations do not.
    """
    device = torch.device("cpu")
    prediction = made(FusedPredictor, (128, 128, 128))
    prediction.network, prediction.list_of_parameters = torch.nn.Identity(), None
    prediction._internal_maybe_mirror_and_predict = lambda x: x.new_empty(1, CLASSES, *x.shape[2:], dtype=torch.half)
    weights = prediction._weights((128, 128, 128), device)
    axes = tuple(ResampledAxis.of(n, m, linear=True) for n, m in ((320, 340), (320, 340), (400, 420)))
    labels = SlabLabels(axes, CLASSES, device)
    labels.block = SlabLabels.BLOCK_GPU // labels.labels[0].numel()
    prediction._weights = lambda size, device: weights
    prediction._slab_labels = lambda *arguments: labels
    with pytest.MonkeyPatch.context() as patched, FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live:
        # Tensors without values cannot be asked.
        patched.setattr(torch, "isfinite", lambda logits: np.ones(1, bool))
        labels.labels = torch.empty_like(labels.labels)
        prediction._labels(torch.empty(1, 320, 320, 400), {}, device)
    print(f"RESULT fusedseg, 320 x 320 x 400: {live.peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            for name in KINDS:
                subprocess.run([sys.executable, "-m", "bench.nnunet_predict_bytes", name], check=True)
        case ["count"]:
            counted()
        case [name]:
            measured(name)
