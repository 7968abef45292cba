"""Activations on aten ops: the forward of the stock function, and the gradient that autograd calls for this function.

The gradient belongs to the stock function that does not overwrite its input, such as ``elu(y)``.  The gradient of
``elu_(y)`` is rounded differently.  The ops themselves are in the table of ``fusedseg/activation/table.py``.
"""

from torch import Tensor

from ..activation import TABLE, Activation


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` except for prelu.  ``slope``, (1,) or (C,), has the slopes of prelu."""
    return TABLE[act.name].forward(y, act.param if slope is None else slope)


def activation_grad(
    dz: Tensor, y: Tensor, act: Activation, slope: Tensor | None, out: Tensor
) -> tuple[Tensor, Tensor | None]:
    """g = dz phi'(y), and the gradient of the slope of prelu, in the shape and dtype of the slope.

    g is written to ``out``, which may be ``dz`` or ``y``, if aten has an op for that.
    """
    row = TABLE[act.name]
    if row.learned:
        return row.grad(dz, y, slope, out)
    return row.grad(dz, y, act.param, out), None
