"""The MNI152 brain template and a motor activation map in its space, which the nilearn wheel carries.

The classes of the template are the most probable of background, fluid, grey and white matter.

Sources: Fonov et al., "Unbiased average age-appropriate atlases for pediatric studies", NeuroImage 2011; the map is
image 10426 of neurovault.org, pressing a button with the left against the right hand.
"""

from typing import Any

import numpy as np
import torch

from .problem import Scan

CLASSES = ("background", "fluid", "grey matter", "white matter")
COLORS = ("#1b1b1f", "#4cc9f0", "#9a9a9a", "#f5f1e3")
# what the network sees and tells apart: fields of a ``Problem``
TISSUES: dict[str, Any] = {"inputs": ("T1 image",), "classes": CLASSES, "colors": COLORS}
GREY = CLASSES.index("grey matter")
# the brain's box in the MNI space, in mm, and the axial slices that hold much of it
X_RANGE, Y_RANGE, Z_RANGE = (-84.0, 84.0), (-112.0, 80.0), (-72.0, 84.0)
SLICES = (-50.0, 70.0)
# brighter than this is brain: the template is zero around it
BRAIN = 0.1


def load(
    resolution: int, device: torch.device, z_range: tuple[float, float] = Z_RANGE, activation: bool = False
) -> Scan:
    """The template at a resolution in mm, cut to the brain's box.

    Images have mean 0 and deviation 1, but for the activation map, the second image where asked for: it stays in the
    units of its z-values.
    """
    from nilearn import datasets, image

    t1_image = datasets.load_mni152_template(resolution=resolution)
    others = [
        datasets.load_mni152_gm_template(resolution=resolution),
        datasets.load_mni152_wm_template(resolution=resolution),
    ]
    if activation:
        # the map has a grid of 3 mm of its own
        others.append(image.resample_to_img(datasets.load_sample_motor_activation_image(), t1_image))
    t1, grey, white, *maps = (np.asarray(one.get_fdata(), dtype=np.float32) for one in (t1_image, *others))
    brain = (t1 > BRAIN).astype(np.float32)
    labels = np.stack([1 - brain, brain * np.clip(1 - grey - white, 0, 1), brain * grey, brain * white]).argmax(axis=0)
    position = [t1_image.affine[axis, 3] + resolution * np.arange(t1.shape[axis]) for axis in range(3)]
    ranges = (X_RANGE, Y_RANGE, z_range)
    box = np.ix_(*((low <= at) & (at <= high) for at, (low, high) in zip(position, ranges, strict=True)))
    # (x, y, z) to (z, y, x): a batch of axial slices
    t1, labels, *maps = (values[box].T.copy() for values in (t1, labels, *maps))
    images = ((t1 - t1.mean()) / t1.std(), *maps)
    y = torch.from_numpy(position[1][box[1].squeeze()])
    return Scan(tuple(torch.from_numpy(one).to(device) for one in images), torch.from_numpy(labels).to(device), y)
