"""The windows of an image, in the order of MONAI, and the cells in which their predictions are summed.

The last axis of an image varies fastest in the order of windows.  The other axes, or the only axis, are cut where a
window starts or ends.  A cell is one interval of each axis that is cut, and the whole of the last axis.  So every
window that touches a cell covers it along the cut axes, and the last of these windows is known in advance: after it,
the sums of the cell are final.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

# A window: its index along each axis.
Window = tuple[int, ...]
Slices = tuple[slice, ...]


class Windows(NamedTuple):
    """The windows of an image with the sizes ``image``, each with the sizes ``roi``.

    starts: the first positions of the windows along each axis, in ascending order.
    edges: the positions at which an axis is cut into cells, in ascending order, with both ends of the axis.
    """

    image: tuple[int, ...]
    roi: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, image: tuple[int, ...], roi: tuple[int, ...], overlap: tuple[float, ...]) -> "Windows":
        """The windows that MONAI takes; no size of ``roi`` is larger than that of ``image``."""
        starts = tuple(map(_starts, image, roi, overlap))
        cut = max(1, len(image) - 1)
        edges = tuple(
            tuple(sorted({p for s in starts[axis] for p in (s, s + roi[axis])})) if axis < cut else (0, image[axis])
            for axis in range(len(image))
        )
        return cls(image, roi, starts, edges)

    @property
    def indices(self) -> list[Window]:
        """All windows of one image in their order."""
        return list(product(*(range(len(starts)) for starts in self.starts)))

    def where(self, window: Window) -> Slices:
        """The slices of a window in the image."""
        first = [starts[i] for starts, i in zip(self.starts, window, strict=True)]
        return tuple(slice(a, a + size) for a, size in zip(first, self.roi, strict=True))

    def cells(self, window: Window) -> Iterator[tuple[Slices, Slices, Slices]]:
        """For each cell that a window touches: the cell in the image and in the window, and the window in the cell."""
        inside = self.where(window)
        touched = [
            [slice(a, b) for a, b in pairwise(edges) if a < at.stop and at.start < b]
            for edges, at in zip(self.edges, inside, strict=True)
        ]
        for where in product(*touched):
            both = [
                (max(c.start, w.start), min(c.stop, w.stop), c.start, w.start)
                for c, w in zip(where, inside, strict=True)
            ]
            in_window = tuple(slice(a - w, b - w) for a, b, _, w in both)
            in_cell = tuple(slice(a - c, b - c) for a, b, c, _ in both)
            yield where, in_window, in_cell

    def last(self, where: Slices) -> Window:
        """The last window that touches a cell: along each axis, the last one that starts before the end of the cell."""
        ends = (at.stop - 1 for at in where)
        return tuple(bisect_right(starts, end) - 1 for starts, end in zip(self.starts, ends, strict=True))


def _starts(image: int, roi: int, overlap: float) -> tuple[int, ...]:
    step = max(1, int(roi * (1 - overlap)))
    # The last window ends with the image.
    return tuple(min(i * step, image - roi) for i in range(math.ceil((image - roi) / step) + 1))


def importance(roi: tuple[int, ...], sigmas: tuple[float, ...] | None, device: torch.device) -> Tensor:
    """The weight of each position of a window, in fp32, as MONAI computes it; None stands for equal weights.

    ``sigmas`` are the standard deviations along the axes, in positions.
    """
    if sigmas is None:
        return torch.ones(roi, device=device)
    weights = torch.ones((), device=device)
    for size, sigma in zip(roi, sigmas, strict=True):
        half = (size - 1) / 2.0
        x = torch.arange(-half, half + 1, dtype=torch.float32, device=device)
        weights = weights.unsqueeze(-1) * torch.exp(x**2 / (-2 * sigma**2))
    # No position may have a weight of 0 in every window.
    return weights.clamp_(min=1e-3)


def part(t: Tensor, where: Slices) -> Tensor:
    """The part of a tensor that slices of its last axes name."""
    index: Any = (..., *where)
    return t[index]


class Sums:
    """Adds predictions in the order of the windows, and divides the sums of a cell after the last window on it.

    Products have the dtype of the prediction, and sums that of ``weights``, as in MONAI and nnU-Net.

    Args:
        windows: the windows of an image and its cells.
        weights: the weight of each position of a window, beside the predictions.
        device: where the sums are.
        finish: gets the slices of a cell and its mean predictions (K, *size), which are freed after the call.
    """

    def __init__(
        self, windows: Windows, weights: Tensor, device: torch.device, finish: Callable[[Slices, Tensor], None]
    ) -> None:
        self.windows, self.device, self.finish = windows, device, finish
        # The weights beside the predictions, and beside the sums.
        self.weights, self.own_weights = weights, weights.to(device)
        # The sums of predictions, (K, *size), and of weights, (*size), by the first position of the cell.
        self.open: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def add(self, window: Window, prediction: Tensor) -> None:
        """Adds the prediction (K, *roi) of a window."""
        for where, in_window, in_cell in self.windows.cells(window):
            key = tuple(at.start for at in where)
            if key not in self.open:
                size, zeros = [at.stop - at.start for at in where], self.own_weights.new_zeros
                self.open[key] = zeros([prediction.shape[0], *size]), zeros(size)
            self._add(self.open[key], prediction, in_window, in_cell)
            if self.windows.last(where) == window:
                predictions, weights = self.open.pop(key)
                self.finish(where, predictions.div_(weights))

    def _add(self, sums: tuple[Tensor, Tensor], prediction: Tensor, in_window: Slices, in_cell: Slices) -> None:
        predictions, weights = sums
        product = part(prediction, in_window) * part(self.weights, in_window)
        part(predictions, in_cell).add_(product.to(prediction.dtype).to(self.device))
        part(weights, in_cell).add_(part(self.own_weights, in_window))
