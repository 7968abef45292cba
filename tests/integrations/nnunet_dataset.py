"""A small dataset in nnU-Net's raw format: pieces of the MNI152 template with noise, and its tissue classes."""

import json
from pathlib import Path

import nibabel
import numpy as np
import torch

from examples.demo.mni152 import CLASSES, load

NAME = "Dataset901_MNI152"
CASES = 6


def write_raw(folder: Path) -> None:
    """Writes ``CASES`` volumes of 48×56×48 voxels of 3 mm, and their labels, below ``folder``."""
    scan = load(3, torch.device("cpu"))
    image, labels = scan.images[0].numpy(), scan.labels.numpy()
    home = folder / NAME
    for part in ("imagesTr", "labelsTr"):
        (home / part).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for case in range(CASES):
        corner = [int(rng.integers(0, have - want + 1)) for have, want in zip(image.shape, (48, 56, 48), strict=True)]
        box = tuple(slice(at, at + want) for at, want in zip(corner, (48, 56, 48), strict=True))
        noisy = image[box] + 0.1 * rng.standard_normal(image[box].shape).astype(np.float32)
        flip = -1 if case % 2 else 1
        for part, name, values in (
            ("imagesTr", f"case_{case}_0000", noisy),
            ("labelsTr", f"case_{case}", labels[box].astype(np.uint8)),
        ):
            made = nibabel.Nifti1Image(np.ascontiguousarray(values[:, :, ::flip]), np.diag((3.0, 3.0, 3.0, 1.0)))
            nibabel.save(made, home / part / f"{name}.nii.gz")
    description = {
        "channel_names": {"0": "T1"},
        "labels": {name.replace(" ", "_"): label for label, name in enumerate(CLASSES)},
        "numTraining": CASES,
        "file_ending": ".nii.gz",
    }
    (home / "dataset.json").write_text(json.dumps(description))
