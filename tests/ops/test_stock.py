"""For each function between two convolutions: the bytes that the scope saves, and gradients that do not change."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes
from tests.ops.scope_cases import assert_equal, assert_same_gradients, same_in_the_scope
from tests.tools.called import Called
from tests.tools.tensors import channels_last

SHAPE = (2, 8, 16, 16)
BYTES = 2 * 8 * 16 * 16 * 4
# Bytes of vectors with one value per channel, sample or group: mean, rstd, and copies of parameters.
VECTORS = 64 * 12

NORMS = {
    "batch_norm": lambda: nn.BatchNorm2d(8),
    "batch_norm eval": lambda: nn.BatchNorm2d(8).eval(),
    "batch_norm plain": lambda: nn.BatchNorm2d(8, affine=False, track_running_stats=False),
    "instance_norm": lambda: nn.InstanceNorm2d(8),
    "instance_norm running": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "group_norm": lambda: nn.GroupNorm(4, 8),
    "layer_norm": lambda: nn.LayerNorm(SHAPE[1:], elementwise_affine=False),
}
FLAGGED = ["relu", "leaky_relu", "elu", "silu", "mish", "hardswish", "relu6", "hardtanh", "selu", "celu", "hardsigmoid"]
ACTIVATIONS = {name: getattr(F, name) for name in FLAGGED}
ACTIVATIONS |= {f"{name} in place": partial(getattr(F, name), inplace=True) for name in FLAGGED}
ACTIVATIONS |= {
    "gelu": F.gelu,
    "gelu tanh": lambda t: F.gelu(t, approximate="tanh"),
    "softplus": F.softplus,
    "prelu": lambda t: F.prelu(t, torch.full((8,), 0.2, requires_grad=True)),
    "method": lambda t: t.relu(),
    "method in place": lambda t: t.relu_(),
    "torch in place": torch.relu_,
    "sigmoid": torch.sigmoid,
    "sigmoid in place": lambda t: t.sigmoid_(),
    "tanh in place": torch.tanh_,
    "relu times itself": lambda t: F.relu(t) * t,
}


# These functions save a copy of the tensor that they overwrite.
COPIES = [f"{name} in place" for name in ("silu", "mish", "hardswish", "relu6", "hardtanh", "hardsigmoid")]


def step(fn, x, convs, scoped):
    """Returns the bytes saved by forward, the output and the gradients."""
    torch.manual_seed(0)
    params = [p for conv in convs for p in conv.parameters()]
    with SavedBytes(params) as saved:
        out = (recompute()(fn) if scoped else fn)(x)
        kept = saved.nbytes
    return kept, [out.detach(), *torch.autograd.grad(out.square().mean(), params, allow_unused=True)]


def kept(fn, x, *convs):
    """Returns the bytes kept under the scope; asserts eager mode's results, and that eager mode keeps no less."""
    eager, expected = step(fn, x, convs, False)
    ours, got = step(fn, x, convs, True)
    for a, b in zip(got, expected, strict=True):
        assert a is b is None or torch.equal(a, b)
    assert ours <= eager + VECTORS
    return ours


def convs(*channels):
    return [nn.Conv2d(c, d, 3, padding=1) for c, d in pairwise(channels)]


@pytest.fixture(params=[torch.Tensor.contiguous, channels_last], ids=["contiguous", "channels_last"])
def x(request):
    return request.param(torch.randn(SHAPE))


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_norm_and_activation(act, x):
    """Only the input and the convolution's output are kept."""
    first, last = convs(8, 8, 8)
    norm = nn.BatchNorm2d(8)
    assert kept(lambda x: last(act(norm(first(x)))), x, first, last) <= 2 * BYTES + VECTORS


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_every_norm(make, x):
    first, last = convs(8, 8, 8)
    norm = make()
    assert kept(lambda x: last(F.relu_(norm(first(x)))), x, first, last) <= 2 * BYTES + VECTORS


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activation_alone(act, x):
    """An activation keeps its input or its result; an in-place activation that needs its input keeps both."""
    first, last = convs(8, 8, 8)
    # relu and sigmoid save their results, and a multiplication saves both factors.
    limit = 3 if act in [ACTIVATIONS[name] for name in (*COPIES, "relu times itself")] else 2
    assert kept(lambda x: last(act(first(x))), x, first, last) <= limit * BYTES + VECTORS


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True)])
def test_running_statistics_move_once(norm, x):
    first, last = convs(8, 8, 8)
    state = []
    for scoped in (False, True):
        norm.reset_running_stats()
        step(lambda x: last(F.relu(norm(first(x)))), x, (first, last), scoped)
        state.append([buffer.clone() for buffer in norm.buffers()])
    assert_equal(*state)


