"""Statistics of samples, and residuals, on both backends: values, gradients, kept bytes and refused calls."""

import pytest
import torch
import torch.nn.functional as F

import fusedseg
from fusedseg.activation import Activation
from fusedseg.functional import inplace_abn, inplace_group_norm_act, inplace_instance_norm_act
from fusedseg.ops.norm import reference as norm_reference
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import NormCall, norm_op
from fusedseg.ops.norm.kept import KAPPA, find, kept_mask
from fusedseg.ops.norm.statistic import Statistic
from tests.reference import Rounded, amplification, from_output
from tests.tools.compiling import opcheck
from tests.tools.tensors import channels_last

ACTIVATIONS = {
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "selu": lambda y, p: F.selu(y),
    "identity": lambda y, p: y,
}
# Name -> number of groups of 4 channels; None takes the statistics of the batch, 0 takes given ones (eval mode).
STATISTICS = {"batch": None, "given": 0, "instance": 4, "groups of 2": 2, "one group": 1}
SHAPES = {"1d": (2, 4, 7), "2d": (3, 4, 2, 5), "3d": (2, 4, 3, 2, 3), "one sample": (1, 4, 3, 3)}
by_statistics = pytest.mark.parametrize("groups", STATISTICS.values(), ids=STATISTICS)
# Eval mode has a bound of its own, as no sum is subtracted from its dx.
by_kind = pytest.mark.parametrize(
    "groups", [of for of in STATISTICS.values() if of != 0], ids=[name for name, of in STATISTICS.items() if of != 0]
)
LEAKY = Activation("leaky_relu", 0.01)
by_format = pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])


def running(x, groups):
    """The mean and variance that are given for ``groups`` of 0."""
    return (None, None) if groups is None else torch.linspace(0.4, 1.6, 2 * x.shape[1]).to(x).chunk(2)


def fused(x, groups, weight, bias, residual=None, **options):
    """Calls the op, which overwrites ``x``."""
    if not groups:
        return inplace_abn(x, *running(x, groups), weight, bias, groups is None, residual=residual, **options)
    if groups == x.shape[1]:
        return inplace_instance_norm_act(x, None, None, weight, bias, residual=residual, **options)
    return inplace_group_norm_act(x, groups, weight, bias, residual=residual, **options)


def stock(x, groups, weight, bias, residual=None, activation="leaky_relu", activation_param=0.01):
    if not groups:
        y = F.batch_norm(x, *running(x, groups), weight, bias, groups is None)
    elif groups == x.shape[1]:
        y = F.instance_norm(x, None, None, weight, bias)
    else:
        y = F.group_norm(x, groups, weight, bias)
    return ACTIVATIONS[activation](y if residual is None else y + residual, activation_param)


def inputs(shape, fmt, device, affine=True, residual=True, dtype=torch.float64):
    """Makes the leaves x, residual, weight and bias.  A channel with weight 0 is kept."""
    x, r = torch.randn(2, *shape, dtype=dtype, device=device)
    if fmt == "channels_last":
        x, r = channels_last(x), channels_last(r)
    weight = torch.tensor([1.0, -0.7, 0.0, 1.3][: shape[1]], dtype=dtype, device=device)
    bias = torch.tensor([0.3, -0.2, 0.4, 0.0][: shape[1]], dtype=dtype, device=device)
    return [
        t.requires_grad_() if wanted else None
        for t, wanted in ((x, True), (r, residual), (weight, affine), (bias, affine))
    ]


@pytest.fixture(params=["whole", "chunked"])
def chunking(request, monkeypatch):
    """The aten path runs in one piece, as for small tensors, or in many pieces, as for large tensors."""
    if request.param == "chunked":
        monkeypatch.setattr(norm_reference, "TILE", 7)


def check(groups, leaves, numerically=False, fast=False, **options):
    """Compares values and gradients with the stock functions and with numerical derivatives."""
    given = [t for t in leaves if t is not None]

    def call(f, *tensors):
        rest = iter(tensors)
        x, r, weight, bias = (None if t is None else next(rest) for t in leaves)
        return f(x * 1, groups, weight, bias, r, **options)

    ours, expected = call(fused, *given), call(stock, *given)
    torch.testing.assert_close(ours, expected)
    # A sum gives a dz that is expanded from a scalar.
    for dz in (torch.randn_like(expected), torch.full_like(expected[:1], 2.0).expand_as(expected)):
        found, exact = (torch.autograd.grad(z, given, dz, retain_graph=True) for z in (ours, expected))
        torch.testing.assert_close(found, exact)
    if numerically:
        assert torch.autograd.gradcheck(lambda *t: call(fused, *t), given, fast_mode=fast)


