"""The table of PyTorch's functions: each row against what the function does."""

import dataclasses
import importlib
import inspect
import random
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fusedseg.activation import TABLE
from fusedseg.compiler.graph import is_cheap, name_of
from fusedseg.compiler.op_table import (
    ANY,
    EXACT,
    FACTOR,
    FLAG,
    FOLLOWS,
    FORM,
    KEEPS,
    LINEAR,
    NORM,
    OF_OP,
    ROWS,
    SLOPE,
    SUM,
)
from tests.reference import UNFUSED

aten = torch.ops.aten
CALLS = [(row, call) for row in ROWS for call in row.calls]
# What else a call does: it draws a mask.
OF_DROPOUT = {"dropout": ("bernoulli", "div", "mul", "bernoulli_", "div_", "empty_like", "new_empty")}
by_call = pytest.mark.parametrize(("row", "call"), CALLS, ids=[f"{row.name}-{call.__name__}" for row, call in CALLS])


def tensor(*shape, dtype=torch.float64):
    return torch.randn(shape or (2, 8, 6, 6), dtype=dtype)


def given(*others):
    return lambda: (tensor(), *others)


def norm_backward():
    return (tensor(), tensor(), torch.rand(8).double(), None, None, torch.zeros(8).double(), torch.ones(8).double())


