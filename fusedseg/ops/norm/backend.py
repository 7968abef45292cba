"""The implementations of the norm op, and which of them serves a tensor.

A new implementation is a class with these methods, and a line in ``backend_of``.
"""

from typing import Protocol

from torch import Tensor

from ...activation import Activation
from ..layout import Layout
from .aten import Aten
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted
from .triton import Triton


class Backend(Protocol):
    """Tensors are dense and not empty; ``layout`` is the layout of x with the statistics of the op."""

    def cannot(self, x: Tensor, act: Activation | None) -> str | None:
        """Why this backend cannot serve ``x`` with this activation, or None where it can; None: no activation."""

    def forward(self, passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
        """The op that keeps its output writes z into ``out``, which may be x.  The residual lies in memory as x does.

        ``spec.process_group`` plays no part: statistics of all processes are passed as running ones.  The running
        statistics are moved where the statistics are those of x.
        """
        ...

    def backward(
        self, dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
    ) -> Gradients:
        """``dz`` and the residual lie in memory as ``saved.source`` does, and are left alone."""
        ...

    def rebuild(self, saved: Saved, spec: Spec, layout: Layout) -> Tensor:
        """z of an op that keeps its input, with the bits that it had."""
        ...

    def reads_output(self, x: Tensor, act: Activation) -> bool:
        """Whether the backward of an op that keeps its input uses ``Wanted.rebuilt``."""
        ...

    def moments(self, x: Tensor, layout: Layout) -> Tensor:
        """(count, mean, M2) of parts of the values of ``x``, per channel: (parts, 3, C)."""
        ...


TRITON, ATEN = Triton(), Aten()


def backend_of(x: Tensor, act: Activation | None = None) -> Backend:
    """The backend that serves ``x``."""
    return TRITON if TRITON.cannot(x, act) is None else ATEN
