"""The classes of the fused norms that ``convert`` makes: subclasses of a public fused norm and of the stock norm.

So code that looks for norms by ``isinstance(module, nn.BatchNorm2d)``, to freeze them or to exempt them from weight
decay, finds them.  They print under the name of the public class; pickle finds them by ``__qualname__``.
"""

from typing import Any

from torch import Tensor, nn
from torch.fx import Proxy

from ..activation import Activation
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
from ..nn.convert_sync import SYNCHRONISED
from ..nn.leaf import as_leaf
from ..nn.norm_statistics import attributes
from ..nn.stock_norm import StockNorm
from ..ops import unfused
from ..ops.norm.op import normalise
from ..ops.norm.spec import Spec
from .applied import mark_applied
from .aside import Aside
from .flow import BATCH_NORMS, INSTANCE_NORMS

MARK = "_fusedseg_normalised"
IDENTITY = Activation("identity", 0.0)


class StepsAside(StockNorm):
    """The first base class of the norms that ``convert`` makes."""

    _fusedseg_aside: Aside
    # Whether the norm marks its output, because an activation module after it is also called elsewhere.
    _fusedseg_marks: bool

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._fusedseg_aside.now and not isinstance(x, Proxy):
            return self._as_stock(x)
        z = super().forward(x, residual)
        return mark_applied(z) if self._fusedseg_marks else z

    def _as_stock(self, x: Tensor) -> Tensor:
        """The norm without the activation, by the stock function if there is one."""
        self._check_shape(x)
        passed, spec = self._call(x, None, attributes)
        momentum, running_mean = spec.momentum, self._buffers.get("running_mean")
        if passed.running_mean is None and running_mean is not None:
            # In a forward that is computed again nothing moves, but autograd must save as many tensors as before.
            passed, momentum = passed._replace(running_mean=running_mean, running_var=self._buffers["running_var"]), 0.0
        spec = Spec("input", IDENTITY, spec.eps, momentum, spec.own, spec.kind, spec.groups, spec.process_group)
        if spec.process_group is not None:
            return normalise(passed, spec)
        if passed.batches is not None:
            passed.batches.add_(1)
        return unfused.norm_act(passed, spec)


class NormOfConv(InPlaceABN):
    """The norm after a ``LeanConv``.  It returns its input if the convolution has marked it as normalised."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Proxy) or isinstance(residual, Proxy):
            return as_leaf(self, x, residual)
        if getattr(x, MARK, False):
            setattr(x, MARK, False)
            return x
        return super().forward(x, residual)


def _subclass(fused: type, *stock: type) -> Any:
    """Makes a subclass of ``fused`` and of the stock class, if one is given.

    Pickle finds it in this module under a name such as ``InPlaceABNBatchNorm2d``.
    """
    qualname = "".join(cls.__name__ for cls in (fused, *stock)) if stock else f"Converted{fused.__name__}"
    names = {"__module__": __name__, "__qualname__": qualname, "__doc__": fused.__doc__}
    made = globals()[qualname] = type(fused.__name__, (StepsAside, fused, *stock), names)
    return made


def _subclasses(fused: type, stock: tuple[type, ...]) -> dict[type, Any]:
    """The subclasses of ``fused`` and each stock class, by the stock class."""
    return {cls: _subclass(fused, cls) for cls in stock}


NORM_OF_CONV = _subclasses(NormOfConv, BATCH_NORMS)
# The fused classes for each stock norm: those that keep their input, and those that write the output over the input.
STORE_INPUT = {
    **_subclasses(BatchNormAct, BATCH_NORMS),
    **_subclasses(InstanceNormAct, INSTANCE_NORMS),
    **_subclasses(GroupNormAct, (nn.GroupNorm,)),
}
STORE_OUTPUT = {
    **_subclasses(InPlaceABN, BATCH_NORMS),
    **_subclasses(InPlaceInstanceNormAct, INSTANCE_NORMS),
    **_subclasses(InPlaceGroupNormAct, (nn.GroupNorm,)),
}
_exact, _in_place = _subclass(BatchNormActSync), _subclass(InPlaceABNSync)
for _norm in BATCH_NORMS:
    SYNCHRONISED[STORE_INPUT[_norm]] = _exact
    SYNCHRONISED[STORE_OUTPUT[_norm]] = _in_place
    # The convolution before a synchronised norm does not do the norm's work.
    SYNCHRONISED[NORM_OF_CONV[_norm]] = _in_place