# The arguments of functions and ops that need more than one tensor.
ARGUMENTS = {
    "_native_batch_norm_legit_no_training": given(*(torch.ones(8).double() for _ in range(4)), 0.1, 1e-5),
    "_adaptive_avg_pool2d": given([3, 3]),
    "_prelu_kernel": lambda: (tensor(), torch.full((1,), 0.3, dtype=torch.float64)),
    "_prelu_kernel_backward": lambda: (tensor(), tensor(), torch.full((1,), 0.3, dtype=torch.float64)),
    "_softmax_backward_data": lambda: (tensor(), tensor().softmax(1), 1, torch.float64),
    "_unsafe_view": given([2, -1]),
    "_unsafe_index": given([None, torch.arange(16) // 2]),
    "_adaptive_avg_pool2d_backward": lambda: (tensor(2, 8, 3, 3), tensor()),
    "_adaptive_avg_pool3d_backward": lambda: (tensor(2, 3, 3, 3), tensor(2, 6, 6, 6)),
    "avg_pool2d_backward": lambda: (tensor(2, 8, 3, 3), tensor(), [2, 2], [2, 2], [0, 0], False, True, None),
    "avg_pool3d_backward": lambda: (
        tensor(2, 3, 3, 3), tensor(2, 6, 6, 6), [2] * 3, [2] * 3, [0] * 3, False, True, None,
    ),
    "max_pool2d_with_indices_backward": lambda: (
        tensor(2, 8, 3, 3), tensor(), [2, 2], [2, 2], [0, 0], [1, 1], False,
        torch.arange(9).reshape(1, 1, 3, 3).repeat(2, 8, 1, 1),
    ),
    "max_pool3d_with_indices_backward": lambda: (
        tensor(2, 3, 3, 3), tensor(2, 6, 6, 6), [2] * 3, [2] * 3, [0] * 3, [1] * 3, False,
        torch.arange(27).reshape(1, 3, 3, 3).repeat(2, 1, 1, 1),
    ),
    "baddbmm": lambda: (tensor(2, 4, 3), tensor(2, 4, 6), tensor(2, 6, 3)),
    "batch_norm": given(None, None, None, None, True),
    "bmm": lambda: (tensor(2, 4, 6), tensor(2, 6, 3)),
    "cat": lambda: ([tensor(), tensor()], 1),
    "clamp": given(-0.5, 0.7),
    "clamp_max": given(0.7),
    "clamp_min": given(-0.5),
    "constant_pad_nd": given([1, 2, 2, 1]),
    "contiguous": lambda: (tensor().transpose(1, 2),),
    "conv1d": lambda: (tensor(2, 8, 6), tensor(4, 8, 3)),
    "conv2d": lambda: (tensor(), tensor(4, 8, 3, 3)),
    "conv3d": lambda: (tensor(2, 2, 4, 4, 4), tensor(3, 2, 3, 3, 3)),
    "conv_transpose1d": lambda: (tensor(2, 8, 6), tensor(8, 4, 2)),
    "conv_transpose2d": lambda: (tensor(), tensor(8, 4, 2, 2)),
    "conv_transpose3d": lambda: (tensor(2, 2, 4, 4, 4), tensor(2, 3, 2, 2, 2)),
    "convolution_backward": lambda: (
        tensor(2, 4, 4, 4), tensor(), tensor(4, 8, 3, 3), [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True] * 3,
    ),
    "double": lambda: (tensor(dtype=torch.float32),),
    "elu": given(0.5),
    "flatten": lambda: (tensor().transpose(1, 2), 1),
    "group_norm": given(4),
    "index": given([None, torch.tensor([1, 1, 3])]),
    "interpolate": given(None, 2.0, "bilinear"),
    "layer_norm": given((8, 6, 6)),
    "leaky_relu_backward": lambda: (tensor(), tensor(), 0.1, False),
    "linear": lambda: (tensor(4, 8), tensor(3, 8), tensor(3)),
    "masked_fill": given(torch.rand(2, 8, 6, 6) < 0.5, 0.5),
    "max_pool3d": lambda: (tensor(2, 4, 6, 6, 6), 2),
    "native_batch_norm_backward": lambda: (*norm_backward(), True, 1e-5, [True] * 3),
    "native_dropout_backward": given(torch.rand(2, 8, 6, 6) < 0.5, 2.0),
    "native_group_norm_backward": lambda: (
        tensor(), tensor(), tensor(2, 4), tensor(2, 4), tensor(8), 2, 8, 36, 4, [True] * 3,
    ),
    "native_layer_norm_backward": lambda: (
        tensor(), tensor(), [6], tensor(2, 8, 6, 1), tensor(2, 8, 6, 1), tensor(6), tensor(6), [True] * 3,
    ),
    "pad": given([1, 2, 2, 1], "reflect"),
    "prelu": lambda: (tensor(), torch.full((8,), 0.3, dtype=torch.float64)),
    "repeat": given([1, 2, 1, 1]),
    "reshape": lambda: (tensor().transpose(1, 2), (-1,)),
    "roll": given(2, 1),
    "select_backward": lambda: (tensor(2, 6, 6), [2, 8, 6, 6], 1, 3),
    "slice_backward": lambda: (tensor(2, 8, 3, 6), [2, 8, 6, 6], 2, 1, 4, 1),
    "softplus": given(1, 2.0),
    "threshold_backward": lambda: (tensor(), tensor(), 0.2),
    "to": given(torch.float32),
    "view": given([2, -1]),
    "where": lambda: (torch.rand(2, 8, 6, 6) < 0.5, tensor(), tensor()),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "maximum", "minimum", "copy"), lambda: (tensor(), tensor())),
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool2d"), given(2)),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), given(3)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), given(2)),
}  # fmt: skip
ARGUMENTS["concat"] = ARGUMENTS["stack"] = ARGUMENTS["cat"]
ARGUMENTS["dropout1d"] = lambda: (tensor(2, 8, 6),)
ARGUMENTS["dropout3d"] = lambda: (tensor(2, 8, 2, 6, 6),)
ARGUMENTS["avg_pool1d"] = ARGUMENTS["adaptive_avg_pool1d"] = lambda: (tensor(2, 8, 6), 2)
# The places of the arguments in which a function is linear, where other tensors are statistics.  The input of a norm
# enters its gradient twice, but once by a mean over many values.
VARIED = {
    "div": (0,),
    "_softmax_backward_data": (0,),
    "_native_batch_norm_legit_no_training": (0,),
    "copy": (1,),
}
# The places of kinks that another argument has moved.
MOVED = {"softplus": (2.0,)}
# Functions of several arguments as functions of the argument that counts.
OF_ONE = {
    "prelu": lambda call: lambda x: call(x, torch.full((1,), 0.3, dtype=x.dtype)),
    **dict.fromkeys(
        ("silu_backward", "gelu_backward", "mish_backward", "sigmoid_backward", "tanh_backward"),
        lambda call: lambda x: call(torch.ones_like(x), x),
    ),
}


