"""Activations on aten ops: each forward is the stock function's, and each gradient the one that autograd calls for it.

The gradient is that of the stock function given its input, so of ``elu(y)``, not of ``elu_(y)``, whose gradient is
rounded otherwise.  The ops themselves stand in the table of ``fusedseg/activation/table.py``.
"""

from torch import Tensor

from ..activation import TABLE, Activation


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` except for prelu.  ``slope``: (1,) or (C,), of prelu."""
    return TABLE[act.name].forward(y, act.param if slope is None else slope)


def activation_grad(
    dz: Tensor, y: Tensor, act: Activation, slope: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """g = dz phi'(y), in the memory of ``y`` where aten can; and the gradient of the slope of prelu, of its shape and
    dtype.  ``dz`` is left alone."""
    row = TABLE[act.name]
    if row.learned:
        return row.grad(dz, y, slope)
    return row.grad(dz, y, act.param), None
