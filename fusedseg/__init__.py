"""fusedseg: fused ops for memory-lean training of segmentation networks."""

import gc
import sys
import types
from typing import NoReturn

# Imports leave hardly any garbage, but they make enough objects to start a collection, which would look at all of
# PyTorch's objects.
_collects = gc.isenabled()
gc.disable()
try:
    from . import _backend, functional, losses, memory, unet
    from .convert import conversion, convert, revert
    from .inference import sliding_window_labels
    from .losses import CrossEntropyLoss, DiceCELoss, DiceLoss
    from .nn import (
        BatchNormAct,
        BatchNormActSync,
        ConvABN2d,
        ConvABN3d,
        ConvHead2d,
        ConvHead3d,
        GroupNormAct,
        InPlaceABN,
        InPlaceABNSync,
        InPlaceGroupNormAct,
        InPlaceInstanceNormAct,
        InstanceNormAct,
        MaxPool2d,
        MaxPool3d,
        convert_sync,
    )
    from .planning import plan, profile
finally:
    if _collects:
        gc.enable()

__version__ = "0.3.0"
__all__ = [
    "BatchNormAct",
    "BatchNormActSync",
    "ConvABN2d",
    "ConvABN3d",
    "ConvHead2d",
    "ConvHead3d",
    "CrossEntropyLoss",
    "DiceCELoss",
    "DiceLoss",
    "GroupNormAct",
    "InPlaceABN",
    "InPlaceABNSync",
    "InPlaceGroupNormAct",
    "InPlaceInstanceNormAct",
    "InstanceNormAct",
    "MaxPool2d",
    "MaxPool3d",
    "backend",
    "conversion",
    "convert",
    "convert_sync",
    "functional",
    "losses",
    "memory",
    "plan",
    "profile",
    "revert",
    "sliding_window_labels",
    "unet",
]


# For type checkers; ``_Package`` has the value.
backend: _backend.Backend


class _Package(types.ModuleType):
    """Makes ``fusedseg.backend`` an attribute that is checked when it is set."""

    def __dir__(self) -> list[str]:
        return [*__all__, "__version__", "compiler", "nn"]

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Dynamo calls what it is given as a backend."""
        raise TypeError(
            "fusedseg: the package itself is not a backend of torch.compile; write its name as a text, "
            'torch.compile(model, backend="fusedseg")'
        )

    def __deepcopy__(self, memo: object) -> types.ModuleType:
        """Lightning copies what it gives ``torch.compile``, before Dynamo calls it."""
        return self

    @property
    def backend(self) -> _backend.Backend:
        """The implementation that runs: "auto" (Triton on a GPU, aten elsewhere), "triton" or "aten"."""
        return _backend.get()

    @backend.setter
    def backend(self, name: _backend.Backend) -> None:
        _backend.set(name)


sys.modules[__name__].__class__ = _Package
