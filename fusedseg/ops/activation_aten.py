"""Activations on aten ops: each forward is the stock function's, and each gradient the one that autograd calls for it.

The gradient is that of the stock function given its input, so of ``elu(y)``, not of ``elu_(y)``, whose gradient is
rounded otherwise.
"""

import torch
from torch import Tensor

from ..activation import Activation

aten = torch.ops.aten


def per_channel(slope: Tensor, y: Tensor) -> Tensor:
    """The slope of prelu, (1,) or (C,), to broadcast over (N, C, *spatial)."""
    return slope.view(1, -1, *(1,) * (y.dim() - 2)).to(y.dtype)


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    """phi(y), in the memory of ``y`` but for prelu.  ``slope``: (1,) or (C,), of prelu."""
    name = act.name
    if name == "relu":
        return aten.relu_(y)
    if name == "leaky_relu":
        return aten.leaky_relu_(y, act.param)
    if name == "elu":
        return aten.elu_(y, act.param)
    if name == "silu":
        return aten.silu_(y)
    if name == "gelu":
        return aten.gelu_(y)
    if name == "gelu_tanh":
        return aten.gelu_(y, approximate="tanh")
    if name == "mish":
        return aten.mish_(y)
    if name == "hardswish":
        return aten.hardswish_(y)
    if name == "relu6":
        return aten.hardtanh_(y, 0.0, 6.0)
    if name == "prelu":
        assert slope is not None
        return aten._prelu_kernel(y, per_channel(slope, y))
    assert name == "identity", name
    return y


def activation_grad(
    dz: Tensor, y: Tensor, act: Activation, slope: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """g = dz phi'(y), in the memory of ``y`` where aten can; and the gradient of the slope of prelu, of its shape and
    dtype.  ``dz`` is left alone."""
    name = act.name
    if name == "relu":
        return aten.threshold_backward.grad_input(dz, y, 0, grad_input=y), None
    if name == "leaky_relu":
        return aten.leaky_relu_backward.grad_input(dz, y, act.param, False, grad_input=y), None
    if name == "elu":
        return aten.elu_backward.grad_input(dz, act.param, 1, 1, False, y, grad_input=y), None
    if name == "silu":
        return aten.silu_backward.grad_input(dz, y, grad_input=y), None
    if name == "gelu":
        return aten.gelu_backward.grad_input(dz, y, grad_input=y), None
    if name == "gelu_tanh":
        return aten.gelu_backward.grad_input(dz, y, approximate="tanh", grad_input=y), None
    if name == "mish":
        return aten.mish_backward(dz, y), None
    if name == "hardswish":
        return aten.hardswish_backward(dz, y), None
    if name == "relu6":
        return aten.hardtanh_backward.grad_input(dz, y, 0.0, 6.0, grad_input=y), None
    if name == "prelu":
        assert slope is not None
        w = per_channel(slope, y)
        g, dw = aten._prelu_kernel_backward(dz, y, w)
        over = [d for d in range(y.dim()) if w.shape[d] == 1]
        return g, dw.sum(over, dtype=slope.dtype).view_as(slope)
    assert name == "identity", name
    return dz, None
