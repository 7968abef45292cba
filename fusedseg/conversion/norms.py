"""The classes of the fused norms that ``convert`` makes: subclasses of a public fused norm and of the stock norm.

So code that looks for norms by ``isinstance(module, nn.BatchNorm2d)``, to freeze them or to exempt them from weight
decay, finds them.  They print under the name of the public class; pickle finds them by ``__qualname__``.
"""

from typing import Any

from torch import Tensor, nn

from ..nn import (
    BatchNormAct,
    BatchNormActSync,
    GroupNormAct,
    InPlaceABN,
    InPlaceABNSync,
    InPlaceGroupNormAct,
    InPlaceInstanceNormAct,
    InstanceNormAct,
)
from ..nn.sync import SYNCHRONISED
from .flow import BATCH_NORMS, INSTANCE_NORMS

MARK = "_fusedseg_normalised"


class NormOfConv(InPlaceABN):
    """The norm after a ``LeanConv``.  It returns its input if the convolution has marked it as normalised."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if getattr(x, MARK, False):
            setattr(x, MARK, False)
            return x if self._marked is None else self._marked(x)
        return super().forward(x, residual)


def _subclasses(fused: type, stock: tuple[type, ...]) -> dict[type, Any]:
    """Makes a subclass of ``fused`` and each stock class; returns the subclasses by the stock class.

    Pickle finds them in this module under names such as ``InPlaceABN2d``.
    """
    made: dict[type, Any] = {}
    for cls in stock:
        qualname = fused.__name__ + cls.__name__[-2:]
        names = {"__module__": __name__, "__qualname__": qualname, "__doc__": fused.__doc__}
        made[cls] = globals()[qualname] = type(fused.__name__, (fused, cls), names)
    return made


NORM_OF_CONV = _subclasses(NormOfConv, BATCH_NORMS)
# The fused classes for each stock norm: those that keep their input, and those that write the output over the input.
STORE_INPUT = {
    **_subclasses(BatchNormAct, BATCH_NORMS),
    **_subclasses(InstanceNormAct, INSTANCE_NORMS),
    nn.GroupNorm: GroupNormAct,
}
STORE_OUTPUT = {
    **_subclasses(InPlaceABN, BATCH_NORMS),
    **_subclasses(InPlaceInstanceNormAct, INSTANCE_NORMS),
    nn.GroupNorm: InPlaceGroupNormAct,
}
for _norm in BATCH_NORMS:
    SYNCHRONISED[STORE_INPUT[_norm]] = BatchNormActSync
    SYNCHRONISED[STORE_OUTPUT[_norm]] = InPlaceABNSync
    # The convolution before a synchronised norm does not do the norm's work.
    SYNCHRONISED[NORM_OF_CONV[_norm]] = InPlaceABNSync