def arguments(name):
    torch.manual_seed(0)
    return list(ARGUMENTS.get(name, given())())


def is_varied(arg):
    return isinstance(arg, Tensor) and arg.is_floating_point()


def run(function, args):
    # Dropout draws the same mask each time.
    torch.manual_seed(0)
    result = function(*args)
    return [t.double() for t in (result if isinstance(result, tuple) else [result]) if t is not None]


def functions_of(row):
    """The calls of a row; of a row without calls, its ops."""
    found = {f"{call.__name__}-{place}": call for place, call in enumerate(row.calls)}
    return found or {op: getattr(aten, op) for op in row.ops if OF_OP[op] is row and hasattr(aten, op)}


def each(wanted):
    found = [(row, name, function) for row in ROWS if wanted(row) for name, function in functions_of(row).items()]
    return pytest.mark.parametrize(
        ("row", "name", "function"),
        [(row, name.partition("-")[0], function) for row, name, function in found],
        ids=[f"{row.name}-{name}" for row, name, _ in found],
    )


def is_flagged(call):
    """Whether a function has the option ``inplace``; methods and functions of C++ have not."""
    return inspect.isfunction(call) and FLAG in inspect.signature(call).parameters


@by_call
def test_a_form_that_overwrites(row, call):
    overwriting, args = row.calls[call], arguments(call.__name__)
    if overwriting is None:
        assert not is_flagged(call)
        return
    (expected,) = run(call, args)
    torch.manual_seed(0)
    result = call(*args, inplace=True) if overwriting == FLAG else overwriting(*args)
    assert result is args[0]
    assert torch.equal(result, expected)


@by_call
def test_the_ops_are_those_of_the_trace(row, call):
    args = arguments(call.__name__)
    whole, spec = tree_flatten(args)
    places = [place for place, arg in enumerate(whole) if isinstance(arg, Tensor)]

    def run(*tensors):
        swapped = dict(zip(places, tensors, strict=True))
        given = tree_unflatten([swapped.get(place, arg) for place, arg in enumerate(whole)], spec)
        return call(*given)

    nodes = make_fx(run)(*(whole[place] for place in places)).graph.nodes
    nodes = [node for node in nodes if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)]
    names = {name_of(node): node for node in nodes if not node.target.is_view and node.all_input_nodes}
    assert names.keys() <= {*row.ops, *OF_DROPOUT.get(row.name, ())}
    assert names
    for name, node in names.items():
        if name in row.ops:
            assert is_cheap(node) == row.cheap


@each(lambda row: row.reads in (*LINEAR, FACTOR, SUM) and not row.kinks)
def test_linear_functions_are_right_on_average(row, name, function):
    whole, spec = tree_flatten(arguments(name))
    varied = [place for place, arg in enumerate(whole) if is_varied(arg) and place in VARIED.get(name, range(99))]
    for changed in [varied] if row.reads in LINEAR else [[place] for place in varied]:
        other = [torch.randn_like(arg) if place in changed else arg for place, arg in enumerate(whole)]
        middle = [(arg + other[place]) / 2 if place in changed else arg for place, arg in enumerate(whole)]
        results = [run(function, tree_unflatten(given, spec)) for given in (whole, other, middle)]
        for a, b, mean in zip(*results, strict=True):
            # bf16 has 8 bits.
            assert torch.allclose(mean, (a + b) / 2, rtol=0, atol=2**-6 if name in ("half", "bfloat16") else 1e-5)


