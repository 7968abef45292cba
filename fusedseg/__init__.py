"""fusedseg: fused ops for memory-lean training of segmentation networks."""

import gc
import sys
import types

# Imports leave hardly any garbage, but they make enough objects to start a collection, which would look at all of
# PyTorch's objects.
_collects = gc.isenabled()
gc.disable()
try:
    from . import _backend, functional, losses, memory, unet
    from .conversion import ConversionReport, convert, revert
    from .inference import sliding_window_labels
    from .losses import CrossEntropyLoss, DiceCELoss, DiceLoss
    from .nn import (
        ABN,
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
    from .ops import reuse as _reuse
    from .scope.scope import recompute
finally:
    if _collects:
        gc.enable()

__version__ = "0.2.0"
__all__ = [
    "ABN",
    "BatchNormAct",
    "BatchNormActSync",
    "ConvABN2d",
    "ConvABN3d",
    "ConvHead2d",
    "ConvHead3d",
    "ConversionReport",
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
    "convert",
    "convert_sync",
    "functional",
    "losses",
    "memory",
    "recompute",
    "reuse_output",
    "revert",
    "sliding_window_labels",
    "unet",
]


# For type checkers; ``_Package`` has the values.
backend: _backend.Backend
reuse_output: bool


class _Package(types.ModuleType):
    """Makes ``fusedseg.backend`` an attribute that is checked when it is set."""

    def __dir__(self) -> list[str]:
        return [*__all__, "__version__", "compiler", "nn"]

    @property
    def backend(self) -> _backend.Backend:
        """The implementation that runs: "auto" (Triton on a GPU, aten elsewhere), "triton" or "aten"."""
        return _backend.get()

    @backend.setter
    def backend(self, name: _backend.Backend) -> None:
        _backend.set(name)

    @property
    def reuse_output(self) -> bool:
        """Whether backward may write over the output that ``InPlaceABN`` or ``ConvABN`` has kept, or a loss's logits.

        The option saves one full tensor at the peak.  It is off by default.  On a CPU it saves memory for large tensors
        only.

        The output is overwritten only if nothing else shares its memory: no variable, no hook, no saved tensor of
        another op, and no ``retain_graph=True``.  The option has no effect under saved-tensor hooks, such as those of
        ``fusedseg.recompute()``, of a checkpoint and of ``fusedseg.memory``.  So ``fusedseg.memory`` shows the figures
        without the option.  A second backward over an overwritten output raises an error.  Do not use the option if a
        library knows the address of an output but holds no tensor with this memory.
        """
        return _reuse.get()

    @reuse_output.setter
    def reuse_output(self, value: bool) -> None:
        _reuse.set(value)


sys.modules[__name__].__class__ = _Package
