"""The implementations of the norm op, ``reference.py`` and ``triton.py``, and the choice between them."""

from typing import Protocol

from torch import Tensor

from ... import _backend
from ...activation import TABLE, Activation
from ..layout import Layout
from . import reference, triton
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted


class Backend(Protocol):
    """The functions of an implementation.

    All tensors are dense and not empty, and the elements of vectors are adjacent in memory.  ``layout`` is the layout
    of x with the statistics of the op.
    """

    def forward(self, passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
        """The forward pass.  An op that keeps its output writes z into ``out``, which may be x.

        The residual has the strides of x.  A backend ignores ``spec.process_group``, because the statistics of all
        processes are passed to it as running statistics.  It moves the running statistics if ``spec.own`` is True.
        """
        ...

    def backward(
        self, dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
    ) -> Gradients:
        """The gradients.  ``dz`` and the residual have the strides of ``saved.source``, and are not changed."""
        ...

    def recompute(self, saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
        """z of an op that keeps its input, with the same bits as in the forward pass, in ``out`` or in new memory."""
        ...

    def moments(self, x: Tensor, layout: Layout) -> Tensor:
        """(count, mean, M2) per channel of each part of the values of ``x``, in one tensor (parts, 3, C)."""
        ...


def backend_of(x: Tensor, act: Activation | None = None) -> Backend:
    """The module that serves ``x``.  ``act=None`` asks without an activation."""
    # No kernel computes the gradient of a learned slope.
    learned = act is not None and TABLE[act.name].learned
    return reference if learned or not _backend.use_triton(x, "norm") else triton
