"""The MNI152 template in 3D: patches of 48 x 48 x 48 voxels of 2 mm, and four classes from the T1 image.

The network has the shape of ``fusedseg.unet.unet3d_small``; on a CPU it is narrower.
"""

import torch
from torch import nn

from fusedseg.unet import unet3d_small

from . import mni152
from .problem import Batch, Problem, Scan, Size, Split, split_problem

SIZES = {
    "cpu": Size(2, (8, 16, 32, 32), batch=2, steps=100, learning_rate=4e-3, autocast=False),
    "cuda": Size(2, (64, 128, 256, 256), batch=4, steps=150, learning_rate=4e-3, autocast=True),
}
SPLIT = Split(trained_below=4.0, held_out_above=12.0)
PATCH = 48


def draw(scan: Scan, count: int, generator: torch.Generator) -> Batch:
    """A batch of patches at random positions."""
    starts = [torch.randint(size - PATCH + 1, (count,), generator=generator).tolist() for size in scan.labels.shape]
    boxes = [tuple(slice(start, start + PATCH) for start in at) for at in zip(*starts, strict=True)]
    images = tuple(torch.stack([image[box] for box in boxes])[:, None] for image in scan.images)
    return Batch(images, torch.stack([scan.labels[box] for box in boxes]))


def as_batch(scan: Scan) -> Batch:
    """The whole scan as one sample."""
    return Batch(tuple(image[None, None] for image in scan.images), scan.labels[None])


def problem(device: torch.device, size: Size | None = None) -> Problem:
    size = size or SIZES[device.type]
    whole = mni152.load(size.resolution, device)
    up_widths = tuple(reversed(size.widths[:-1]))

    def network() -> nn.Module:
        return unet3d_small(1, len(mni152.CLASSES), widths=size.widths, up_widths=up_widths, plain=True)

    depth, length, _ = SPLIT.held_out(whole).labels.shape
    return split_problem(
        SPLIT,
        whole,
        size,
        draw,
        as_batch,
        title="A 3D U-Net",
        network=network,
        views={
            "held-out part of that slice": (0, depth // 2),
            "held-out part, cut upright": (0, slice(None), length // 4),
        },
        **mni152.TISSUES,
    )
