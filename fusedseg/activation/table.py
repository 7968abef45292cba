"""The only table of the properties of each activation function.

Everything outside ``kernels/`` reads ``TABLE``: the ops on aten, programs that are exported, modules and conversion.
To add an activation, add a row here and a branch to each function of ``kernels/activation.py``.

In the table, y is the input of the activation, z is its output, and p is its parameter.  p is 0 for activations without
a parameter.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import _torch
from .._torch import write_gradient

# Stock functions call these bindings, which have less overhead than ``torch.ops``.  Backward functions have no such
# binding; a call of an overload, such as ``.default``, has the least overhead for them.
# PyTorch's type stubs lack some of them.
aten = torch.ops.aten
_nn = _torch.nn


@dataclass(frozen=True, eq=False)
class Parameter:
    """The meaning of ``activation_param``: its name in errors, the stock module's attribute, and the stock default.

    If the parameter is a word, ``choices`` has each word with the name of the row that it selects.
    """

    name: str
    attribute: str
    default: Any
    choices: dict[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Inverse:
    """The functions that an op needs if it stores only z.

    An activation with a parameter is invertible if the parameter is > 0.

    y: (z, p, out) -> y, in ``out`` unless ``out`` is None.  If y equals z, the result may be ``z`` itself.
    grad: (dz, z, p, out) -> dz * phi'(y), in ``out`` unless ``out`` is None.
    slope: p -> the factor, at most 1, by which z may be smaller than a small y.
    saturates: whether z comes so close to a limit that rounding takes the digits of a negative y.
    """

    y: Callable[[Tensor, float, Tensor | None], Tensor]
    grad: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    slope: Callable[[float], float] = lambda p: 1.0
    saturates: bool = False


@dataclass(frozen=True, eq=False)
class ActivationRow:
    """The properties of an activation.

    name: the name in ``Activation`` and in the kernels.
    module: the stock module; None for identity, which conversion does not look for.
    function: (y, p) -> z, by stock functions.
    forward: (y, p) -> z, by aten's functions, in the memory of y.
    grad: (dz, y, p, out) -> dz * phi'(y), in ``out`` if aten has an op for that, otherwise in new memory.  ``out`` may
        be dz or y.  Autograd calls these ops for the stock function of y.  For the function that overwrites y, autograd
        calls other ops, which round differently.
    parameter: the meaning of ``activation_param``, or None if there is no parameter.
    inverse: the functions that need only z; None if y cannot be found from z.
    identity: z equals y, so the gradient of y is dz, and a parameter has no effect.
    fixed: attributes of the stock module that the fused ops do not take, each with the only value that they support.
    selected_by: for a row that a word selects, the public name and the word.
    keeps_result: whether autograd keeps the result of the stock function in place of its input: "always", "in place" of
        the function that writes over its input, or "" for never.  The next layer keeps the result anyway.
    autocast: whether the stock module returns the dtype of its input under autocast.
    learned: p is a tensor, the slopes (1,) or (C,) of prelu.  ``forward`` then makes new memory, and ``grad`` returns
        the gradient of p as well.  The kernels do not support it.
    """

    name: str
    module: type[nn.Module] | None
    function: Callable[[Tensor, Any], Tensor]
    forward: Callable[[Tensor, Any], Tensor]
    grad: Callable[[Tensor, Tensor, Any, Tensor], Any]
    parameter: Parameter | None = None
    inverse: Inverse | None = None
    identity: bool = False
    fixed: tuple[tuple[str, Any], ...] = ()
    selected_by: tuple[str, str] | None = None
    keeps_result: str = ""
    autocast: bool = True
    learned: bool = False


def _elu_inverse(z: Tensor, p: float, out: Tensor | None, scale: float = 1) -> Tensor:
    # The tail saturates at -1.  For a tail of -1, the inverse is that of the middle of the values that round to -1.
    least = math.log(torch.finfo(z.dtype).eps / 8)
    tail = z.div(scale * p)
    if out is None:
        # A compiler traces this, and a traced graph must not write in place.
        tail = tail.clamp(-1.0, 0.0).log1p().clamp(min=least)
    else:
        tail.clamp_(-1.0, 0.0).log1p_().clamp_(min=least)
    return torch.where(z > 0, z if scale == 1 else z / scale, tail, out=out)


# selu is scale * elu with these numbers, which PyTorch uses too.
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _per_channel(slope: Tensor, y: Tensor) -> Tensor:
    """The slopes (1,) or (C,) of prelu, shaped to broadcast against (N, C, *spatial)."""
    return slope.view(1, -1, *(1,) * (y.dim() - 2)).to(y.dtype)


def _prelu_grad(dz: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    w = _per_channel(slope, y)
    g, dw = _torch.prelu_kernel_backward(dz, y, w)
    over = [d for d in range(y.dim()) if w.shape[d] == 1]
    return g, dw.sum(over, dtype=slope.dtype).view_as(slope)


def _simple(
    name: str,
    module: type[nn.Module],
    function: Callable[[Tensor], Tensor],
    forward: Callable[[Tensor], Tensor],
    backward: Any,
    *constants: float,
    writes: bool = True,
    **more: Any,
) -> ActivationRow:
    """The row of an activation without a number; ``backward`` is aten's op, with its arguments after dz and y.

    ``writes`` says whether this op can write into memory that it is given.
    """
    return ActivationRow(
        name, module, lambda y, p: function(y), lambda y, p: forward(y),
        lambda dz, y, p, out: write_gradient(backward, out if writes else None, dz, y, *constants), **more,
    )  # fmt: skip


_APPROXIMATION = Parameter("approximation", "approximate", "none", {"none": "gelu", "tanh": "gelu_tanh"})

_ROWS = (
    ActivationRow(
        "leaky_relu",
        nn.LeakyReLU,
        function=F.leaky_relu,
        forward=lambda y, p: _nn.leaky_relu_(y, p),
        grad=lambda dz, y, p, out: write_gradient(aten.leaky_relu_backward, out, dz, y, p, False),
        parameter=Parameter("slope", "negative_slope", 0.01),
        keeps_result="in place",
        inverse=Inverse(
            y=lambda z, p, out: _nn.leaky_relu(z, 1.0 / p, out=out),
            grad=lambda dz, z, p, out: write_gradient(aten.leaky_relu_backward, out, dz, z, p, True),
            slope=lambda p: min(p, 1.0),
        ),
    ),
    ActivationRow(
        "elu",
        nn.ELU,
        function=F.elu,
        forward=lambda y, p: _nn.elu_(y, p),
        grad=lambda dz, y, p, out: write_gradient(aten.elu_backward, out, dz, p, 1, 1, False, y),
        parameter=Parameter("alpha", "alpha", 1.0),
        keeps_result="in place",
        inverse=Inverse(
            y=_elu_inverse,
            grad=lambda dz, z, p, out: write_gradient(aten.elu_backward, out, dz, p, 1, 1, True, z),
            slope=lambda p: min(p, 1.0),
            saturates=True,
        ),
    ),
    ActivationRow(
        "selu",
        nn.SELU,
        function=lambda y, p: F.selu(y),
        forward=lambda y, p: torch.selu_(y),
        grad=lambda dz, y, p, out: write_gradient(aten.elu_backward, out, dz, _SELU_ALPHA, _SELU_SCALE, 1, False, y),
        keeps_result="in place",
        inverse=Inverse(
            y=lambda z, p, out: _elu_inverse(z, _SELU_ALPHA, out, _SELU_SCALE),
            grad=lambda dz, z, p, out: write_gradient(aten.elu_backward, out, dz, _SELU_ALPHA, _SELU_SCALE, 1, True, z),
            saturates=True,
        ),
    ),
    ActivationRow(
        "celu",
        nn.CELU,
        function=F.celu,
        forward=torch.celu_,
        # Autograd rounds p to fp32 first.
        grad=lambda dz, y, p, out: write_gradient(
            aten.elu_backward, out, dz, p, 1, 1 / ctypes.c_float(p).value, False, y
        ),
        parameter=Parameter("alpha", "alpha", 1.0),
        keeps_result="in place",
    ),
    ActivationRow(
        "identity",
        None,
        function=lambda y, p: y,
        forward=lambda y, p: y,
        grad=lambda dz, y, p, out: dz,
        identity=True,
        inverse=Inverse(
            y=lambda z, p, out: z,
            grad=lambda dz, z, p, out: dz if out is None else out.copy_(dz),
        ),
    ),
    _simple("relu", nn.ReLU, F.relu, torch.relu_, aten.threshold_backward, 0, keeps_result="always"),
    _simple("silu", nn.SiLU, F.silu, _nn.silu_, aten.silu_backward),
    _simple("gelu", nn.GELU, F.gelu, _nn.gelu_, aten.gelu_backward, parameter=_APPROXIMATION),
    ActivationRow(
        "gelu_tanh",
        nn.GELU,
        function=lambda y, p: F.gelu(y, approximate="tanh"),
        forward=lambda y, p: _nn.gelu_(y, approximate="tanh"),
        grad=lambda dz, y, p, out: write_gradient(aten.gelu_backward, out, dz, y, approximate="tanh"),
        parameter=_APPROXIMATION,
        selected_by=("gelu", "tanh"),
    ),
    _simple("mish", nn.Mish, F.mish, _nn.mish_, aten.mish_backward, writes=False),
    _simple("hardswish", nn.Hardswish, F.hardswish, _nn.hardswish_, aten.hardswish_backward, writes=False),
    _simple("relu6", nn.ReLU6, F.relu6, lambda y: _nn.hardtanh_(y, 0.0, 6.0), aten.hardtanh_backward, 0.0, 6.0),
    _simple(
        "softplus",
        nn.Softplus,
        F.softplus,
        lambda y: _nn.softplus(y, out=y),
        aten.softplus_backward,
        1,
        20,
        fixed=(("beta", 1.0), ("threshold", 20.0)),
        autocast=False,
    ),
    ActivationRow(
        "prelu",
        nn.PReLU,
        function=lambda y, slope: F.prelu(y, slope.to(y.dtype)),
        forward=lambda y, slope: _torch.prelu_kernel(y, _per_channel(slope, y)),
        grad=_prelu_grad,
        parameter=Parameter("initial slope", "init", 0.25),
        learned=True,
    ),
)
TABLE: dict[str, ActivationRow] = {row.name: row for row in _ROWS}


# The row of each class of stock modules.  If a word selects among several rows, this is the first row.
OF_MODULE: dict[type[nn.Module], ActivationRow] = {
    row.module: row for row in _ROWS if row.module is not None and row.selected_by is None
}


def is_invertible(name: str, param: float | str | None) -> bool:
    """Whether an op can store only the output of this activation, with this number as the parameter."""
    row = TABLE[name]
    return row.inverse is not None and (row.parameter is None or (isinstance(param, (int, float)) and param > 0))
