"""The ops as stock functions, for programs that run without this package: ``torch.export``, ONNX and TorchScript."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..activation import Activation
from .convolution import Geometry

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "mish": F.mish,
    "hardswish": F.hardswish,
    "identity": lambda y: y,
}


Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Lets the compiler call the function once, while it traces, and treat the result as a constant.

    It replaces ``torch.compiler.assume_constant_result``.  PyTorch's decorator imports ``torch._dynamo``, and with it
    triton and sympy, which takes longer than the rest of ``import fusedseg``.  Then it only sets this attribute.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant_result
def _exporting() -> bool:
    """Whether an export is running; called while a function is traced.

    In compiled code the answer of PyTorch 2.11 is always True.
    """
    return torch.compiler.is_exporting()


def wanted() -> bool:
    """Whether a call is being exported or traced to a program, and must therefore use stock functions."""
    return _exporting() or torch.jit.is_tracing()


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    if act.name == "leaky_relu":
        return F.leaky_relu(y, act.param)
    if act.name == "elu":
        return F.elu(y, act.param)
    if act.name == "prelu":
        assert slope is not None
        return F.prelu(y, slope.to(y.dtype))
    return ACTIVATIONS[act.name](y)


def norm_act(
    x: Tensor,
    kind: str,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    own: bool,
    momentum: float,
    eps: float,
    act: Activation,
    residual: Tensor | None = None,
    slope: Tensor | None = None,
) -> Tensor:
    """A norm, an optional residual and an activation.

    ``kind`` and ``groups`` are those of ``norm_act_aten.Norm``.  ``own`` says that the statistics are those of ``x``.
    """
    if kind == "group":
        y = F.group_norm(x, groups, weight, bias, eps)
    elif kind == "instance" and own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, own, momentum, eps)
    return activate(y if residual is None else y + residual, act, slope)


def convolution(x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    convolve: Callable[..., Tensor] = F.conv2d if x.dim() == 4 else F.conv3d
    return convolve(x, w, bias, *geometry)


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    pool: Callable[..., Tensor] = F.max_pool2d if x.dim() == 4 else F.max_pool3d
    return pool(x, kernel, stride, padding, dilation, ceil_mode)
