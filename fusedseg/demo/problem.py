"""What a demo learns: images, what is held out of them, a network and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """What the network is called with, each (N, 1, *spatial), and the classes wanted, (N, *spatial)."""

    images: tuple[Tensor, ...]
    labels: Tensor


@dataclass(frozen=True)
class Scan:
    """Registered images and labels, each (Z, Y, X): upwards, towards the nose, to the right.  y of the rows in mm."""

    images: tuple[Tensor, ...]
    labels: Tensor
    y: Tensor

    def rows(self, keep: Tensor) -> "Scan":
        images = tuple(image[:, keep].contiguous() for image in self.images)
        return Scan(images, self.labels[:, keep].contiguous(), self.y[keep])


@dataclass(frozen=True)
class Split:
    """Trained on behind one y in mm, held out in front of another: the gap keeps what is near apart.

    Never left and right: the template is mirror symmetric, the halves would leak into each other.
    """

    trained_below: float
    held_out_above: float

    def trained(self, scan: Scan) -> Scan:
        return scan.rows(scan.y < self.trained_below)

    def held_out(self, scan: Scan) -> Scan:
        return scan.rows(scan.y > self.held_out_above)


@dataclass(frozen=True)
class Size:
    """resolution in mm, channels of the levels, samples in a batch; steps, unless told otherwise; bf16 autocast.

    The learning rate is the first step's; it falls to none.
    """

    resolution: int
    widths: tuple[int, ...]
    batch: int
    steps: int
    learning_rate: float
    autocast: bool


@dataclass(frozen=True)
class Problem:
    """All that training and the report need to know.

    title: of the network and what it sees, as a subject of a sentence.
    inputs, classes: their names; colors: of the classes, as matplotlib takes them.
    whole: the scan before it was split.
    batch: draws a batch from the part that is trained on.
    held_out: the part that is not, whole.
    network: called with ``plain``, True for the twin of stock modules; the state dicts have one order.
    views: title -> index into the held-out labels (and images) that leaves a picture.
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
    network: Callable[[bool], nn.Module]
    views: dict[str, tuple[int | slice, ...]]


def split_problem(
    split: Split,
    whole: Scan,
    size: Size,
    draw: Callable[[Scan, int, torch.Generator], Batch],
    as_batch: Callable[[Scan], Batch],
    **rest: Any,
) -> Problem:
    """The problem of a scan: batches are drawn from one part of it, the other is held out.  ``rest``: other fields."""
    seen, held_out = split.trained(whole), split.held_out(whole)
    return Problem(
        split=split,
        size=size,
        whole=whole,
        batch=lambda generator: draw(seen, size.batch, generator),
        held_out=as_batch(held_out),
        **rest,
    )
