"""The only table of what the package knows about PyTorch's functions: one row for each function, or family of them.

    who reads it                                                what it takes
    what the backend computes again (``graph.py``)              ops, cheap
    rounding (``low_bit/``)                                     ops, kind, kinks, pieces, keeps_sign
    norms (``capture/norms.py``), and ``codegen/in_place.py``   ops, backward, parameter, fixed

To teach all of them a function, add a row.  ``tests/compiler/test_op_table.py`` walks the table, and compares each row
with what the function does.

A row without ``calls`` has ops that only a compiler writes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]

# What a function does with values that are right on average, but rounded (``kind`` of a row):
# the result is right on average;
LINEAR = "linear"
# so it is, unless two arguments come from the same rounding;
PRODUCT = "product"
# it is nearly, if there are many values to round to, because the derivative varies slowly;
SMOOTH = "smooth"
# it is not, as of functions that use statistics of their argument, or about which nothing is known;
EXACT = "exact"
# the function reads sizes and no values.
FORM = "form"

# The form of a function that writes over its first argument is the same function with ``inplace=True``.
FLAG = "inplace"


@dataclass(frozen=True, eq=False)
class OpRow:
    """What the package knows about a function.

    name: the name in errors and tests.
    kind: one of the words above; of a function with ``kinks``, what it is between them.
    ops: the names of the aten or prims ops that compute it in a graph, without views.
    calls: the functions and methods that compute it, each with the form that writes over the first argument: another
        function, ``FLAG``, or None.  The tests compare the row with them.
    cheap: whether the ops may run again in backward: they give the same result, and have little arithmetic.
    kinks: the places where the derivative jumps, for the default arguments.
    keeps_sign: the function is linear on both sides of 0, and its result is above 0 where its argument is.
    pieces: the first one of ``ops`` as questions (x <= 0), choices and ops without kinks.  With None, the compiler's
        own decomposition is taken.
    backward: the op of the gradient.  It has the arguments ``parameter`` and ``fixed`` too.
    parameter: the argument of the op that is the parameter of the activation ``name`` of ``fusedseg.activation``.
    fixed: values that other arguments of the op have in this activation.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    calls: dict[Function, Any] = field(default_factory=dict)
    cheap: bool = True
    kinks: tuple[float, ...] = ()
    keeps_sign: bool = False
    pieces: Function | None = None
    backward: str = ""
    parameter: str = ""
    fixed: tuple[tuple[str, Any], ...] = ()


def _alone(*functions: Function) -> dict[Function, Any]:
    """Functions without a form that overwrites."""
    return dict.fromkeys(functions)


def _flagged(*functions: Function) -> dict[Function, Any]:
    """Functions with the option ``inplace``."""
    return dict.fromkeys(functions, FLAG)


def _each(kind: str, ops: tuple[str, ...], cheap: bool = True) -> list[OpRow]:
    """A row for each of the ops, without calls."""
    return [OpRow(op, kind, (op,), cheap=cheap) for op in ops]


def _clamp(x: Tensor, low: float | Tensor | None = None, high: float | Tensor | None = None) -> Tensor:
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


