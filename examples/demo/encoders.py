"""Two encoders for two registered images: the T1 template and a motor activation map, in 2D axial slices.

The classes are the classes of the template and active grey matter, where the absolute z-value of the map is above 3.1.
The T1 image alone does not show activation, and the map alone does not show tissue.
"""

import dataclasses

import torch
from torch import nn

from fusedseg.unet import MultiEncoderUNet

from . import mni152, slices
from .problem import Problem, Scan, Size, Split, split_problem

SIZES = {
    "cpu": Size(2, (12, 24, 48, 96), batch=8, steps=200, learning_rate=2e-3, autocast=False),
    "cuda": Size(1, (64, 128, 256, 512), batch=32, steps=200, learning_rate=2e-3, autocast=True),
}
# The cut goes through the motor cortex, so that both parts contain activation.
SPLIT = Split(trained_below=-24.0, held_out_above=-16.0)
CLASSES = (*mni152.CLASSES, "active grey matter")
COLORS = (*mni152.COLORS, "#e4572e")
# A common threshold for z-maps.
ACTIVE = 3.1


def load(resolution: int, device: torch.device) -> Scan:
    scan = mni152.load(resolution, device, mni152.SLICES, activation=True)
    t1, z_values = scan.images
    active = (scan.labels == mni152.GREY) & (z_values.abs() > ACTIVE)
    labels = scan.labels.masked_fill(active, CLASSES.index("active grey matter"))
    return dataclasses.replace(scan, images=(t1, z_values / z_values.std()), labels=labels)


def problem(device: torch.device, size: Size | None = None) -> Problem:
    size = size or SIZES[device.type]
    whole = load(size.resolution, device)
    ventricles = len(whole.labels) * 46 // 100
    most_active = int((SPLIT.held_out(whole).labels == CLASSES.index("active grey matter")).sum(dim=(1, 2)).argmax())

    def network() -> nn.Module:
        return MultiEncoderUNet((1, 1), len(CLASSES), widths=size.widths, plain=True)

    return split_problem(
        SPLIT,
        whole,
        size,
        slices.draw,
        slices.as_batch,
        title="A U-Net of two encoders",
        inputs=("T1 image", "activation map"),
        classes=CLASSES,
        colors=COLORS,
        network=network,
        views={"held-out part of that slice": (ventricles,), "held-out part of the most active slice": (most_active,)},
    )
