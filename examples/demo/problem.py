"""The problem of a demo: images, their held-out part, a network and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """The input images of a network, each (N, 1, *spatial), and the true classes, (N, *spatial)."""

    images: tuple[Tensor, ...]
    labels: Tensor


@dataclass(frozen=True)
class Scan:
    """Registered images and labels, each (Z, Y, X); axes point up, to the nose and to the right.  y is in mm, (Y,)."""

    images: tuple[Tensor, ...]
    labels: Tensor
    y: Tensor

    def rows(self, keep: Tensor) -> "Scan":
        images = tuple(image[:, keep].contiguous() for image in self.images)
        return Scan(images, self.labels[:, keep].contiguous(), self.y[keep])


@dataclass(frozen=True)
class Split:
    """The trained part lies behind one y in mm, and the held-out part in front of another; the gap separates them.

    The brain is not split into left and right, because the template is symmetric, and each half would show the labels
    of the opposite half.
    """

    trained_below: float
    held_out_above: float

    def trained(self, scan: Scan) -> Scan:
        return scan.rows(scan.y < self.trained_below)

    def held_out(self, scan: Scan) -> Scan:
        return scan.rows(scan.y > self.held_out_above)


@dataclass(frozen=True)
class Size:
    """The size of a demo.

    resolution: the size of a voxel in mm.  widths: the channels of the levels.  batch: the number of samples in a
    batch.  steps: the default number of steps.  learning_rate: the rate of the first step, which falls to zero.
    autocast: whether training runs under bf16 autocast.
    """

    resolution: int
    widths: tuple[int, ...]
    batch: int
    steps: int
    learning_rate: float
    autocast: bool


@dataclass(frozen=True)
class Problem:
    """Everything that training and the report need.

    title: a name for the network, which starts a sentence.
    inputs, classes: the names of the inputs and classes.  colors: the colours of the classes, for matplotlib.
    whole: the scan before the split.
    batch: a function that draws a batch from the trained part.
    held_out: the whole held-out part.
    network: a function that builds the network, of stock modules.
    views: title -> an index into the held-out labels (and images) that selects a picture.
    """

    title: str
    inputs: tuple[str, ...]
    classes: tuple[str, ...]
    colors: tuple[str, ...]
    split: Split
    size: Size
    whole: Scan
    batch: Callable[[torch.Generator], Batch]
    held_out: Batch
    network: Callable[[], nn.Module]
    views: dict[str, tuple[int | slice, ...]]


def split_problem(
    split: Split,
    whole: Scan,
    size: Size,
    draw: Callable[[Scan, int, torch.Generator], Batch],
    as_batch: Callable[[Scan], Batch],
    **rest: Any,
) -> Problem:
    """The problem of a scan that is split into a trained and a held-out part.  ``rest`` has all further fields."""
    seen, held_out = split.trained(whole), split.held_out(whole)
    return Problem(
        split=split,
        size=size,
        whole=whole,
        batch=lambda generator: draw(seen, size.batch, generator),
        held_out=as_batch(held_out),
        **rest,
    )
