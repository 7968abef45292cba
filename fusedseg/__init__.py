"""fusedseg: fused ops for memory-lean training of segmentation networks."""

import sys
import types

from . import _backend, functional, memory, unet
from .conversion import ConversionReport, convert, revert
from .nn import (
    ABN,
    BatchNormAct,
    BatchNormActSync,
    BranchSum,
    ConvABN2d,
    ConvABN3d,
    ConvBank2d,
    ConvBank3d,
    GroupNormAct,
    InPlaceABN,
    InPlaceABNSync,
    InPlaceGroupNormAct,
    InPlaceInstanceNormAct,
    InstanceNormAct,
    JoinConv2d,
    JoinConv3d,
    MaxPool2d,
    MaxPool3d,
    convert_sync,
)
from .ops import reuse as _reuse
from .ops.recompute.scope import recompute

__version__ = "0.2.0"
__all__ = [
    "ABN",
    "BatchNormAct",
    "BatchNormActSync",
    "BranchSum",
    "ConvABN2d",
    "ConvABN3d",
    "ConvBank2d",
    "ConvBank3d",
    "ConversionReport",
    "GroupNormAct",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceGroupNormAct",
    "InPlaceInstanceNormAct",
    "InstanceNormAct",
    "JoinConv2d",
    "JoinConv3d",
    "MaxPool2d",
    "MaxPool3d",
    "backend",
    "convert",
    "convert_sync",
    "functional",
    "memory",
    "recompute",
    "reuse_output",
    "revert",
    "unet",
]


class _Package(types.ModuleType):
    """Makes ``fusedseg.backend`` an attribute that is checked when it is set."""

    @property
    def backend(self) -> str:
        """Which implementation runs: "auto" (Triton on a GPU, aten elsewhere), "triton" or "aten"."""
        return _backend.get()

    @backend.setter
    def backend(self, name: str) -> None:
        _backend.set(name)

    @property
    def reuse_output(self) -> bool:
        """Whether backward may write a gradient over the output that ``InPlaceABN`` or ``ConvABN`` has kept.

        It does so only where nothing else can see that memory.  This saves one full tensor at the peak.  It is off by
        default.  On a CPU it saves memory for large tensors only.

        It does nothing where something else shares the memory of the output: a variable, a hook, the saved tensors of
        another op, or ``retain_graph=True``.  It also does nothing under saved-tensor hooks, such as those of
        ``fusedseg.recompute()``, of a checkpoint and of ``fusedseg.memory``, so the figures of ``fusedseg.memory`` are
        those without it.  A second backward over an overwritten output raises an error.  Do not use it where a library
        knows the address of an output and holds no tensor of it.
        """
        return _reuse.get()

    @reuse_output.setter
    def reuse_output(self, value: bool) -> None:
        _reuse.set(value)


sys.modules[__name__].__class__ = _Package
