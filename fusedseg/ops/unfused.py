"""The ops as stock functions, for programs that run without this package: ``torch.export``, ONNX and TorchScript."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _torch
from ..activation import TABLE, Activation
from .conv.convolution import Geometry
from .norm.spec import Passed, Spec

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
    """Whether an export is running.  It is called while a function is traced.

    In compiled code the answer of PyTorch 2.11 is always True.
    """
    return _torch.is_exporting()


def wanted() -> bool:
    """Whether a call is being exported or traced to a program, and must therefore use stock functions."""
    return _exporting() or torch.jit.is_tracing()


def activate(y: Tensor, act: Activation, slope: Tensor | None = None) -> Tensor:
    return TABLE[act.name].function(y, act.param if slope is None else slope)


def norm_act(passed: Passed, spec: Spec) -> Tensor:
    """The norm op of these arguments, as stock functions."""
    x, weight, bias, residual, slope, running_mean, running_var, _ = passed
    if spec.kind == "group":
        # Not all devices take parameters of another dtype than x here; autocast returns fp32.
        wide = x if weight is None else x.to(weight.dtype)
        y = F.group_norm(wide, spec.groups, weight, bias, spec.eps).to(x.dtype)
    elif spec.kind == "instance" and spec.own:
        y = F.instance_norm(x, running_mean, running_var, weight, bias, True, spec.momentum, spec.eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, spec.own, spec.momentum, spec.eps)
    return activate(y if residual is None else y + residual, spec.act, slope)


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