@pytest.mark.parametrize("frozen", ["norm", "first convolution", "weight", "both"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_of_which_part_is_frozen(kind, frozen, x):
    """If a part is frozen, the norm saves fewer of its parameters and statistics, or nothing."""
    first, last = convs(8, 8, 8)
    norm = kind(8, affine=True)
    norm.requires_grad_(frozen not in ("norm", "both"))
    norm.weight.requires_grad_(frozen == "first convolution")
    first.requires_grad_(frozen not in ("first convolution", "both"))
    wanted = [p for part in (first, norm, last) for p in part.parameters() if p.requires_grad]
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    assert_same_gradients(lambda: last(F.relu(norm(first(x)))), *wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("parameters", ["as x", "fp32", "none"])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_norms_of_other_precisions(kind, parameters, dtype, x):
    """The norm computes its output from exact statistics, so a recipe must not use rounded ones."""
    first, last = (conv.to(dtype) for conv in convs(8, 8, 8))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    norm = kind(8, affine=parameters != "none", dtype=wide if parameters == "fp32" else dtype)
    assert_same_gradients(lambda: last(F.relu_(norm(first(x.to(dtype) * 3 + 1)))).double(), first.weight, last.weight)


@same_in_the_scope
def test_a_norm_whose_weight_changes_before_backward(scope, x):
    """An optimizer changes the weight, which the norm's backward does not need if only later layers are trained."""
    first, last = convs(8, 8, 8)
    norm = nn.BatchNorm2d(8).requires_grad_(False)
    first.requires_grad_(False)
    with scope():
        out = last(F.relu(norm(first(x)) * last.weight.mean()))
    norm.weight.mul_(2)
    return torch.autograd.grad(out.square().mean(), last.weight)


def normed(t):
    return F.batch_norm(t, None, None, training=True)


def norm_relu(t):
    return F.relu_(normed(t))


# A join makes the input of the last of three convolutions from the outputs of the first two.  The number is the bytes
# kept in addition to the input and the two outputs, in units of BYTES.
JOINS = {
    "cat": (16, lambda a, b: torch.cat([norm_relu(a), norm_relu(b)], 1), 0),
    "cat with a raw output": (16, lambda a, b: torch.cat([norm_relu(a), b], dim=1), 0),
    "cat of views": (8, lambda a, b: torch.cat([norm_relu(a)[:, :4], norm_relu(b)[:, 4:]], 1), 0),
    "add": (8, lambda a, b: norm_relu(a) + norm_relu(b), 0),
    "add in place": (8, lambda a, b: normed(a).add_(norm_relu(b), alpha=2), 0),
    "iadd": (8, lambda a, b: normed(a).__iadd__(norm_relu(b)), 0),
    "sub": (8, lambda a, b: norm_relu(a) - norm_relu(b), 0),
    "mul": (8, lambda a, b: norm_relu(a) * norm_relu(b), 0),
    "mul in place": (8, lambda a, b: normed(a).mul_(norm_relu(b)), 0),
    "residual": (8, lambda a, b: F.relu_(F.instance_norm(a).add_(norm_relu(b))), 0),
    "gate": (8, lambda a, b: norm_relu(a) * torch.sigmoid(norm_relu(b).mean((2, 3), keepdim=True)), 0),
    "stack": (16, lambda a, b: torch.stack([norm_relu(a), norm_relu(b)], 1).flatten(1, 2), 0),
    "dropout": (8, lambda a, b: F.dropout(norm_relu(a), 0.3) + norm_relu(b), 1 / 4),
    "dropout2d": (8, lambda a, b: F.dropout2d(norm_relu(a), 0.3) + norm_relu(b), 0),
    "no dropout": (8, lambda a, b: F.dropout(norm_relu(a), 0.3, training=False) + norm_relu(b), 0),
    "pad": (8, lambda a, b: F.pad(norm_relu(a), (1, 1, 1, 1)) + F.pad(norm_relu(b), (2, 0, 0, 2), mode="reflect"), 0),
    "interpolate": (8, lambda a, b: F.interpolate(norm_relu(a), scale_factor=2) + F.interpolate(norm_relu(b), 32), 0),
    "bilinear": (8, lambda a, b: F.interpolate(norm_relu(a) + norm_relu(b), scale_factor=1.5, mode="bilinear"), 0),
    # A pool keeps one byte for each output: two pools keep a quarter and a quarter of the elements.
    "max_pool": (8, lambda a, b: F.max_pool2d(a, 2) + F.max_pool2d(b, 3, 2, 1), 2 / 16),
    "MaxPool2d of ours": (8, lambda a, b: fusedseg.MaxPool2d(2)(a) + fusedseg.MaxPool2d(3, 2, 1)(b), 2 / 16),
    "avg_pool": (8, lambda a, b: F.avg_pool2d(a, 2) + F.adaptive_avg_pool2d(b, 8), 0),
    # The result is kept if rebuilding it needs a recomputed input of four times its size.
    "max_pool of an activation": (8, lambda a, b: F.max_pool2d(norm_relu(a), 2) + F.max_pool2d(b, 2), 2 / 16 + 1 / 4),
    "avg_pool of an activation": (8, lambda a, b: F.avg_pool2d(norm_relu(a), 2) + F.avg_pool2d(b, 2), 1 / 4),
    "max_pool, large": (8, lambda a, b: F.max_pool2d(norm_relu(a) + norm_relu(b), 17, 1, 8), 2),
    "contiguous": (8, lambda a, b: (norm_relu(a) + norm_relu(b)).transpose(2, 3).contiguous(), 0),
    "view": (8, lambda a, b: (norm_relu(a) + norm_relu(b)).transpose(2, 3), 0),
}


@pytest.mark.parametrize(("channels", "join", "more"), JOINS.values(), ids=JOINS)
def test_joins(channels, join, more, x):
    first, second = convs(8, 8, 8)
    (last,) = convs(channels, 8)
    assert kept(lambda x: last(join(first(x), second(x))), x, first, second, last) <= (3 + more) * BYTES + 2 * VECTORS


def test_max_pool_of_one_and_three_dimensions():
    for dims, conv, pool in ((1, nn.Conv1d, F.max_pool1d), (3, nn.Conv3d, F.max_pool3d)):
        x = torch.randn(2, 4, *(16,) * dims)
        first, last = conv(4, 4, 3, padding=1), conv(4, 4, 1)
        # The pool keeps a byte for each output; a pool of one dimension keeps its indices.
        codes = {1: 9 * x.nbytes / 4 / 2 - x.nbytes / 2, 3: x.nbytes / 4 / 8}[dims]
        assert kept(lambda x, p=pool, f=first, g=last: g(p(norm_relu(f(x)), 2)), x, first, last) <= (
            2 * x.nbytes + VECTORS + codes + x.nbytes
        )


def test_functions_that_give_back_their_input(x):
    """A function that returns its input gets no recipe, because the tensor would be its own source."""
    first, last = convs(8, 8, 8)
    same = lambda t: F.dropout(t.contiguous().to(torch.float32), 0.0).reshape(SHAPE)  # noqa: E731
    assert kept(lambda x: last(same(norm_relu(first(x)))), x, first, last) <= 2 * BYTES + VECTORS


def test_half_precision_under_autocast(x):
    """Backward repeats the casts of forward, also if it is called outside the region of autocast."""
    first, last = convs(8, 8, 8)
    norm = nn.BatchNorm2d(8)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            t = torch.cat([F.relu(norm(first(x))), F.silu(norm(first(x)), inplace=True)], dim=1)
            t = F.interpolate(t, scale_factor=2, mode="bilinear")
            return last(F.gelu(t[:, 4:12])).float()

    eager, _ = step(fn, x, (first, last), False)
    assert kept(fn, x, first, last) < 0.6 * eager
    expected = step(fn, x, (first, last), True)[1]
    for inside in (False, True):
        out = recompute()(fn)(x)
        with torch.autocast("cpu", torch.float16, enabled=inside):
            got = torch.autograd.grad(out.square().mean(), [*first.parameters(), *last.parameters()])
        assert_equal(got, expected[1:])


@pytest.mark.parametrize(("function", "op"), [(torch.relu, "relu_"), (lambda t: torch.roll(t, 1, 2), "roll")])
def test_a_result_is_written_over_its_rebuilt_input_by_the_form_that_does_so(function, op):
    """A defect in the choice of this form was found by no test: the peak grew, or a function without one was None."""
    first, norm, last = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)
    with recompute():
        out = last(function(norm(first(torch.randn(2, 3, 8, 8)))))
    with Called() as called:
        out.square().sum().backward()
    assert op in called.names