@each(lambda row: row.reads == FOLLOWS and not row.kinks)
def test_what_follows_leaves_no_value_out(row, name, function):
    """A choice may leave out the values that are far larger than its result."""
    whole, spec = tree_flatten(arguments(name))
    for place in [place for place, arg in enumerate(whole) if is_varied(arg) and place in VARIED.get(name, range(99))]:
        for value in random.Random(place).sample(range(whole[place].numel()), min(6, whole[place].numel())):
            other = whole[place].clone()
            other[torch.unravel_index(torch.tensor(value), other.shape)] += 100.0
            results = [
                run(function, tree_unflatten(given, spec))
                for given in (whole, [*whole[:place], other, *whole[place + 1 :]])
            ]
            assert any((a - b).abs().max() > 0.3 for a, b in zip(*results, strict=True)), value


@each(lambda row: row.reads == SLOPE or row.kinks)
def test_kinks_are_where_the_row_says(row, name, function):
    x = torch.arange(-5.0, 7.0, 1e-3, dtype=torch.float64) + 1e-4
    one = OF_ONE.get(name, lambda call: lambda x: call(x, *arguments(name)[1:]))(function)
    slope = (one(x + 1e-6) - one(x - 1e-6)) / 2e-6
    jumps = x[1:][slope.diff().abs() > 0.02 * slope[1:].abs().clamp(min=1)].tolist()
    expected = MOVED.get(name, row.kinks)
    assert jumps == pytest.approx(expected, abs=2e-3)
    if row.reads == FOLLOWS:
        assert len({round(v, 6) for v in slope.tolist()}) <= len(expected) + 1


@pytest.mark.parametrize("row", [row for row in ROWS if row.pieces], ids=lambda row: row.name)
def test_pieces_compute_the_op(row):
    args = arguments(row.ops[0])
    assert all(map(torch.equal, run(row.pieces, args), run(getattr(aten, row.ops[0]), args)))


def laid_out(t):
    rows = {4: torch.channels_last, 5: torch.channels_last_3d}
    return t.contiguous(memory_format=rows[t.dim()]) if isinstance(t, Tensor) and t.dim() in rows else t


@each(lambda row: row.layout)
def test_images_in_channels_last(row, name, function):
    """A result has the same values, and it is in channels_last too (``KEEPS``); a mean is no image."""
    whole, spec = tree_flatten(arguments(name))
    wanted = run(function, tree_unflatten(whole, spec))
    found = run(function, tree_unflatten([laid_out(t) for t in whole], spec))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
        if row.layout == KEEPS and one.dim() in (4, 5):
            assert one.stride() == laid_out(one).stride()
        elif row.layout == ANY:
            assert one.numel() < whole[0].numel()


@each(lambda row: row.keeps_sign)
def test_signs_are_kept(row, name, function):
    x = tensor()
    assert torch.equal(function(x) > 0, x > 0)


@each(lambda row: row.copies)
def test_copies_have_the_values_of_the_argument(row, name, function):
    x, *others = arguments(name)
    torch.testing.assert_close(function(x, *others).double(), x.double(), rtol=2**-7, atol=0)


@each(lambda row: row.bounded)
def test_results_are_bounded_for_any_input(row, name, function):
    """The largest of n values that a norm has scaled is the root of n, which is at most 288 here."""
    x, *others = arguments(name)
    for size in (1e-3, 1.0, 1e6):
        assert run(function, [x * size, *others])[0].abs().max() < 17


@pytest.mark.parametrize("row", [row for row in ROWS if row.backward], ids=lambda row: row.name)
def test_backward_calls_the_op_of_the_gradient(row):
    """``fixed`` and ``parameter`` are arguments of both ops."""
    for op in (row.ops[0], row.backward):
        names = {arg.name for arg in getattr(aten, op).default._schema.arguments}
        assert op == "relu" or {name for name, _ in row.fixed} | {row.parameter} <= {*names, ""}
    function = next(iter(row.calls), partial(F.gelu, approximate="tanh"))

    def run(x):
        return torch.autograd.grad(function(x).sum(), x)

    assert row.backward in {name_of(node) for node in make_fx(run)(tensor().requires_grad_()).graph.nodes}


# Columns that speak of a function with its arguments; rows may differ in them about an op that they share.
OF_FUNCTIONS = "name", "ops", "calls", "arguments", "kinks", "keeps_sign", "pieces", "backward", "parameter", "fixed"


