"""Weighted sums of the predictions of windows, cell by cell; a cell that is final is handed over and freed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .windows import Cell, Window, Windows


def part(t: Tensor, where: tuple[slice, ...]) -> Tensor:
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
        finish: gets a cell and its mean predictions (K, *size), which are freed after the call.
    """

    def __init__(
        self, windows: Windows, weights: Tensor, device: torch.device, finish: Callable[[Cell, Tensor], None]
    ) -> None:
        self.windows, self.device, self.finish = windows, device, finish
        # The weights beside the predictions, and beside the sums.
        self.weights, self.own_weights = weights, weights.to(device)
        # The sums of predictions, (K, *size), and of weights, (*size), by the first position of the cell.
        self.open: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def add(self, window: Window, prediction: Tensor) -> None:
        """Adds the prediction (K, *roi) of a window."""
        for cell in self.windows.cells(window):
            key = tuple(at.start for at in cell.where)
            if key not in self.open:
                self.open[key] = self._zeros(prediction.shape[0], cell)
            self._add(self.open[key], cell, prediction)
            if self.windows.last(cell) == window:
                predictions, weights = self.open.pop(key)
                self.finish(cell, predictions.div_(weights))

    def _zeros(self, K: int, cell: Cell) -> tuple[Tensor, Tensor]:
        size = [at.stop - at.start for at in cell.where]
        dtype = self.weights.dtype
        return torch.zeros(K, *size, dtype=dtype, device=self.device), torch.zeros(
            size, dtype=dtype, device=self.device
        )

    def _add(self, sums: tuple[Tensor, Tensor], cell: Cell, prediction: Tensor) -> None:
        predictions, weights = sums
        product = part(prediction, cell.in_window) * part(self.weights, cell.in_window)
        part(predictions, cell.in_cell).add_(product.to(prediction.dtype).to(self.device))
        part(weights, cell.in_cell).add_(part(self.own_weights, cell.in_window))
