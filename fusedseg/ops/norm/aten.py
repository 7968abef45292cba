"""The norm op on aten ops, for every device: ``aten_output.py`` and ``aten_input.py``, by what the op keeps."""

import torch
from torch import Tensor

from ...activation import Activation
from ..layout import Layout, channel_view
from . import aten_input, aten_output, aten_samples
from .kept import Kept
from .spec import Gradients, Normalised, Passed, Saved, Spec, Statistics, Wanted, like_parameters, move_running


class Aten:
    def cannot(self, x: Tensor, act: Activation | None) -> str | None:
        return None

    def forward(self, passed: Passed, spec: Spec, layout: Layout, kept: Kept | None, out: Tensor | None) -> Normalised:
        if spec.keep == "input":
            return aten_input.forward(passed, spec)
        assert out is not None
        if layout.I * layout.D == 1:
            mean, second, xhat = aten_output.forward(passed, spec, layout, kept, out)
            return Normalised(out, Statistics(mean, second), xhat)
        # of samples: the running statistics move once, by the averages of all of them
        unmoved = passed._replace(running_mean=None, running_var=None)
        by = aten_samples if layout.I > 1 else aten_output
        mean, second, xhat = by.forward(unmoved, spec, layout, kept, out)
        stats = Statistics(mean, second)
        move_running(passed, spec, stats, layout.N * layout.S)
        return Normalised(out, stats, xhat)

    def backward(
        self, dz: Tensor, saved: Saved, spec: Spec, layout: Layout, kept: Kept | None, wanted: Wanted
    ) -> Gradients:
        if spec.keep == "input":
            return like_parameters(aten_input.backward(dz, saved, spec, wanted), saved)
        dresidual = torch.empty_like(saved.source) if wanted.residual else None
        by = aten_samples if layout.I > 1 else aten_output
        found = by.backward(dz, saved, spec, layout, kept, wanted, dresidual)
        if not wanted.affine:
            return Gradients(found.dx, dresidual=dresidual)
        weight, bias = saved.weight, saved.bias
        dtype = (weight if weight is not None else bias).dtype  # type: ignore[union-attr]
        dweight, dbias = (None if v is None else v.to(dtype) for v in found[1:3])
        return Gradients(found.dx, dweight, dbias, dresidual)

    def rebuild(self, saved: Saved, spec: Spec, layout: Layout) -> Tensor:
        return aten_input.rebuild(saved, spec)

    def moments(self, x: Tensor, layout: Layout) -> Tensor:
        mean, var = aten_output.moments(channel_view(x, layout), layout)
        count = layout.N * layout.S
        return torch.stack([torch.full_like(mean, count), mean, var * count]).unsqueeze(0)
