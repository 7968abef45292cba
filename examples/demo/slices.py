"""2D axial slices of the MNI152 template: four classes from the T1 image."""

import torch
from torch import nn

from fusedseg.unet import UNet

from . import mni152
from .problem import Batch, Problem, Scan, Size, Split, split_problem

SIZES = {
    "cpu": Size(2, (16, 32, 64, 128), batch=8, steps=200, learning_rate=2e-3, autocast=False),
    "cuda": Size(1, (64, 128, 256, 512), batch=32, steps=200, learning_rate=2e-3, autocast=True),
}
SPLIT = Split(trained_below=4.0, held_out_above=12.0)


def as_batch(scan: Scan, chosen: torch.Tensor | slice = slice(None)) -> Batch:
    """A batch whose samples are axial slices."""
    return Batch(tuple(image[chosen][:, None] for image in scan.images), scan.labels[chosen])


def draw(scan: Scan, count: int, generator: torch.Generator) -> Batch:
    chosen = torch.randperm(len(scan.labels), generator=generator)[:count]
    return as_batch(scan, chosen.to(scan.labels.device))


def views(scan: Scan) -> dict[str, tuple[int | slice, ...]]:
    """A slice through the ventricles, which contains all classes, and a slice well above them."""
    count = len(scan.labels)
    return {"held-out part of that slice": (int(0.46 * count),), "held-out part of another slice": (int(0.68 * count),)}


def problem(device: torch.device, size: Size | None = None) -> Problem:
    size = size or SIZES[device.type]
    whole = mni152.load(size.resolution, device, mni152.SLICES)

    def network() -> nn.Module:
        return UNet(1, len(mni152.CLASSES), widths=size.widths, plain=True)

    return split_problem(
        SPLIT,
        whole,
        size,
        draw,
        as_batch,
        title="A 2D U-Net",
        network=network,
        views=views(whole),
        **mni152.TISSUES,
    )
