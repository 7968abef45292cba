"""norm_act beside the stock norm, residual and activation: the same bits on aten, gradients, and what it keeps."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg.activation import Activation
from fusedseg.functional import norm_act
from fusedseg.memory import LiveBytes, SavedBytes, measure
from fusedseg.ops import norm_act as op
from fusedseg.ops import norm_act_aten
from fusedseg.ops.recompute import recompute
from tests import reference
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.tensors import channels_last

# name: activation, activation_param, the stock function; prelu's slopes are those of 3 channels
SLOPES = (0.25, -0.1, 1.5)
ACTIVATIONS = {
    "relu": ("relu", None, F.relu),
    "leaky_relu": ("leaky_relu", 0.2, lambda y: F.leaky_relu(y, 0.2)),
    "leaky_relu-negative": ("leaky_relu", -0.2, lambda y: F.leaky_relu(y, -0.2)),
    "elu": ("elu", 1.3, lambda y: F.elu(y, 1.3)),
    "silu": ("silu", None, F.silu),
    "gelu": ("gelu", None, F.gelu),
    "gelu-tanh": ("gelu", "tanh", lambda y: F.gelu(y, approximate="tanh")),
    "mish": ("mish", None, F.mish),
    "hardswish": ("hardswish", None, F.hardswish),
    "relu6": ("relu6", None, F.relu6),
    "prelu": ("prelu", None, None),
    "prelu-shared": ("prelu", None, None),
    "identity": ("identity", None, lambda y: y),
}
NORMS = ("batch", "instance", "group")
GROUPS = 3


def slope_of(name, x):
    if not name.startswith("prelu"):
        return None
    slopes = SLOPES[:1] if name == "prelu-shared" else SLOPES * (x.shape[1] // 3)
    return torch.tensor(slopes, dtype=x.dtype, device=x.device)


def stock_norm(norm, x, running, weight, bias, training, eps=1e-5):
    if norm == "batch":
        return F.batch_norm(x, *running, weight, bias, training, 0.1, eps)
    if norm == "instance":
        return F.instance_norm(x, *running, weight, bias, training, 0.1, eps)
    return F.group_norm(x, GROUPS, weight, bias, eps)


def both(norm, name, x, weight, bias, residual, training=True, eps=1e-5):
    """(output, gradients of all that is given, running statistics after it) of the stock functions and of ours."""
    activation, param, stock = ACTIVATIONS[name]
    running = [torch.linspace(s, 1.2, x.shape[1], dtype=x.dtype, device=x.device) for s in (-0.5, 0.5)]
    gradient = torch.randn_like(x)
    for fused in (False, True):
        dz = gradient
        given = [x, weight, bias, residual, slope_of(name, x)]
        leaves = [None if t is None else t.clone().requires_grad_() for t in given]
        xs, w, b, r, slope = leaves
        buffers = (None, None) if norm == "group" else [v.clone() for v in running]
        if fused:
            options = {"norm": norm, "num_groups": GROUPS if norm == "group" else None, "residual": r, "slope": slope}
            z = norm_act(xs, *buffers, w, b, training, 0.1, eps, activation, param, **options)
        else:
            y = stock_norm(norm, xs, buffers, w, b, training, eps)
            y = y if r is None else y + r
            z = stock(y) if slope is None else F.prelu(y, slope)
            # the stock instance norm of one sample, which copies x, takes a gradient of channels_last for another
            dz = dz.contiguous() if norm == "instance" else dz
        grads = torch.autograd.grad(z, [t for t in leaves if t is not None], dz)
        yield z, *grads, *(v for v in buffers if v is not None)


def inputs(shape=(3, 6, 8, 8), dtype=torch.float32, fmt="contiguous", residual=True, device="cpu"):
    x = torch.randn(shape, dtype=dtype, device=device) * 2 + 0.5
    x = channels_last(x) if fmt == "channels_last" else x
    C = shape[1]
    # of both signs, and zero
    weight = torch.linspace(-1, 1.5, C, dtype=dtype, device=device)
    return (
        x,
        weight,
        torch.linspace(-0.5, 0.5, C, dtype=dtype, device=device),
        torch.randn_like(x) if residual else None,
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [(torch.float32, "contiguous"), (torch.float32, "channels_last"), (torch.float64, "contiguous")],
    ids=["fp32", "fp32-channels_last", "fp64"],
)
def test_same_bits_as_stock(norm, name, dtype, fmt):
    """Where the stock function calls the same aten ops: not InstanceNorm in channels_last, which it copies, nor its
    running statistics, of which it sums the parameters' gradients sample by sample."""
    for training, residual in ((True, True), (True, False), (False, True)):
        stock, ours = both(norm, name, *inputs(dtype=dtype, fmt=fmt, residual=residual), training=training)
        assert ours[0].stride() == inputs(fmt=fmt)[0].stride()
        for expected, found in zip(stock, ours, strict=True):
            if norm == "instance" and (fmt == "channels_last" or not training):
                tolerance = 1e-6 if dtype == torch.float32 else 1e-14
                # of a sum, that of its terms
                torch.testing.assert_close(
                    found, expected, rtol=tolerance, atol=(100 if found.dim() == 1 else 10) * tolerance
                )
            else:
                assert torch.equal(found, expected)