@by_statistics
@by_format
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_as_stock(backend, device, groups, fmt, shape):
    check(groups, inputs(shape, fmt, device))
    check(groups, inputs(shape, fmt, device, affine=False, residual=False))


@by_statistics
@by_format
def test_gradcheck(backend, device, groups, fmt):
    # Aten tests numerical derivatives of every element; the interpreter is slow and tests random directions.
    check(groups, inputs((2, 4, 3), fmt, device), numerically=True, fast=backend == "triton")


@pytest.mark.parametrize("groups", [None, 0], ids=["batch", "given"])
@pytest.mark.parametrize("shape", [(6, 3), (2, 1, 3, 3), (4, 3, 1, 1)], ids=["N x C", "one channel", "one position"])
def test_shapes_that_only_a_batch_may_have(backend, device, groups, shape):
    check(groups, inputs(shape, "contiguous", device), numerically=True, fast=True)


@by_statistics
@pytest.mark.parametrize("activation", ["elu", "selu", "identity"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
def test_activations(backend, device, groups, activation, affine):
    leaves = inputs(SHAPES["2d"], "contiguous", device, affine)
    check(groups, leaves, activation=activation, **{} if activation == "selu" else {"activation_param": 1.0})


@by_statistics
@by_format
@pytest.mark.parametrize("activation", ["leaky_relu", "elu", "selu", "identity"])
def test_chunked(monkeypatch, chunking, groups, fmt, activation):
    monkeypatch.setattr(fusedseg, "backend", "aten")
    options = {} if activation == "selu" else {"activation_param": 0.9}
    for shape in ((2, 4, 3, 5), *SHAPES.values()):
        check(groups, inputs(shape, fmt, "cpu"), activation=activation, **options)
        check(groups, inputs(shape, fmt, "cpu", residual=False), activation=activation, **options)
    check(groups, inputs((2, 4, 3, 5), fmt, "cpu", affine=False, residual=False))


def test_only_the_residual_needs_a_gradient(backend, device):
    for activation in ("leaky_relu", "identity"):
        x, r, weight, bias = inputs(SHAPES["2d"], "contiguous", device)
        x, weight, bias = (t.detach() for t in (x, weight, bias))
        dz = torch.randn_like(x)
        z = fused(x.clone(), 4, weight, bias, r, activation=activation)
        (ours,) = torch.autograd.grad(z, r, dz)
        (expected,) = torch.autograd.grad(stock(x, 4, weight, bias, r, activation), r, dz)
        torch.testing.assert_close(ours, expected)


@by_statistics
def test_dz_and_residual_are_not_written(backend, device, groups):
    x, r, weight, bias = inputs(SHAPES["2d"], "contiguous", device)
    dz, before = torch.randn_like(x), r.detach().clone()
    kept = dz.clone()
    for activation in ("leaky_relu", "identity"):
        # The addition passes the same gradient to both of its inputs.
        other = torch.randn_like(x).requires_grad_()
        (fused(x * 1, groups, weight, bias, r, activation=activation) + other).backward(dz)
        assert torch.equal(dz, kept)
        assert torch.equal(other.grad, kept)
        assert torch.equal(r, before)


def test_residual_of_other_strides(backend, device):
    x, r, weight, bias = inputs(SHAPES["2d"], "contiguous", device)
    z = fused(x * 1, 2, weight, bias, channels_last(r.detach()).requires_grad_())
    assert z.is_contiguous()
    torch.testing.assert_close(z, stock(x, 2, weight, bias, r))


@by_format
def test_in_place_without_layout_copies(backend, device, fmt):
    x, _, weight, bias = (t.detach() for t in inputs(SHAPES["3d"], fmt, device))
    for groups in STATISTICS.values():
        y = x.clone()
        z = fused(y, groups, weight, bias)
        assert z.data_ptr() == y.data_ptr()
        assert z.stride() == x.stride()


# Activation and its parameter, whether there is a residual, and the memory format: each dtype has each row.
ROUNDED = [
    ("leaky_relu", 0.01, False, "contiguous"),
    ("elu", 1.3, True, "channels_last"),
    ("selu", 0.0, False, "channels_last"),
    ("identity", 0.0, True, "contiguous"),
    ("elu", 1.0, False, "contiguous"),
    ("leaky_relu", 0.2, True, "channels_last"),
]
PAIRS = [(w, b) for w in (1.0, -1.0, 0.4, 0.05, 1e-4, 0.0) for b in (0.0, 0.5, -0.5, 3.0, -3.0)]
PAIRS += [(w, b) for w in (1.5, -2.0, 6.0, 30.0) for b in (0.0, -1.0)]


@by_kind
@pytest.mark.parametrize(
    "dtype",
    [pytest.param(dtype, id=f"{dtype}"[6:], marks=[pytest.mark.gpu] * (dtype == torch.float32))
     for dtype in (torch.bfloat16, torch.float16, torch.float32)],
)  # fmt: skip
def test_gradients_for_every_weight(backend, device, groups, dtype):
    """The errors of dx and dweight are within the bound of docs/design.md, for seed after seed.

    A pair of a weight and a bias has 4 channels: one group, two groups or single channels.
    """
    C = 4 * len(PAIRS)
    count = None if groups is None else groups * len(PAIRS)
    weight, bias = torch.tensor(PAIRS).repeat_interleave(4, 0).T.contiguous()
    # The interpreter is slow, and rounds as rows with other seeds do on aten.
    for seed in range(len(ROUNDED) * (3 if backend == "aten" else 1)):
        torch.manual_seed(seed)
        name, param, with_residual, fmt = ROUNDED[seed % len(ROUNDED)]
        x, dz, r = torch.randn(3, 4, C, 8, 8)
        # This gradient is similar to z, so dx subtracts much of xhat.
        dz = (dz + (x if seed % 2 else 0)).to(dtype)
        # With 2 in place of 1.4, the grid of x would be the grid of xhat, and most roundings the same one.
        x = (x * 1.4 + 0.3).to(dtype)
        # The residual has the size that the choice of kept channels assumes.
        r = r.to(dtype) if with_residual else None
        options = {"activation": name} | ({"activation_param": param} if param else {})
        given = [
            t.to(device).requires_grad_() for t in (channels_last(x) if fmt == "channels_last" else x, weight, bias)
        ]
        z = fused(given[0] * 1, count, *given[1:], None if r is None else r.to(device), **options)
        dx, dweight = torch.autograd.grad(z, given[:2], dz.to(device))
        kept = kept_mask(weight, bias, Activation(name, param), dtype, with_residual)
        within_bounds(Rounded(z, dz, x, weight, bias, r, kept), dx, dweight, name, param, count, backend)


def within_bounds(given, dx, dweight, name, param, groups, backend):
    given = given._replace(z=given.z.detach().cpu())
    exact = from_output(given, name, param, groups, rounds_y=backend == "aten")
    over = (dx.cpu().double() - exact.dx).transpose(0, 1).flatten(1).norm(dim=1) / exact.error_of_dx
    assert over.max() <= 1, ("dx", given.weight[over.argmax()], given.bias[over.argmax()])
    over = (dweight.cpu().double() - exact.dweight).abs() / exact.error_of_dweight
    assert over.max() <= 1, ("dweight", given.weight[over.argmax()], given.bias[over.argmax()])


def test_a_kept_output_gives_xhat_within_kappa():
    """The closed bound of docs/design.md, by integration over an xhat of mean 0 and variance 1.

    The rule of elu and selu allowed 675 kappa.
    """
    xhat = torch.linspace(-4.5, 4.5, 2001, dtype=torch.float64)
    density = torch.exp(-xhat.square() / 2)
    density /= density.sum()
    weight = torch.logspace(-3, 1, 60, dtype=torch.float64)[:, None].expand(60, 61)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        bias = weight * KAPPA[dtype] * torch.linspace(-1, 1, 61, dtype=torch.float64)
        for name in ("leaky_relu", "elu", "selu"):
            used = ~kept_mask(weight, bias, Activation(name, 1.0), dtype)
            y = weight[used][:, None] * xhat + bias[used][:, None]
            error = (amplification(y, name).square() * density).sum(1).sqrt() / weight[used]
            assert error.max() <= 1.03 * KAPPA[dtype]
            assert error.max() >= 0.9 * KAPPA[dtype]


def test_a_small_variance_makes_dweight_small_and_not_its_error(backend, device):
    """Where the variance is far below eps, xhat and dweight are small beside the bias, which decides their error."""
    x, dz = torch.randn(2, 4, 16, 8, 8)
    weight, bias = torch.ones(16), torch.linspace(-4, 4, 16)
    for std in (1.0, 1e-3, 1e-5, 1e-6):
        small, half = (x * std).bfloat16(), dz.bfloat16()
        given = [t.to(device).requires_grad_() for t in (small, weight, bias)]
        z = fused(given[0] * 1, None, *given[1:])
        dx, dweight = torch.autograd.grad(z, given[:2], half.to(device))
        kept = kept_mask(weight, bias, LEAKY, torch.bfloat16)
        within_bounds(Rounded(z, half, small, weight, bias, None, kept), dx, dweight, *LEAKY, None, backend)


def test_running_statistics_of_samples(backend, device):
    for fmt in ("contiguous", "channels_last"):
        x, _, weight, bias = inputs(SHAPES["2d"], fmt, device)
        running = [torch.zeros(4, dtype=x.dtype, device=device), torch.ones(4, dtype=x.dtype, device=device)]
        expected = [t.clone() for t in running]
        inplace_instance_norm_act(x * 1, *running, weight, bias, momentum=0.3)
        F.instance_norm(x, *expected, weight, bias, momentum=0.3)
        torch.testing.assert_close(running, expected)
        z = inplace_instance_norm_act(x * 1, *running, weight, bias, use_input_stats=False)
        torch.testing.assert_close(z, F.leaky_relu(F.instance_norm(x, *running, weight, bias, False)))


def test_the_output_of_an_op_that_keeps_it(backend, device):
    """Backward raised autograd's error, which names neither the norm nor a remedy."""
    x = torch.randn(2, 4, 3, 3, device=device, requires_grad=True)
    for f in (torch.sigmoid, torch.relu, torch.tanh):
        for groups in (None, 2, 4):
            with pytest.raises(
                ValueError, match=r"x is the output of \w+Backward0, which reads it .* pass x.clone\(\)"
            ):
                fused(f(x), groups, None, None)
            fused(f(x).clone(), groups, None, None).sum().backward()
        with torch.no_grad():
            fused(f(x), None, None, None)
    # A convolution and a product keep their inputs.
    fused(torch.nn.functional.conv2d(x, x[:, :, :1, :1]), 2, None, None).sum().backward()


@by_statistics
@by_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_saved_bytes(backend, device, groups, fmt, dtype):
    """The op keeps the output and the residual, and not the input."""
    x, r, weight, bias = inputs((2, 4, 8, 8), fmt, device, dtype=dtype)
    weight.data.fill_(1.0)
    y, saved = x * 1, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        z = fused(y, groups, weight, bias, r)
    large = {t.data_ptr() for t in saved if t.numel() >= x.numel()}
    assert large == {z.data_ptr(), r.data_ptr()}
    units = {None: 4, 0: 4, 4: 8, 2: 4, 1: 2}[groups]
    assert sum(t.numel() for t in saved) == 2 * x.numel() + 4 + 4 + units


def test_the_residual_decides_what_is_kept():
    weight, bias = torch.tensor([1.0, 0.1, 0.01, 0.0]), torch.zeros(4)
    assert find(weight, bias, LEAKY, torch.bfloat16).index.tolist() == [3]
    assert find(weight, bias, LEAKY, torch.bfloat16, residual=True).index.tolist() == [1, 2, 3]
    assert find(weight, bias, LEAKY, torch.float32, residual=True).index.tolist() == [2, 3]


@by_statistics
def test_empty_batch(backend, device, groups):
    x, r, weight, bias = inputs((0, 4, 3, 3), "contiguous", device)
    z = fused(x * 1, groups, weight, bias, r)
    z.sum().backward()
    assert x.grad.shape == r.grad.shape == z.shape == (0, 4, 3, 3)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


# Pairs that contain each format and each kind of kept channels.
KEPT_AND_FORMAT = [pytest.param("contiguous", False, id="contiguous-none kept"),
                   pytest.param("channels_last", True, id="channels_last-one kept")]  # fmt: skip


@by_kind
@pytest.mark.parametrize(("fmt", "kept"), KEPT_AND_FORMAT)
def test_opcheck(backend, device, groups, fmt, kept):
    x, r, weight, bias = inputs(SHAPES["2d"], fmt, device)
    if not kept:
        weight.data.fill_(0.5)
    slots = torch.tensor([-1, -1, 0, -1], dtype=torch.int32, device=device) if kept else None
    kind = {None: "batch", x.shape[1]: "instance"}.get(groups, "group")
    spec = Norm("output", LEAKY, over=Statistic(kind, groups or 0))
    opcheck(norm_op, NormCall(spec, x, weight, bias, r, slots=slots, kept_count=int(kept)).arguments, backend)
    if kind == "batch":
        given = torch.zeros(4, dtype=x.dtype, device=device), torch.ones(4, dtype=x.dtype, device=device)
        spec = spec._replace(own=False)
        call = NormCall(spec, x, weight, bias, None, *given, slots=slots, kept_count=int(kept))
        opcheck(norm_op, call.arguments, backend)


def tensor(*shape, **options):
    return torch.randn(*shape, **options)


REFUSED = {
    "relu": (lambda: inplace_instance_norm_act(tensor(2, 4, 3, 3), activation="relu"), ValueError,
        r"fusedseg.inplace_instance_norm_act: activation 'relu' cannot be inverted; use fusedseg.InstanceNormAct"),
    "slope 0": (lambda: inplace_group_norm_act(tensor(2, 4, 3, 3), 2, activation_param=0.0), ValueError,
        r"leaky_relu with slope 0.0 cannot be inverted \(the slope must be > 0\); use fusedseg.GroupNormAct"),
    "groups that do not divide": (lambda: inplace_group_norm_act(tensor(2, 4, 3, 3), 3), ValueError,
        r"fusedseg.inplace_group_norm_act: num_groups must divide the number of channels, 4, got 3"),
    "no group": (lambda: inplace_group_norm_act(tensor(2, 4, 3), 0), ValueError, r"num_groups must divide .* got 0"),
    "one spatial element": (
        lambda: inplace_instance_norm_act(tensor(2, 4, 1, 1)),
        ValueError,
        r"inplace_instance_norm_act: expected more than 1 spatial element when training, got input size \(2, 4, 1, 1\)",
    ),
    "one value in a group": (lambda: inplace_group_norm_act(tensor(1, 4), 4), ValueError,
        r"expected more than 1 value per group when training, got input size \(1, 4\)"),
    "residual of another shape": (
        lambda: inplace_abn(tensor(2, 4, 3), None, None, training=True, residual=tensor(2, 4, 1)),
        ValueError,
        r"fusedseg.inplace_abn: residual must have the shape of x, \(2, 4, 3\), got \(2, 4, 1\)",
    ),
    "residual of another dtype": (
        lambda: inplace_instance_norm_act(tensor(2, 4, 3), residual=tensor(2, 4, 3, dtype=torch.float64)),
        TypeError,
        r"residual must be torch.float32, the dtype of x \(autocast casts it\), got torch.float64",
    ),
    "residual on another device": (
        lambda: inplace_instance_norm_act(tensor(2, 4, 3), residual=tensor(2, 4, 3, device="meta")),
        ValueError,
        r"residual must be on cpu, the device of x, got meta",
    ),
    "no tensor": (lambda: inplace_instance_norm_act(tensor(2, 4, 3), residual=1.0), TypeError,
        r"residual must be a tensor or None, got float"),
    "its own residual": (lambda: (lambda x: inplace_group_norm_act(x, 2, residual=x.view(2, 4, 3)))(tensor(2, 4, 3)),
                         ValueError,
        r"fusedseg.inplace_group_norm_act: residual shares memory with x, which is overwritten"),
}  # fmt: skip


@pytest.mark.parametrize(("attempt", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()