_ACTIVATIONS = (
    OpRow(
        "relu", LINEAR, ("relu",),
        {F.relu: FLAG, torch.relu: torch.relu_, Tensor.relu: Tensor.relu_},
        kinks=(0.0,), keeps_sign=True,
        # The gradient asks the same question, and nothing asks twice.
        pieces=lambda x: torch.where(x <= 0, 0.0, x),
        backward="threshold_backward", fixed=(("threshold", 0),),
    ),
    OpRow(
        "leaky_relu", LINEAR, ("leaky_relu",), _flagged(F.leaky_relu), kinks=(0.0,), keeps_sign=True,
        pieces=lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
        backward="leaky_relu_backward", parameter="negative_slope",
    ),
    OpRow(
        "prelu", LINEAR, ("_prelu_kernel",), _alone(F.prelu, torch.prelu, Tensor.prelu), kinks=(0.0,),
        pieces=lambda x, w: torch.where(x > 0, x, w * x),
    ),
    OpRow(
        "hardtanh", LINEAR, ("hardtanh",), _flagged(F.hardtanh), kinks=(-1.0, 1.0),
        pieces=lambda x, low=-1.0, high=1.0: _clamp(x, low, high), backward="hardtanh_backward",
    ),
    OpRow(
        "relu6", LINEAR, ("hardtanh",), _flagged(F.relu6), kinks=(0.0, 6.0), backward="hardtanh_backward",
        fixed=(("min_val", 0), ("max_val", 6)),
    ),
    OpRow(
        "hardsigmoid", LINEAR, ("hardsigmoid",), _flagged(F.hardsigmoid), kinks=(-3.0, 3.0),
        backward="hardsigmoid_backward",
    ),
    OpRow(
        "hardswish", SMOOTH, ("hardswish",), _flagged(F.hardswish), kinks=(-3.0, 3.0),
        backward="hardswish_backward",
    ),
    OpRow(
        "elu", SMOOTH, ("elu",), _flagged(F.elu), kinks=(0.0,), backward="elu_backward", parameter="alpha",
        fixed=(("scale", 1), ("input_scale", 1)),
    ),
    OpRow("selu", SMOOTH, ("elu",), _flagged(F.selu), kinks=(0.0,), backward="elu_backward"),
    OpRow("celu", SMOOTH, ("celu",), _flagged(F.celu)),
    OpRow("silu", SMOOTH, ("silu",), _flagged(F.silu), backward="silu_backward"),
    OpRow("mish", SMOOTH, ("mish",), _flagged(F.mish), backward="mish_backward"),
    OpRow(
        "gelu", SMOOTH, ("gelu",), _alone(F.gelu), backward="gelu_backward", fixed=(("approximate", "none"),)
    ),
    OpRow("gelu_tanh", SMOOTH, ("gelu",), backward="gelu_backward", fixed=(("approximate", "tanh"),)),
    OpRow(
        "softplus", SMOOTH, ("softplus",), _alone(F.softplus), kinks=(20.0,), backward="softplus_backward",
        fixed=(("beta", 1), ("threshold", 20)),
    ),
    *(
        OpRow(
            name, SMOOTH, (name,), {call: over, method: overwriting, function: None}, backward=f"{name}_backward",
        )
        for name, function, call, over, method, overwriting in (
            ("sigmoid", F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_),
            ("tanh", F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_),
        )
    ),
)  # fmt: skip

_PRODUCTS = (
    OpRow(
        "convolution", PRODUCT, ("convolution",),
        _alone(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), cheap=False,
    ),
    OpRow("linear", PRODUCT, ("addmm", "mm", "bmm", "baddbmm"), _alone(F.linear), cheap=False),
    OpRow("mul", PRODUCT, ("mul",), {torch.mul: Tensor.mul_, Tensor.mul: Tensor.mul_}),
    # It is linear in the numerator alone; ``branches.kind_of`` asks which argument is rounded.
    OpRow("div", SMOOTH, ("div",), {torch.div: Tensor.div_, Tensor.div: Tensor.div_}),
    *_each(PRODUCT, ("addcmul",)),
    *_each(
        PRODUCT,
        (
            "convolution_backward", "native_batch_norm_backward", "native_dropout_backward",
            "native_group_norm_backward", "native_layer_norm_backward",
        ),
        cheap=False,
    ),
)  # fmt: skip

