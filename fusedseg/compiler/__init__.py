"""A backend of ``torch.compile`` that keeps less for backward, for any stock model; see docs/compiler.md."""

from .backend import backend

__all__ = ["backend"]