@pytest.fixture
def parts(monkeypatch):
    """Large tensors are done a part at a time; here all are, in parts of two planes of (8, 8) in fp64."""
    monkeypatch.setattr(norm_act_aten, "WHOLE_BYTES", 0)
    monkeypatch.setattr(norm_act_aten, "PART_BYTES", 1024)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_in_parts(norm, name):
    """Kernels round the ends of their vectors otherwise, and parts have other ends."""
    for training, residual, samples in ((True, True, 3), (True, False, 1), (False, True, 2)):
        arguments = inputs((samples, 6, 8, 8), torch.float64, residual=residual)
        stock, ours = both(norm, name, *arguments, training=training)
        for expected, found in zip(stock, ours, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(4, 6), (2, 6, 7), (2, 6, 3, 2, 3), (2, 3, 1, 5), (1, 6, 4, 4)], ids=str)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
def test_shapes(norm, shape, fmt, affine):
    if norm == "instance" and len(shape) == 2:
        pytest.skip("InstanceNorm needs positions")
    if norm == "group" and shape[1:] == (3, 1, 1):
        pytest.skip("one value a group")
    x, weight, bias, residual = inputs(shape, torch.float64, fmt)
    parameters = (weight, bias) if affine else (None, None)
    for training in (True, False):
        stock, ours = both(norm, "silu", x, *parameters, residual, training)
        assert ours[0].stride() == x.stride()
        for expected, found in zip(stock, ours, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradcheck(norm, name):
    activation, param, _ = ACTIVATIONS[name]
    groups = GROUPS if norm == "group" else None
    given = [t.requires_grad_() for t in inputs((2, 3, 4, 3), torch.float64)]
    slope = slope_of(name, given[0])
    if slope is not None:
        given.append(slope.requires_grad_())

    def fused(x, weight, bias, residual, slope=None):
        return norm_act(x, None, None, weight, bias, True, 0.1, 1e-3, activation, param, norm=norm, num_groups=groups,
                        residual=residual, slope=slope)  # fmt: skip

    if norm == "group":
        # of one channel a group, of which the gradient of x is not small
        given[0].data *= torch.linspace(0.5, 2, given[0].numel()).view_as(given[0])
    # numerical derivatives of every element for one of them
    assert torch.autograd.gradcheck(fused, given, fast_mode=name != "silu")


TAILS = torch.tensor([-0.0, 0.0, 1e-42, -1e-42, 1e-30, -1e-30, 3.0, -3.0, 6.0, 7.0, -7.0, 30.0, -30.0, 200.0, -200.0,
                      1e30, -1e30, float("inf"), -float("inf"), float("nan"), 0.5, -0.5])  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kinks_and_tails(name):
    """y is x: zeros of both signs, kinks, subnormal and infinite values, NaN."""
    activation, param, stock = ACTIVATIONS[name]
    x = TAILS.repeat(3).view(1, 3, -1)
    slope = slope_of(name, x)
    results = []
    for fused in (False, True):
        leaf = x.clone().requires_grad_()
        if fused:
            z = norm_act(leaf, torch.zeros(3), torch.ones(3), eps=0.0, activation=activation, activation_param=param,
                         slope=slope)  # fmt: skip
        else:
            # as the norm leaves it: minus zero becomes zero
            y = F.batch_norm(leaf, torch.zeros(3), torch.ones(3), eps=0.0)
            z = stock(y) if slope is None else F.prelu(y, slope)
        results.append((z, *torch.autograd.grad(z, leaf, torch.linspace(1, 2, x.numel()).view_as(x))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(found), torch.signbit(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("parameters", ["fp32", "half", "none"])
def test_half_precision(norm, dtype, parameters):
    """Statistics and parameters in fp32 whatever the parameters are: as near to float64 as eager is in that dtype."""
    x, weight, bias, _ = (t if t is None else t.to(dtype) for t in inputs(dtype=torch.float64, residual=False))
    affine = (None, None) if parameters == "none" else (weight.double(), bias.double())
    exact = next(iter(both(norm, "silu", x.double(), *affine, None)))
    given = {"fp32": (weight.float(), bias.float()), "half": (weight, bias), "none": (None, None)}[parameters]
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, *given)]
    z = norm_act(leaves[0], None, None, *leaves[1:], True, activation="silu", norm=norm,
                 num_groups=GROUPS if norm == "group" else None)  # fmt: skip
    assert z.dtype == dtype
    u = torch.finfo(dtype).eps
    torch.testing.assert_close(z.double(), exact[0], rtol=2 * u, atol=2 * u)
    torch.autograd.grad(z.sum(), [t for t in leaves if t is not None])


def test_autocast_residual():
    x, _, _, residual = inputs(residual=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = norm_act(x.bfloat16(), None, None, training=True, residual=residual)
    assert z.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="residual must be like x"):
        norm_act(x.bfloat16(), None, None, training=True, residual=residual)


def saved_by(f):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        z = f()
    return z, {t.data_ptr() for t in saved if t.numel() > 100}


@pytest.mark.parametrize("norm", NORMS)
def test_keeps_the_input_and_the_residual_alone(norm):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs())
    groups = GROUPS if norm == "group" else None
    for activation, extra in (("relu", {residual.data_ptr()}), ("identity", set())):
        call = lambda: norm_act(x, None, None, weight, bias, True, activation=activation, norm=norm,  # noqa: B023, E731
                                num_groups=groups, residual=residual)  # fmt: skip
        _, kept = saved_by(call)
        assert kept == {x.data_ptr()} | extra


def test_saved_bytes_of_a_network():
    """Without the scope a following convolution keeps the output too: as many bytes as the stock modules."""
    x = torch.randn(2, 4, 16, 16)
    stock = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.b(norm_act(self.a(x), None, None, training=True, activation="relu"))

    # statistics: two values a channel; stock has the parameters of its norm besides
    assert measure(Ours(), x).saved <= measure(stock, x).saved + 2 * 4 * 4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(2, 64, 32, 64), (1, 64, 64, 64)], ids=["samples", "one sample"])