_LINEAR = (
    OpRow("add", LINEAR, ("add",), {torch.add: Tensor.add_, Tensor.add: Tensor.add_}),
    OpRow("sub", LINEAR, ("sub",), {torch.sub: Tensor.sub_, Tensor.sub: Tensor.sub_}),
    OpRow("cat", LINEAR, ("cat",), _alone(torch.cat, torch.concat)),
    # Not cheap in a graph: with a cheap roll SwinUNETR keeps 0.35 of eager mode's bytes, and else 0.11.
    OpRow("roll", LINEAR, ("roll",), _alone(torch.roll, Tensor.roll), cheap=False),
    OpRow("stack", LINEAR, ("stack",), _alone(torch.stack)),
    OpRow(
        "pad", LINEAR,
        (
            "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d",
        ),
        _alone(F.pad),
    ),
    OpRow(
        "reshape", LINEAR, ("clone", "_unsafe_view"),
        _alone(torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape),
    ),
    OpRow("clone", LINEAR, ("clone",), _alone(torch.clone, Tensor.clone, Tensor.contiguous)),
    OpRow(
        "to", LINEAR, ("_to_copy", "convert_element_type"),
        _alone(Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double),
    ),
    OpRow(
        "pixel_shuffle", LINEAR, ("pixel_shuffle", "pixel_unshuffle"), _alone(F.pixel_shuffle, F.pixel_unshuffle),
    ),
    OpRow(
        "avg_pool", LINEAR, ("avg_pool2d", "avg_pool3d"), _alone(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
    ),
    OpRow(
        "adaptive_avg_pool", LINEAR, ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
        _alone(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    ),
    OpRow(
        "interpolate", LINEAR,
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
        ),
        _alone(F.interpolate),
    ),
    # Its mask is kept: nothing is drawn again.
    OpRow(
        "dropout", LINEAR, ("native_dropout",), _flagged(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        cheap=False,
    ),
    *_each(LINEAR, ("rsub", "neg", "where", "sum", "mean", "repeat", "index", "_unsafe_index", "masked_fill")),
    *_each(LINEAR, ("broadcast_in_dim",)),
    *_each(LINEAR, ("copy",), cheap=False),
    # Of the pool's input they read the size alone.
    *_each(
        LINEAR,
        (
            "avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward",
        ),
        cheap=False,
    ),
)  # fmt: skip

_EXACT = (
    OpRow(
        "batch_norm", EXACT,
        (
            "native_batch_norm", "_batch_norm_with_update_functional", "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional", "cudnn_batch_norm", "miopen_batch_norm",
        ),
        _alone(F.batch_norm),
    ),
    # In eval mode the statistics are constants.
    *_each(LINEAR, ("_native_batch_norm_legit_no_training",)),
    OpRow("instance_norm", EXACT, ("native_batch_norm",), _alone(F.instance_norm)),
    OpRow("group_norm", EXACT, ("native_group_norm",), _alone(F.group_norm)),
    OpRow("layer_norm", EXACT, ("native_layer_norm",), _alone(F.layer_norm)),
    OpRow(
        "max_pool2d", EXACT, ("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets"),
        _alone(F.max_pool2d, torch.max_pool2d),
    ),
    OpRow("max_pool3d", EXACT, ("max_pool3d_with_indices",), _alone(F.max_pool3d, torch.max_pool3d)),
    *_each(EXACT, ("_log_softmax", "glu", "log_sigmoid_forward", "var", "var_mean", "rsqrt")),
)  # fmt: skip

# Ops that a compiler writes for functions above and their gradients.
_WRITTEN = (
    *_each(SMOOTH, ("exp", "expm1", "log1p", "erf", "sin", "cos", "_softmax")),
    *_each(
        SMOOTH,
        (
            "silu_backward", "gelu_backward", "mish_backward", "sigmoid_backward", "tanh_backward",
            "_softmax_backward_data",
        ),
        cheap=False,
    ),
    OpRow("abs", LINEAR, ("abs",), kinks=(0.0,), pieces=lambda x: torch.where(x < 0, -x, x)),
    OpRow("clamp", EXACT, ("clamp",), pieces=_clamp),
    OpRow("clamp_min", EXACT, ("clamp_min",), pieces=_clamp),
    OpRow("clamp_max", EXACT, ("clamp_max",), pieces=lambda x, high: _clamp(x, None, high)),
    OpRow("maximum", EXACT, ("maximum",), pieces=lambda a, b: torch.where(a >= b, a, b)),
    OpRow("minimum", EXACT, ("minimum",), pieces=lambda a, b: torch.where(a <= b, a, b)),
    OpRow(
        "threshold_backward", EXACT, ("threshold_backward",), cheap=False,
        pieces=lambda g, y, t: torch.where(y <= t, 0.0, g),
    ),
    OpRow(
        "leaky_relu_backward", EXACT, ("leaky_relu_backward",), cheap=False,
        pieces=lambda g, x, slope, of_result: torch.where(x > 0, g, g * slope),
    ),
    OpRow(
        "_prelu_kernel_backward", EXACT, ("_prelu_kernel_backward",), cheap=False,
        pieces=lambda g, x, w: (torch.where(x > 0, g, w * g), torch.where(x > 0, 0.0, x * g)),
    ),
    *_each(
        FORM,
        (
            "new_empty_strided", "new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like",
            "ones_like", "full_like",
        ),
        cheap=False,
    ),
)  # fmt: skip

ROWS: tuple[OpRow, ...] = (*_ACTIVATIONS, *_PRODUCTS, *_LINEAR, *_EXACT, *_WRITTEN)


def _by_op(rows: Iterable[OpRow]) -> dict[str, OpRow]:
    found: dict[str, OpRow] = {}
    for row in rows:
        for op in row.ops:
            found.setdefault(op, row)
    return found


# For each op, the first row that has it.  Rows that share an op agree about it, but for the places of its kinks.
OF_OP: dict[str, OpRow] = _by_op(ROWS)
# The ops that may run again in backward.  Elementwise ops and views, which PyTorch marks, may as well.
CHEAP = frozenset(op for op, row in OF_OP.items() if row.cheap)
