"""fusedseg: fused ops for memory-lean training of segmentation networks."""

import sys
import types

from . import _backend, functional, memory, unet
from .nn import BranchSum, ConvABN2d, ConvABN3d, ConvBank2d, ConvBank3d, InPlaceABN, JoinConv2d, JoinConv3d

__version__ = "0.1.0"
__all__ = [
    "BranchSum",
    "ConvABN2d",
    "ConvABN3d",
    "ConvBank2d",
    "ConvBank3d",
    "InPlaceABN",
    "JoinConv2d",
    "JoinConv3d",
    "backend",
    "functional",
    "memory",
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


sys.modules[__name__].__class__ = _Package