def test_backward_holds_one_tensor_beyond_dz(norm, shape, monkeypatch):
    """Parts are small: here a sixteenth of the tensor, of which three or four are alive."""
    x = torch.randn(shape, requires_grad=True)
    z = norm_act(x, None, None, training=True, activation="silu", norm=norm, num_groups=32 if norm == "group" else None)
    dz = torch.randn_like(z)
    monkeypatch.setattr(norm_act_aten, "WHOLE_BYTES", x.nbytes - 1)
    monkeypatch.setattr(norm_act_aten, "PART_BYTES", x.nbytes // 16)
    with LiveBytes() as live:
        torch.autograd.grad(z, x, dz)
    assert live.peak <= 1.6 * x.nbytes


@pytest.mark.parametrize("norm", NORMS)
def test_gradient_shared_with_another_branch_is_not_written(norm):
    groups = GROUPS if norm == "group" else None
    for name, (activation, param, _) in ACTIVATIONS.items():
        x, _, _, residual = (None if t is None else t.requires_grad_() for t in inputs())
        other = torch.randn_like(x, requires_grad=True)
        dz = torch.randn_like(x)
        before = dz.clone()
        z = norm_act(x, None, None, training=True, activation=activation, activation_param=param, norm=norm,
                     num_groups=groups, residual=residual, slope=slope_of(name, x))  # fmt: skip
        # the addition hands the very same gradient tensor to both
        (z + other).backward(dz)
        assert torch.equal(dz, before)
        assert torch.equal(other.grad, before)


def test_expanded_gradient_and_other_strides():
    base = torch.randn(4, 3, 5, 2, dtype=torch.float64)
    residual = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for r in (None, residual, channels_last(residual)):
        grads = []
        for fused in (False, True):
            leaf = base.clone().requires_grad_()
            x = leaf.permute(3, 1, 0, 2)
            if fused:
                z = norm_act(x, None, None, training=True, activation="silu", residual=r)
                assert z.is_contiguous()
            else:
                y = F.batch_norm(x, None, None, training=True)
                z = F.silu(y if r is None else y + r)
            grads.append((z, *torch.autograd.grad(z.sum(), leaf)))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("norm", NORMS)
def test_empty_batch(norm):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((0, 6, 4, 4)))
    slope = torch.ones(1, requires_grad=True)
    z = norm_act(x, None, None, weight, bias, True, activation="prelu", norm=norm, residual=residual, slope=slope,
                 num_groups=GROUPS if norm == "group" else None)  # fmt: skip
    grads = torch.autograd.grad(z.sum(), (x, weight, bias, residual, slope))
    assert [tuple(g.shape) for g in grads] == [(0, 6, 4, 4), (6,), (6,), (0, 6, 4, 4), (1,)]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_opcheck(norm, fmt):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((2, 3, 4, 5), torch.float64, fmt))
    slope = torch.full((3,), 0.2, dtype=x.dtype, requires_grad=True)
    running = (torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype))
    groups = 1 if norm == "group" else 0
    constants = (norm, groups, 1e-5)
    check = lambda *args: torch.library.opcheck(op.norm_act_op, args)  # noqa: E731
    check(x, weight, bias, residual, slope, None, None, *constants, "prelu", 0.25)
    if norm == "batch":
        check(x, None, None, residual, None, *running, *constants, "identity", 0.0)


