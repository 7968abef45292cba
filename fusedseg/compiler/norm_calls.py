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
from ..ops.norm import call, passes
from ..ops.norm.call import Norm, Operands, stats_dtype
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
    """z, mean, rstd, and new running statistics.

    writes_running: whether running statistics are moved where they are; otherwise copies of them are.
    """

    spec: Norm
    in_place: bool = False
    writes_running: bool = True
    __name__ = "norm_act"

    def __call__(self, x: Tensor, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        weight, bias, residual, *running = vectors
        if not self.writes_running:
            running = [None if v is None else v.clone() for v in running]
        source, _ = dense(x)
        laid = None if residual is None else like(residual, source)
        given = Operands(source, weight, bias, laid, None, *running)
        z, (mean, rstd, *_) = passes.forward(given, self.spec, None, source if self.in_place else None)
        if self.spec.kind != "batch" and mean is not None:
            mean, rstd = (v.view(x.shape[0], -1) for v in (mean, rstd))
        return z, mean, rstd, *running


def _found(x: Tensor, spec: Norm, tensors: tuple[Tensor | None, ...]) -> tuple[Operands, call.Statistics]:
    """What forward was given and has found.

    The last of the tensors is rstd, or the running variance if the norm uses running statistics.  aten keeps the
    statistics of some norms in half precision.
    """
    weight, bias, residual, *statistics = tensors
    mean, second = (v.flatten().to(stats_dtype(x)) for v in statistics if v is not None)
    rstd = second if spec.own else (second + spec.eps).rsqrt()
    return Operands(dense(x)[0], weight, bias, residual), call.Statistics(mean, rstd)


@dataclass(frozen=True)
class Rebuild:
    """z from x and its statistics."""

    spec: Norm
    in_place: bool = False
    __name__ = "norm_act_rebuild"

    def __call__(self, x: Tensor, *tensors: Tensor | None) -> Tensor:
        given, stats = _found(x, self.spec, tensors)
        return passes.recompute(given, stats, self.spec, given.x if self.in_place else None)


@dataclass(frozen=True)
class Statistics:
    """The results of ``Forward`` but z, of a batch norm."""

    spec: Norm
    writes_running: bool
    __name__ = "norm_statistics"

    def __call__(self, x: Tensor, *running: Tensor | None) -> tuple[Tensor | None, ...]:
        if not self.writes_running:
            running = tuple(None if v is None else v.clone() for v in running)
        mean, rstd = passes.statistics(dense(x)[0], self.spec, *running)
        return None, mean, rstd, *running


@dataclass(frozen=True)
class Backward:
    """The gradients of x, weight, bias and residual."""

    spec: Norm
    affine: bool
    in_place: bool = False
    __name__ = "norm_act_backward"

    def __call__(self, dz: Tensor, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        given, stats = _found(x, self.spec, tensors)
        into = dz if self.in_place and dz.stride() == given.x.stride() else None
        needs = (True, self.affine, self.affine, given.residual is not None, False)
        return passes.backward(dz, given, stats, self.spec, None, needs, into)[:4]
