"""Norm, residual and activation as calls of the Triton ops of this package, for the codegen "aten".

    Forward     act(norm(x) [+ residual])                   which writes over x where nobody else reads x
    Statistics  the mean and the rstd of x alone            for an x that is packed before z is written over it
    Rebuild     the same as Forward                         from the mean and the rstd: in backward, or after Statistics
    Backward    norm_backward(act_backward(dz, ...), x)     which writes over dz where nobody else reads dz

They are the functions of nodes that ``triton_ops.py`` writes.
"""

from dataclasses import dataclass

from torch import Tensor

from .. import _backend
from ..ops.check import ACTIVATION_DTYPES
from ..ops.layout import FORMATS, dense, like
from ..ops.norm import passes
from ..ops.norm.spec import Passed, Saved, Spec, Wanted, stats_dtype
from .joint import is_tensor, value_of


def is_served(x: object) -> bool:
    """Whether the Triton ops serve the dense tensor of a node; its device and dtype decide."""
    value = value_of(x) if is_tensor(x) else None
    if value is None or value.dtype not in ACTIVATION_DTYPES or not _backend.takes_triton(value.device):
        return False
    return is_planes_or_rows(value)


def is_planes_or_rows(value: Tensor) -> bool:
    """Whether a tensor is contiguous, or in channels_last, without gaps."""
    return value.is_contiguous() or (value.dim() in FORMATS and value.is_contiguous(memory_format=FORMATS[value.dim()]))


@dataclass(frozen=True)
class Forward:
    """z, mean, rstd (the running variance if the norm uses running statistics), and new running statistics.

    writes_running: whether running statistics are moved where they are; otherwise copies of them are.
    """

    spec: Spec
    in_place: bool = False
    writes_running: bool = True
    __name__ = "norm_act"

    def __call__(self, x: Tensor, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, bias, residual, *running = vectors
        if not self.writes_running:
            running = [None if v is None else v.clone() for v in running]
        source, layout = dense(x)
        laid = None if residual is None else like(residual, source)
        passed = Passed(source, weight, bias, laid, None, *running)
        out = source if self.in_place else None
        z, mean, second, *_ = passes.forward(passed, self.spec, self.spec.layout(source, layout), None, out)
        if self.spec.kind != "batch" and mean is not None:
            mean, second = (v.view(x.shape[0], -1) for v in (mean, second))
        return z, mean, second, *running


def _saved(x: Tensor, *tensors: Tensor | None) -> Saved:
    """aten keeps the statistics of some norms in half precision."""
    weight, bias, residual, *statistics = tensors
    mean, second = (v.flatten().to(stats_dtype(x)) for v in statistics if v is not None)
    return Saved(dense(x)[0], weight, bias, residual, None, mean, second)


@dataclass(frozen=True)
class Rebuild:
    """z from x and its statistics."""

    spec: Spec
    in_place: bool = False
    __name__ = "norm_act_rebuild"

    def __call__(self, x: Tensor, *tensors: Tensor | None) -> Tensor:
        saved = _saved(x, *tensors)
        return passes.rebuild(saved, self.spec, saved.source if self.in_place else None)


@dataclass(frozen=True)
class Statistics:
    """The results of ``Forward`` but z, of a batch norm."""

    spec: Spec
    writes_running: bool
    __name__ = "norm_statistics"

    def __call__(self, x: Tensor, *running: Tensor | None) -> tuple[Tensor | None, ...]:
        if not self.writes_running:
            running = tuple(None if v is None else v.clone() for v in running)
        source, layout = dense(x)
        mean, rstd = passes.statistics(source, self.spec, layout, *running)
        return None, mean, rstd, *running


@dataclass(frozen=True)
class Backward:
    """The gradients of x, weight, bias and residual."""

    spec: Spec
    affine: bool
    in_place: bool = False
    __name__ = "norm_act_backward"

    def __call__(self, dz: Tensor, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = _saved(x, *tensors)
        layout = self.spec.layout(*dense(saved.source))
        into = dz if self.in_place and dz.stride() == saved.source.stride() else None
        wanted = Wanted(self.affine, saved.residual is not None, into)
        return passes.backward(dz, saved, self.spec, layout, None, wanted)[:4]