def test_double_backward():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    functional_op = lambda x: op.norm_act_op(x, *(None,) * 6, "batch", 0, 1e-5, "silu", 0.0)[0]  # noqa: E731
    for f in (lambda x: norm_act(x, None, None, training=True, activation="silu"), functional_op):
        (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        assert torch.isfinite(dx).all()
        with pytest.raises(RuntimeError, match=r"fusedseg.norm_act: double backward is not supported"):
            dx.sum().backward()


def test_backward_twice_and_between_other_calls():
    """The running statistics of an eval call may move before its backward comes."""
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    running = torch.zeros(3), torch.ones(3)
    loss = norm_act(x, *running, activation="relu").square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    norm_act(x + 3, *running, training=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_input_modified_by_the_user_raises():
    x = torch.randn(2, 3, 4, 5, requires_grad=True) * 1
    z = norm_act(x, None, None, training=True)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.fixture
def triton(monkeypatch, device):
    pytest.importorskip("triton")
    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_on_triton(norm, name, fmt, device):
    """In float64, to a few roundings; the slope of prelu is aten's."""
    for training, residual, affine in ((True, True, True), (False, False, True), (True, False, False)):
        x, weight, bias, r = inputs((2, 6, 4, 5), torch.float64, fmt, residual, device)
        parameters = (weight, bias) if affine else (None, None)
        stock, ours = both(norm, name, x, *parameters, r, training=training)
        assert ours[0].stride() == x.stride()
        for expected, found in zip(stock, ours, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_accuracy_on_triton(norm, dtype, device):
    """With any weight, zero too: xhat comes from x, and nothing is rounded on the way but what is stored."""
    x, dz = torch.randn(2, 3, 6, 9, 8, dtype=torch.float64) * 2
    x, dz = x.to(dtype), (dz + x / 4).to(dtype)
    weight = torch.tensor([1.0, -1.0, 0.05, 1e-4, 0.0, 2.0], requires_grad=True, device=device)
    bias = torch.tensor([0.5, 3.0, -3.0, 0.5, 0.5, 0.0], requires_grad=True, device=device)
    leaf = x.to(device).requires_grad_()
    groups = {"batch": None, "instance": 6, "group": GROUPS}[norm]
    z = norm_act(leaf, None, None, weight, bias, True, activation="silu", norm=norm,
                 num_groups=GROUPS if norm == "group" else None)  # fmt: skip
    grads = torch.autograd.grad(z, (leaf, weight, bias), dz.to(device))
    settings = {"activation": "silu", "param": 0.0, "groups": groups}
    expected = reference.norm_act(x, weight.cpu(), bias.cpu(), **settings)
    assert relative_error(z, expected.out) <= FORWARD_TOLERANCE[dtype]
    exact = reference.gradients(dz, x, weight.cpu(), bias.cpu(), **settings)
    for found, value in zip(grads, exact, strict=False):
        assert relative_error(found, value) <= GRADIENT_TOLERANCE[dtype]


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("norm", NORMS)
def test_rebuilt_on_triton(norm, device):
    """A recipe gives the bits of the forward pass."""
    for training in (True, False):
        if norm == "group" and not training:
            continue
        x, weight, bias, residual = inputs((2, 6, 9, 7), torch.float32, device=device)
        buffers = (None, None) if norm == "group" else (bias.clone(), bias + 1)
        settings = op.Settings(op.Norm(norm, GROUPS), training, 0.1, 1e-5, Activation("silu", 0.0))
        settings = settings if training else settings._replace(norm=op.Norm("batch"))
        z, stats = op.forward(x, weight, bias, *buffers, residual, None, settings)
        again = op.rebuild(x, weight, bias, residual, None, stats, settings)
        assert torch.equal(again, z)


@pytest.mark.usefixtures("triton")
def test_opcheck_on_triton(device):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((2, 3, 4, 5), torch.float64, device=device))
    torch.library.opcheck(op.norm_act_op, (x, weight, bias, residual, *(None,) * 3, "instance", 0, 1e-5, "relu", 0.0))


def call(x=None, training=True, running=(None, None), **overrides):
    return norm_act(torch.randn(2, 64, 3, 3) if x is None else x, *running, training=training, **overrides)


REFUSED = {
    "residual of another shape": (
        lambda: call(residual=torch.randn(2, 64, 3, 1)),
        r"fusedseg.norm_act: residual must be like x, \(2, 64, 3, 3\) of torch.float32 on cpu, got \(2, 64, 3, 1\) of",
    ),
    "unknown norm": (lambda: call(norm="layer"), "norm must be 'batch', 'instance' or 'group', got 'layer'"),
    "group without groups": (lambda: call(norm="group"), "num_groups must be given for norm 'group' and for no other"),
    "batch with groups": (lambda: call(num_groups=2), "num_groups must be given for norm 'group' and for no other"),
    "groups that do not divide": (
        lambda: call(norm="group", num_groups=7),
        "num_groups must divide the 64 channels of x, got 7",
    ),
    "group of one value": (
        lambda: call(torch.randn(3, 4), norm="group", num_groups=4),
        r"expected more than 1 value per group, got input size \(3, 4\)",
    ),
    "group with running statistics": (
        lambda: call(running=(torch.ones(64), torch.ones(64)), norm="group", num_groups=2),
        "norm 'group' has no running statistics",
    ),
    "instance of one position": (
        lambda: call(torch.randn(2, 64, 1, 1), norm="instance"),
        "expected more than 1 spatial element",
    ),
    "instance without positions": (
        lambda: call(torch.randn(2, 64), norm="instance"),
        r"instance norm takes x of shape \(N, C, \*spatial\), got \(2, 64\)",
    ),
    "instance in eval without statistics": (
        lambda: call(norm="instance", training=False),
        "running_mean and running_var are needed when training is False",
    ),
    "batch of one value": (lambda: call(torch.randn(1, 64)), "expected more than 1 value per channel when training"),
    "weight of another length": (lambda: call(weight=torch.ones(3)), r"weight must have shape \(64,\)"),
    "prelu without a slope": (
        lambda: call(activation="prelu"),
        "slope must be given for activation 'prelu' and for no other, got activation 'prelu'",
    ),
    "a slope for relu": (
        lambda: call(activation="relu", slope=torch.ones(1)),
        "and for no other, got activation 'relu'",
    ),
    "too many slopes": (
        lambda: call(activation="prelu", slope=torch.ones(2)),
        r"slope must have shape \(64,\), one value per channel of x, got \(2,\)",
    ),
    "unknown activation": (
        lambda: call(activation="swish"),
        "activation must be one of leaky_relu, elu, .*got 'swish'",
    ),
    "parameter of relu": (
        lambda: call(activation="relu", activation_param=0.1),
        "activation 'relu' has no parameter, activation_param must be None, got 0.1",
    ),
    "unknown approximation": (
        lambda: call(activation="gelu", activation_param="erf"),
        "activation_param of gelu must be 'none' or 'tanh', its approximation, got 'erf'",
    ),
}


@pytest.mark.parametrize(("attempt", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(attempt, text):
    with pytest.raises(ValueError, match=text):
        attempt()


@pytest.mark.parametrize(
    ("attempt", "text"),
    [
        (lambda: call(torch.ones(2, 3, dtype=torch.int64)), "x must be float16, bfloat16, float32 or float64"),
        (lambda: call(residual="x"), "residual must be a tensor or None, got str"),
        (lambda: call(activation=F.relu), "activation must be a string"),
        (lambda: call(activation="elu", activation_param=True), "must be a finite number, the alpha of elu, got True"),
        (lambda: call(activation="elu", activation_param=float("nan")), "must be a finite number"),
        (lambda: call(weight=torch.ones(64).half()), "weight must be torch.float32 for x of torch.float32"),
    ],
)
def test_refused_types(attempt, text):
    with pytest.raises(TypeError, match=text):
        attempt()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_under_the_scope_a_convolution_keeps_a_recipe(dtype):
    """One tensor for each convolution; gradients to the last bit."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, dtype=dtype) for _ in range(4))

        def forward(self, x):
            for conv, norm in zip(self.convs, ("batch", "instance", "group", "batch"), strict=True):
                residual = None if x.requires_grad is False else x
                x = norm_act(conv(x), None, None, training=True, activation="relu", norm=norm, residual=residual,
                             num_groups=2 if norm == "group" else None)  # fmt: skip
            return x

    net, x = Net(), torch.randn(2, 4, 16, 16, dtype=dtype)
    results = []
    for scope in (contextlib.nullcontext(), recompute()):
        with SavedBytes(net.parameters()) as saved, scope:
            z = net(x)
        results.append((saved.nbytes, torch.autograd.grad(z.square().mean(), list(net.parameters()))))
    (without, expected), (within, found) = results
    assert all(map(torch.equal, found, expected))
    # the input, a tensor for each convolution, and the statistics; without the scope, the outputs but the last
    assert within <= 5 * x.nbytes + 1024
    assert without >= 8 * x.nbytes