def test_rows_agree_about_an_op():
    """A column of a row would have no effect if another row stood for the op in ``OF_OP``, and said nothing."""
    for row in ROWS:
        for op in row.ops:
            first = OF_OP[op]
            assert (first.reads, first.cheap) == (row.reads, row.cheap), op
            for column in dataclasses.fields(row):
                said = vars(row)[column.name]
                if column.name not in OF_FUNCTIONS and said != column.default:
                    assert vars(first)[column.name] == said, (op, column.name)
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.reads for row in ROWS} == {*LINEAR, EXACT, FACTOR, FORM, NORM, SLOPE, SUM}


def test_rms_norms_on_a_gpu_have_the_row_of_layer_norms():
    """On a CPU an RMS norm is powers and means (``test_norms.py``); as one op, it was never recomputed."""
    assert OF_OP["_fused_rms_norm"] is OF_OP["native_layer_norm"]


def test_each_op_exists():
    """A row for an op that PyTorch has renamed would never be looked up."""
    importlib.import_module("torch._inductor.inductor_prims")
    # It imports the files that define ops of graphs.  Alone, this file did not find the op of average pools.
    importlib.import_module("fusedseg.compiler.partition")
    homes = {"": (aten, torch.ops.prims), "fusedseg": (torch.ops.fusedseg,)}
    for op in OF_OP:
        namespace, _, name = op.rpartition("::")
        assert any(hasattr(home, name) for home in homes[namespace]), op


class OwnMemory(TorchDispatchMode):
    """Compares the memory of results with what the compiler trusts: ``has_own_memory`` of ``graph.py``."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        row = OF_OP.get(func._schema.name.removeprefix("aten::"))
        if row is not None and not (row.aliases or row.returns_input or func.is_view or func._schema.is_mutable):
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for t in filter(is_varied, tree_leaves(result)):
                assert t.untyped_storage().data_ptr() not in given
                assert t.untyped_storage().nbytes() == t.nbytes
                self.seen += 1
        return result


OWNING = {call.__name__: call for _, call in CALLS}
OF_ARGUMENTS = [op for op, row in OF_OP.items() if not (row.aliases or row.returns_input) and op in ARGUMENTS]
OWNING = {op: getattr(aten, op) for op in OF_ARGUMENTS if hasattr(aten, op)} | OWNING


@pytest.mark.parametrize("name", OWNING)
def test_results_lie_in_memory_of_their_own(name):
    """Other ops are not trusted: ``unsafe_split`` returns parts of its argument, ``col2im`` has larger memory."""
    with OwnMemory() as memory:
        OWNING[name](*arguments(name))
    assert memory.seen


@pytest.mark.parametrize("op", [op for op, row in OF_OP.items() if row.in_place])
def test_forms_that_write_over_their_argument(op):
    overload, args = OF_OP[op].in_place, arguments(op)
    (expected,) = run(getattr(getattr(aten, op), overload), args)
    result = getattr(getattr(aten, f"{op}_"), overload)(*args)
    assert result is args[0]
    assert torch.equal(result, expected)


@pytest.mark.parametrize("op", [op for op, row in OF_OP.items() if row.commutative])
def test_arguments_may_be_exchanged(op):
    x, y = arguments(op)
    assert torch.equal(getattr(aten, op)(x, y), getattr(aten, op)(y, x))


@pytest.mark.parametrize("op", [op for op, row in OF_OP.items() if row.returns_input])
def test_the_result_is_the_argument(op):
    x = tensor()
    args = (x, list(x.shape)) if op == "view" else (x,)
    result = getattr(aten, op)(*args)
    assert result.data_ptr() == x.data_ptr()
    assert torch.equal(result, x)


def test_each_activation_has_a_row():
    rows = {row.name: row for row in ROWS}
    fused = [row.name for row in TABLE.values() if row.module is not None]
    # In training, rrelu draws random numbers.
    unfused = [name for name in UNFUSED if name != "rrelu"]
    for name in fused + unfused:
        assert name in rows
        assert rows[name].cheap
