"""The one table of what the compiler knows about PyTorch's functions and ops: a row for each, or a family of them.

To teach the compiler an op, add a row, or set a column of the row that has it.  A new row also lets backward recompute
the op, unless it says ``cheap=False``.  The rows of the ops of this package are registered with them
(``ops/registry.py``).  ``tests/compiler/test_op_table.py`` walks the table, and compares each row with what the
function does.

A row without ``calls`` speaks of its ops alone: a compiler writes them, or they differ from others of their function.
For an op that several rows have, such a row is taken first.

Two other tables stand beside their reader: ``DIRECT`` of ``codegen/aten.py``, the functions that generated code calls
in place of ops, and ``INSTEAD`` of ``rewrite/channels_last.py``, the ops that keep channels_last in place of others.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.registry import OPS

Function = Callable[..., Any]

# How a function reads packed values (``reads`` of a row).  ``low_bit/rule.py`` applies the column to graphs, and
# docs/low_bits.md has the bounds of the errors.
#
# The result is linear in its arguments, and each of its values is one of them, or a fixed multiple of one;
FOLLOWS = "follows"
# a choice, which may leave out the largest values: it follows if a norm has set their size;
CHOOSES = "chooses"
# a sum or difference of two terms, which follows if the terms follow different layers;
ADDS = "adds"
# an interpolation, which follows if it enlarges;
INTERPOLATES = "interpolates"
# a linear function of the first argument, which reads sizes and positions of the others: it follows exact values;
FIRST = "first"
# (these are linear)
LINEAR = (FOLLOWS, CHOOSES, ADDS, INTERPOLATES, FIRST)
# a product, which follows a factor if the other one is a number or a vector of parameters;
FACTOR = "factor"
# a convolution or a matrix product, of which the gradient of the weight is a sum of gradients times values;
SUM = "sum"
# the gradient of a batch, instance or group norm;
NORM = "norm"
# an activation with a bounded slope, or its gradient: in 8 bits, where a norm has set the size of what it reads;
SLOPE = "slope"
# not at all, as all functions without a row;
EXACT = "exact"
# the function reads sizes and no values.
FORM = "form"

# What Inductor does with an op that is not elementwise (``inductor`` of a row):
# it computes the op inside the kernels that read its result;
INSIDE = "inside"
# the op has a kernel of its own, inside which its elementwise inputs are computed.
READS = "reads"

# What an op does with images in channels_last (``layout`` of a row); elementwise ops need no row for it:
# the result keeps the format;
KEEPS = "keeps"
# it has the same result for images in any format, which is no image of the same size.
ANY = "any"

# The form of a function that writes over its first argument is the same function with ``inplace=True``.
FLAG = "inplace"


@dataclass(frozen=True, eq=False)
class OpRow:
    """What the compiler knows about a function, or about ops.

    name: the name in errors and tests.
    reads: how it reads packed values, by one of the words above; of a function with ``kinks``, how it reads them
        between these.
    ops: the names of the aten or prims ops that compute it in a graph, without views; ops of this package begin with
        "fusedseg::".
    calls: the functions and methods that compute it, each with the form that writes over the first argument: another
        function, ``FLAG``, or None.  The tests compare the row with them.
    arguments: the names of the arguments of these calls behind the first one, if they are numbers.

    What may be recomputed, and at what price:

    cheap: whether the ops may run again in backward: they give the same result, and have little arithmetic.  Views, and
        ops that PyTorch marks as pointwise, may whatever their row says.
    compute_intensive: whether it is a convolution or a matrix product, whose result mixes values of many places.  The
        arithmetic of a second run is asked of PyTorch (``is_compute_intensive`` of ``graph.py``).
    batched: whether both factors are activations.
    images: the places of the arguments that are images, of which kernels may make copies in another layout.

    How packed values are read:

    kinks: the places where the derivative jumps, for the default arguments.
    keeps_sign: the function is linear on both sides of 0, and its result is above 0 where its argument is.
    pieces: the first one of ``ops`` as predicates (x <= 0), choices and ops without kinks.  With None, the compiler's
        own decomposition is taken.
    sign_of: the place of the argument whose sign the op asks for, and that of the number which it is compared with.
    copies: the result has the values of the argument, perhaps in another dtype.
    bounded: no value of the input makes the result large.
    poles: whether some results may be infinite, or far larger than others, so that no result is packed.
    statistics: the place of the first result that is a mean or 1 / sqrt(var + eps), which gradients have as a power.
        It is never packed.
    positions: whether the second result numbers positions in windows, whose size is the second argument.
    eager_keeps_input: whether eager mode keeps the first argument of the stock function for which the op stands.

    Where results lie in memory:

    aliases: the result lies in the memory of the argument although the schema does not say so.
    returns_input: the result is the argument.
    in_place: the overload of the op and of its form OP_, which writes over the first argument; "" without one.
    commutative: whether two tensors may be exchanged.
    dense: whether the first argument is a gradient that the op needs without gaps.
    inductor: INSIDE, READS, or "" for neither.
    layout: KEEPS, ANY, or "" for neither, or where it is not known.

    Activations:

    backward: the op of the gradient.  It has the arguments ``parameter`` and ``fixed`` too.
    parameter: the argument of the op that is the parameter of the activation ``name`` of ``fusedseg.activation``.
    fixed: values that other arguments of the op have in this activation.
    """

    name: str
    reads: str
    ops: tuple[str, ...]
    calls: dict[Function, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    cheap: bool = True
    compute_intensive: bool = False
    batched: bool = False
    images: tuple[int, ...] = ()
    kinks: tuple[float, ...] = ()
    keeps_sign: bool = False
    pieces: Function | None = None
    sign_of: tuple[int, ...] = ()
    copies: bool = False
    bounded: bool = False
    poles: bool = False
    statistics: int | None = None
    positions: bool = False
    eager_keeps_input: bool = False
    aliases: bool = False
    returns_input: bool = False
    in_place: str = ""
    commutative: bool = False
    dense: bool = False
    inductor: str = ""
    layout: str = ""
    backward: str = ""
    parameter: str = ""
    fixed: tuple[tuple[str, Any], ...] = ()


def _alone(*functions: Function) -> dict[Function, Any]:
    """Functions without a form that overwrites."""
    return dict.fromkeys(functions)


def _flagged(*functions: Function) -> dict[Function, Any]:
    """Functions with the option ``inplace``."""
    return dict.fromkeys(functions, FLAG)


def _each(reads: str, *ops: str, **columns: Any) -> list[OpRow]:
    """A row for each of the ops, without calls."""
    return [OpRow(op, reads, (op,), **columns) for op in ops]


def _clamp(x: Tensor, low: float | Tensor | None = None, high: float | Tensor | None = None) -> Tensor:
    if low is not None:
        x = torch.where(x < low, low, x)
    return x if high is None else torch.where(x > high, high, x)


_ACTIVATIONS = (
    OpRow(
        "relu", FOLLOWS, ("relu",),
        {F.relu: FLAG, torch.relu: torch.relu_, Tensor.relu: Tensor.relu_},
        kinks=(0.0,), keeps_sign=True, sign_of=(0,), in_place="default",
        # The gradient has the same predicate, which is evaluated once.
        pieces=lambda x: torch.where(x <= 0, 0.0, x),
        backward="threshold_backward", fixed=(("threshold", 0),),
    ),
    OpRow(
        "leaky_relu", FOLLOWS, ("leaky_relu",), _flagged(F.leaky_relu), arguments=("negative_slope",), kinks=(0.0,),
        keeps_sign=True, sign_of=(0,), in_place="default",
        pieces=lambda x, slope=0.01: torch.where(x > 0, x, x * slope),
        backward="leaky_relu_backward", parameter="negative_slope",
    ),
    OpRow(
        "prelu", FOLLOWS, ("_prelu_kernel",), _alone(F.prelu, torch.prelu, Tensor.prelu), kinks=(0.0,),
        pieces=lambda x, w: torch.where(x > 0, x, w * x),
    ),
    OpRow(
        "hardtanh", FOLLOWS, ("hardtanh",), _flagged(F.hardtanh), kinks=(-1.0, 1.0),
        pieces=lambda x, low=-1.0, high=1.0: _clamp(x, low, high), in_place="default", backward="hardtanh_backward",
    ),
    OpRow(
        "relu6", FOLLOWS, ("hardtanh",), _flagged(F.relu6), arguments=("min_val", "max_val"), kinks=(0.0, 6.0),
        in_place="default", backward="hardtanh_backward", fixed=(("min_val", 0), ("max_val", 6)),
    ),
    OpRow(
        "hardsigmoid", FOLLOWS, ("hardsigmoid",), _flagged(F.hardsigmoid), kinks=(-3.0, 3.0),
        in_place="default", backward="hardsigmoid_backward",
    ),
    OpRow(
        "hardswish", EXACT, ("hardswish",), _flagged(F.hardswish), kinks=(-3.0, 3.0),
        in_place="default", backward="hardswish_backward",
    ),
    OpRow(
        "elu", EXACT, ("elu",), _flagged(F.elu), arguments=("alpha",), kinks=(0.0,), in_place="default",
        backward="elu_backward", parameter="alpha",
        fixed=(("scale", 1), ("input_scale", 1)),
    ),
    OpRow("selu", EXACT, ("elu",), _flagged(F.selu), kinks=(0.0,), in_place="default", backward="elu_backward"),
    OpRow("celu", EXACT, ("celu",), _flagged(F.celu)),
    OpRow("silu", SLOPE, ("silu",), _flagged(F.silu), in_place="default", backward="silu_backward"),
    OpRow("mish", SLOPE, ("mish",), _flagged(F.mish), in_place="default", backward="mish_backward"),
    OpRow(
        "gelu", SLOPE, ("gelu",), _alone(F.gelu), in_place="default", backward="gelu_backward",
        fixed=(("approximate", "none"),),
    ),
    OpRow(
        "gelu_tanh", SLOPE, ("gelu",), in_place="default", backward="gelu_backward", fixed=(("approximate", "tanh"),),
    ),
    OpRow(
        "softplus", EXACT, ("softplus",), _alone(F.softplus), arguments=("beta", "threshold"), kinks=(20.0,),
        backward="softplus_backward", fixed=(("beta", 1), ("threshold", 20)),
    ),
    *(
        OpRow(
            name, EXACT, (name,), {call: over, method: overwriting, function: None}, bounded=True, in_place="default",
            backward=f"{name}_backward"
        )
        for name, function, call, over, method, overwriting in (
            ("sigmoid", F.sigmoid, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_),
            ("tanh", F.tanh, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_),
        )
    ),
)  # fmt: skip

_PRODUCTS = (
    OpRow(
        "convolution", SUM, ("convolution",),
        _alone(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), cheap=False,
        compute_intensive=True, images=(0,),
    ),
    *_each(
        SUM, "convolution_backward", cheap=False, compute_intensive=True, images=(0, 1), dense=True,
    ),
    OpRow("linear", SUM, ("addmm", "mm"), _alone(F.linear), cheap=False, compute_intensive=True),
    *_each(EXACT, "bmm", "baddbmm", cheap=False, compute_intensive=True, batched=True),
    OpRow(
        "mul", FACTOR, ("mul",), {torch.mul: Tensor.mul_, Tensor.mul: Tensor.mul_}, in_place="Tensor",
        commutative=True,
    ),
    # The numerator alone may be packed.
    OpRow("div", FACTOR, ("div",), {torch.div: Tensor.div_, Tensor.div: Tensor.div_}, in_place="Tensor", poles=True),
    *_each(NORM, "native_batch_norm_backward", "native_group_norm_backward", cheap=False, dense=True),
    # A row may be far smaller than others, and its gradient so much larger.
    *_each(EXACT, "native_layer_norm_backward", "_fused_rms_norm_backward", cheap=False),
    *_each(FIRST, "native_dropout_backward", cheap=False),
)  # fmt: skip

_LINEAR = (
    OpRow(
        "add", ADDS, ("add",), {torch.add: Tensor.add_, Tensor.add: Tensor.add_}, in_place="Tensor",
        commutative=True,
    ),
    OpRow("sub", ADDS, ("sub",), {torch.sub: Tensor.sub_, Tensor.sub: Tensor.sub_}, in_place="Tensor"),
    OpRow("cat", FOLLOWS, ("cat",), _alone(torch.cat, torch.concat), inductor=READS, layout=KEEPS),
    # Not cheap in a graph: with a cheap roll SwinUNETR keeps 0.35 of eager mode's bytes, and else 0.11.
    OpRow("roll", FOLLOWS, ("roll",), _alone(torch.roll, Tensor.roll), cheap=False),
    OpRow("stack", FOLLOWS, ("stack",), _alone(torch.stack)),
    *_each(FOLLOWS, "constant_pad_nd", inductor=INSIDE, layout=KEEPS),
    OpRow(
        "pad", FOLLOWS,
        (
            "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
            "replication_pad2d", "replication_pad3d",
        ),
        _alone(F.pad),
    ),
    *_each(FOLLOWS, "_unsafe_view", aliases=True),
    *_each(FOLLOWS, "alias", "detach", "view", returns_input=True),
    OpRow("clone", FOLLOWS, ("clone",), _alone(torch.clone, Tensor.clone, Tensor.contiguous), copies=True),
    OpRow(
        "reshape", FOLLOWS, ("clone", "_unsafe_view"),
        _alone(torch.flatten, Tensor.flatten, torch.reshape, Tensor.reshape),
    ),
    OpRow(
        "to", FOLLOWS, ("_to_copy", "convert_element_type"),
        _alone(Tensor.to, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double), copies=True, inductor=INSIDE,
    ),
    OpRow(
        "pixel_shuffle", FOLLOWS, ("pixel_shuffle", "pixel_unshuffle"), _alone(F.pixel_shuffle, F.pixel_unshuffle),
    ),
    *_each(FIRST, "avg_pool2d", "_adaptive_avg_pool2d", layout=KEEPS),
    OpRow(
        "avg_pool", FIRST, ("avg_pool2d", "avg_pool3d"), _alone(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
    ),
    OpRow(
        "adaptive_avg_pool", FIRST, ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
        _alone(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    ),
    OpRow(
        "interpolate", INTERPOLATES,
        (
            "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
            "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d",
        ),
        _alone(F.interpolate),
    ),
    # Its mask is kept: nothing is drawn again.
    OpRow(
        "dropout", CHOOSES, ("native_dropout",), _flagged(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        cheap=False,
    ),
    # The last one is Inductor's call that lays a tensor out in given strides.
    *_each(FOLLOWS, "neg", "broadcast_in_dim", "inductor_force_stride_order"),
    *_each(CHOOSES, "where", "masked_fill"),
    *_each(ADDS, "rsub"),
    *_each(FIRST, "sum", "mean", inductor=READS, layout=ANY),
    # The second one repeats values, in an interpolation that Inductor has taken apart.
    *_each(FOLLOWS, "repeat", "_unsafe_index", inductor=INSIDE),
    *_each(CHOOSES, "index", inductor=INSIDE),
    *_each(FOLLOWS, "copy", cheap=False),
    *_each(FIRST, "avg_pool2d_backward", "_adaptive_avg_pool2d_backward", cheap=False, layout=KEEPS),
    *_each(
        FIRST, "avg_pool3d_backward", "_adaptive_avg_pool3d_backward", "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward", cheap=False,
    ),
)  # fmt: skip

_EXACT = (
    OpRow(
        "batch_norm", EXACT,
        (
            "native_batch_norm", "_batch_norm_with_update_functional", "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional", "cudnn_batch_norm", "miopen_batch_norm",
        ),
        _alone(F.batch_norm), statistics=1, bounded=True,
    ),
    # In eval mode the statistics are constants.
    *_each(FOLLOWS, "_native_batch_norm_legit_no_training", statistics=1),
    OpRow("instance_norm", EXACT, ("native_batch_norm",), _alone(F.instance_norm), statistics=1, bounded=True),
    OpRow("group_norm", EXACT, ("native_group_norm",), _alone(F.group_norm), statistics=1, bounded=True),
    # Where PyTorch has no kernel for an RMS norm, as on a CPU, graphs have it as powers and means.
    OpRow(
        "layer_norm", EXACT, ("native_layer_norm", "_fused_rms_norm"), _alone(F.layer_norm), statistics=1, bounded=True,
    ),
    *_each(EXACT, "_low_memory_max_pool_with_offsets", positions=True),
    OpRow(
        "max_pool2d", EXACT, ("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets"),
        _alone(F.max_pool2d, torch.max_pool2d),
    ),
    OpRow("max_pool3d", EXACT, ("max_pool3d_with_indices",), _alone(F.max_pool3d, torch.max_pool3d)),
    *_each(EXACT, "glu", "log_sigmoid_forward", "addcmul", "erf", "sin", "cos"),
    *_each(EXACT, "var", inductor=READS, layout=ANY),
    *_each(EXACT, "var_mean", statistics=0, inductor=READS, layout=ANY),
    *_each(EXACT, "_softmax", "_log_softmax", poles=True),
    *_each(EXACT, "rsqrt", "reciprocal", "pow", "exp", "expm1", "log1p", poles=True),
    *_each(EXACT, "le", "gt", sign_of=(0, 1)),
)  # fmt: skip

# Ops that a compiler writes for functions above and their gradients.
_WRITTEN = (
    *_each(
        SLOPE, "silu_backward", "gelu_backward", "mish_backward", "sigmoid_backward", "tanh_backward", cheap=False,
    ),
    OpRow("abs", FOLLOWS, ("abs",), kinks=(0.0,), pieces=lambda x: torch.where(x < 0, -x, x)),
    OpRow("clamp", EXACT, ("clamp",), pieces=_clamp),
    OpRow("clamp_min", EXACT, ("clamp_min",), pieces=_clamp),
    OpRow("clamp_max", EXACT, ("clamp_max",), pieces=lambda x, high: _clamp(x, None, high)),
    OpRow("maximum", EXACT, ("maximum",), pieces=lambda a, b: torch.where(a >= b, a, b)),
    OpRow("minimum", EXACT, ("minimum",), pieces=lambda a, b: torch.where(a <= b, a, b)),
    OpRow(
        "threshold_backward", EXACT, ("threshold_backward",), cheap=False, sign_of=(1, 2),
        pieces=lambda g, y, t: torch.where(y <= t, 0.0, g),
    ),
    OpRow(
        "leaky_relu_backward", EXACT, ("leaky_relu_backward",), cheap=False, sign_of=(1,),
        pieces=lambda g, x, slope, of_result: torch.where(x > 0, g, g * slope),
    ),
    OpRow(
        "_prelu_kernel_backward", EXACT, ("_prelu_kernel_backward",), cheap=False,
        pieces=lambda g, x, w: (torch.where(x > 0, g, w * g), torch.where(x > 0, 0.0, x * g)),
    ),
    *_each(FORM, "new_empty_strided", "new_empty", "new_zeros", "new_ones", "new_full", cheap=False),
    *_each(FORM, "empty_like", "zeros_like", "ones_like", "full_like", cheap=False),
    *_each(EXACT, "_reshape_alias", "lift_fresh", "lift", cheap=False, aliases=True),
    *_each(EXACT, "_softmax_backward_data", "slice_backward", "select_backward", cheap=False),
    *_each(EXACT, "_low_memory_max_pool_offsets_to_indices", "full", "iota", cheap=False, inductor=INSIDE),
    *_each(EXACT, "_unsafe_index_put", "index_put", "amax", "amin", "scatter_add", cheap=False, inductor=READS),
)  # fmt: skip

# The ops of this package, which register the columns of their rows.
_OURS = tuple(OpRow(name, ops=(name,), **row) for name, row in OPS.items() if row)

ROWS: tuple[OpRow, ...] = (*_ACTIVATIONS, *_PRODUCTS, *_LINEAR, *_EXACT, *_WRITTEN, *_OURS)


def _by_op(rows: Iterable[OpRow]) -> dict[str, OpRow]:
    found: dict[str, OpRow] = {}
    # Rows of ops alone come first.
    for row in sorted(rows, key=lambda row: bool(row.calls)):
        for op in row.ops:
            found.setdefault(op, row)
    return found


# For each op its row.  Rows that share an op agree about it, but for kinks, and for the arguments of functions.
OF_OP: dict[str, OpRow] = _by_op(ROWS)
# What is known about all other ops.
UNKNOWN = OpRow("", EXACT, (), cheap=False, poles=True)
OF_NAME: dict[str, OpRow] = {row.name: row for row in ROWS}
