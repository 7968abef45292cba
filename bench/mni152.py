"""Trains a 2D U-Net on the MNI152 brain template, whose maps the nilearn wheel carries: nothing is downloaded.

The T1 image is the input; the classes are the most probable of background, fluid, grey and white matter.  The template
is mirror symmetric, so left and right would leak into each other: the front of the brain is held out instead, and the
back is trained on, with a gap between them.

Source: Fonov et al., "Unbiased average age-appropriate atlases for pediatric studies", NeuroImage 2011.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm  # type: ignore[import-untyped]

from .jobs import NetJob

CLASSES = ("background", "fluid", "grey matter", "white matter")
# of the MNI space, in mm; y grows towards the nose
SLICES = (-50.0, 70.0)
X_RANGE, Y_RANGE = (-84.0, 84.0), (-112.0, 80.0)
TRAINED_BELOW, HELD_OUT_ABOVE = 4.0, 12.0
# brighter than this is brain: the template is zero around it
BRAIN = 0.1
LEARNING_RATE = 4e-3


@dataclass
class Slices:
    """Axial slices: images (N, 1, Y, X), labels (N, Y, X), and y of the rows in mm."""

    images: Tensor
    labels: Tensor
    y: Tensor

    def rows(self, keep: Tensor) -> "Slices":
        return Slices(self.images[:, :, keep].contiguous(), self.labels[:, keep].contiguous(), self.y[keep])


def load(resolution: int, device: torch.device) -> Slices:
    """All slices that hold brain, at a resolution in mm, cut to the brain's box."""
    from nilearn import datasets  # type: ignore[import-untyped]

    t1_image = datasets.load_mni152_template(resolution=resolution)
    t1, grey, white = (
        np.asarray(image.get_fdata(), dtype=np.float32)
        for image in (
            t1_image,
            datasets.load_mni152_gm_template(resolution=resolution),
            datasets.load_mni152_wm_template(resolution=resolution),
        )
    )
    brain = (t1 > BRAIN).astype(np.float32)
    labels = np.stack([1 - brain, brain * np.clip(1 - grey - white, 0, 1), brain * grey, brain * white]).argmax(axis=0)
    position = [t1_image.affine[axis, 3] + resolution * np.arange(t1.shape[axis]) for axis in range(3)]
    x, y, z = ((low <= at) & (at <= high) for at, (low, high) in zip(position, (X_RANGE, Y_RANGE, SLICES), strict=True))
    box = np.ix_(x, y, z)
    # (x, y, z) to (z, y, x): a batch of axial slices
    t1, labels = t1[box].T.copy(), labels[box].T.copy()
    images = (torch.from_numpy(t1) - t1.mean()) / t1.std()
    return Slices(images[:, None].to(device), torch.from_numpy(labels).to(device), torch.from_numpy(position[1][y]))


def split(slices: Slices) -> tuple[Slices, Slices]:
    """(trained on, held out)."""
    return slices.rows(slices.y < TRAINED_BELOW), slices.rows(slices.y > HELD_OUT_ABOVE)


@dataclass
class Training:
    """One network on its way."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def train(
    networks: Mapping[str, Callable[[], nn.Module]], data: Slices, steps: int, batch: int, autocast: bool
) -> dict[str, Training]:
    """Trains all networks on the same batches, taking turns step by step.

    The first one's weights are the initial weights of all: their ``state_dict`` must have the same order.
    """
    device = data.images.device
    # the square root: a compromise between few pixels of fluid and many of background
    class_weight = torch.bincount(data.labels.flatten()).float().rsqrt()
    trainings: dict[str, Training] = {}
    weights: list[Tensor] = []
    for name, build in networks.items():
        net = build()
        weights = weights or [value.clone() for value in net.state_dict().values()]
        net.load_state_dict(dict(zip(net.state_dict(), weights, strict=True)))
        net.to(device)
        trainings[name] = Training(net, torch.optim.Adam(net.parameters(), lr=LEARNING_RATE))
    generator = torch.Generator().manual_seed(0)
    progress = tqdm(range(steps), desc="MNI152", unit="step")
    for step in progress:
        chosen = torch.randperm(len(data.images), generator=generator)[:batch].to(device)
        images, labels = data.images[chosen], data.labels[chosen]
        # a cosine from the full learning rate to none
        rate = LEARNING_RATE / 2 * (1 + math.cos(math.pi * step / steps))
        for training in trainings.values():
            training.optimizer.param_groups[0]["lr"] = rate
            start = time.perf_counter()
            job = NetJob(training.net, images, labels, autocast, class_weight)
            loss = job.loss(job.forward(images))
            training.optimizer.zero_grad()
            loss.backward()
            training.optimizer.step()
            # item() waits for the device
            training.losses.append(loss.item())
            training.seconds.append(time.perf_counter() - start)
        progress.set_postfix_str(
            ", ".join(
                f"{name}: loss {t.losses[-1]:.3f}, {1e3 * median(t.seconds):.0f} ms" for name, t in trainings.items()
            )
        )
    return trainings


@torch.no_grad()
def predict(net: nn.Module, images: Tensor) -> Tensor:
    """The most probable class of every pixel, (N, Y, X), with running statistics."""
    net.eval()
    return torch.cat([net(some).argmax(dim=1) for some in images.split(8)])


def intersection_over_union(predicted: Tensor, truth: Tensor) -> dict[str, float]:
    """Of each class, over all pixels together."""
    one_hot = [F.one_hot(labels, len(CLASSES)).flatten(0, -2).bool() for labels in (predicted, truth)]
    both = (one_hot[0] & one_hot[1]).sum(0)
    either = (one_hot[0] | one_hot[1]).sum(0)
    return dict(zip(CLASSES, (both / either).tolist(), strict=True))
