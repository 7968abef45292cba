"""The implementations of the norm op, and the choice between them.

A new implementation needs a class with the methods of ``Backend``, and a line in ``backend_of``.
"""

from typing import Protocol

import torch
from torch import Tensor

from ... import _backend
from ...activation import TABLE, Activation
from ..layout import Layout, channel_view
from . import aten_chunks, aten_input, aten_output, aten_samples
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Wanted, like_parameters, move_running
from .triton import Triton


class Backend(Protocol):
    """The methods of an implementation.

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

    def rebuild(self, saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
        """z of an op that keeps its input, with the same bits as in the forward pass, in ``out`` or in new memory."""
        ...

    def moments(self, x: Tensor, layout: Layout) -> Tensor:
        """(count, mean, M2) per channel of each part of the values of ``x``, in one tensor (parts, 3, C)."""
        ...


class Aten:
    """The norm op on aten ops, for every device.

    An op that keeps its output runs ``aten_output.py``; an op that keeps its input runs ``aten_input.py``.
    """

    def forward(self, passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
        if spec.keep == "input":
            return aten_input.forward(passed, spec)
        assert out is not None
        if layout.I * layout.D == 1:
            return Normalised(out, *aten_output.forward(passed, spec, layout, kept, out))
        # If samples have statistics of their own, the running statistics move once, towards the averages over samples.
        unmoved = passed if passed.running_mean is None else passed._replace(running_mean=None, running_var=None)
        by = aten_samples if layout.I > 1 else aten_output
        found = Normalised(out, *by.forward(unmoved, spec, layout, kept, out))
        move_running(passed, spec, found, layout.N * layout.S)
        return found

    def backward(
        self, dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
    ) -> Gradients:
        if spec.keep == "input":
            return like_parameters(aten_input.backward(dz, saved, spec, wanted), saved)
        dresidual = torch.empty_like(saved.source) if wanted.residual else None
        by = aten_samples if layout.I > 1 else aten_output
        found = by.backward(dz, saved, spec, layout, kept, wanted, dresidual)
        return like_parameters(found if dresidual is None else found._replace(dresidual=dresidual), saved)

    def rebuild(self, saved: Saved, spec: Spec, out: Tensor | None = None) -> Tensor:
        return aten_input.rebuild(saved, spec)

    def moments(self, x: Tensor, layout: Layout) -> Tensor:
        mean, var = aten_chunks.moments(channel_view(x, layout), layout)
        count = layout.N * layout.S
        return torch.stack([torch.full_like(mean, count), mean, var * count]).unsqueeze(0)


TRITON, ATEN = Triton(), Aten()


def backend_of(x: Tensor, act: Activation | None = None) -> Backend:
    """The backend that serves ``x``.  ``act=None`` asks without an activation."""
    # No kernel computes the gradient of a learned slope.
    learned = act is not None and TABLE[act.name].learned
    return ATEN if learned or not _backend.use_triton(x, "norm") else TRITON
