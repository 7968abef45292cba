"""Predicted labels of images that are larger than one input of the model."""

from .sliding_window import sliding_window_labels

__all__ = ["sliding_window_labels"]
