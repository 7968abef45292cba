"""The MNI152 brain template and a motor activation map in its space, both from the nilearn wheel.

The class of a voxel is the most probable one of background, fluid, grey matter and white matter.

Sources: Fonov et al., "Unbiased average age-appropriate atlases for pediatric studies", NeuroImage 2011; the map is
image 10426 of neurovault.org, pressing a button with the left against the right hand.
"""

from typing import Any

import numpy as np
import torch

from .problem import Scan

CLASSES = ("background", "fluid", "grey matter", "white matter")
COLORS = ("#1b1b1f", "#4cc9f0", "#9a9a9a", "#f5f1e3")
# The inputs and classes of a network that sees only the template, as fields of a ``Problem``.
TISSUES: dict[str, Any] = {"inputs": ("T1 image",), "classes": CLASSES, "colors": COLORS}
GREY = CLASSES.index("grey matter")
# The box of the brain in the MNI space, in mm, and the range of axial slices that contain much of it.
X_RANGE, Y_RANGE, Z_RANGE = (-84.0, 84.0), (-112.0, 80.0), (-72.0, 84.0)
SLICES = (-50.0, 70.0)
# Voxels above this value are brain; the template is zero around it.
BRAIN = 0.1


def load(
    resolution: int, device: torch.device, z_range: tuple[float, float] = Z_RANGE, activation: bool = False
) -> Scan:
    """The template at a resolution in mm, cut to the brain's box.

    Images have mean 0 and deviation 1.  With ``activation`` the activation map is the second image, in z-values.
    """
    from nilearn import datasets, image

    t1_image = datasets.load_mni152_template(resolution=resolution)
    others = [
        datasets.load_mni152_gm_template(resolution=resolution),
        datasets.load_mni152_wm_template(resolution=resolution),
    ]
    if activation:
        # The map has its own grid of 3 mm.
        others.append(image.resample_to_img(datasets.load_sample_motor_activation_image(), t1_image))
    t1, grey, white, *maps = (np.asarray(one.get_fdata(), dtype=np.float32) for one in (t1_image, *others))
    brain = (t1 > BRAIN).astype(np.float32)
    labels = np.stack([1 - brain, brain * np.clip(1 - grey - white, 0, 1), brain * grey, brain * white]).argmax(axis=0)
    position = [t1_image.affine[axis, 3] + resolution * np.arange(t1.shape[axis]) for axis in range(3)]
    ranges = (X_RANGE, Y_RANGE, z_range)
    box = np.ix_(*((low <= at) & (at <= high) for at, (low, high) in zip(position, ranges, strict=True)))
    # The axes (x, y, z) become (z, y, x), which is a batch of axial slices.
    t1, labels, *maps = (values[box].T.copy() for values in (t1, labels, *maps))
    images = ((t1 - t1.mean()) / t1.std(), *maps)
    y = torch.from_numpy(position[1][box[1].squeeze()])
    return Scan(tuple(torch.from_numpy(one).to(device) for one in images), torch.from_numpy(labels).to(device), y)
