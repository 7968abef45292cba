"""The op on both backends: values, gradients, accuracy for every weight, what it keeps, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedseg
from fusedseg.activation import INVERTIBLE, Activation
from fusedseg.functional import inplace_abn
from fusedseg.memory import measure
from fusedseg.ops.norm import aten_chunks, aten_output, op
from fusedseg.ops.norm.spec import Spec
from tests.reference import GRADIENT_TOLERANCE, PARAMS, gradients, relative_error, stock_activation

ACT = Activation("leaky_relu", 0.01)
# each with a parameter
ACTIVATIONS = [(name, PARAMS.get(name, 0.0)) for name in INVERTIBLE]
# small enough for the interpreter, each with something to get wrong
SHAPES = {
    "N x C": (6, 3),
    "1d": (2, 3, 7),
    "2d": (2, 3, 4, 5),
    "3d": (2, 2, 3, 2, 3),
    "one sample": (1, 2, 3, 3),
    "one channel": (2, 1, 3, 3),
    "one position": (4, 3, 1, 1),
}


def channels_last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def stock(x, running_mean, running_var, weight, bias, training, activation="leaky_relu", param=0.01):
    return stock_activation(activation, param)(F.batch_norm(x, running_mean, running_var, weight, bias, training))


@pytest.fixture(params=["whole", "by sums", "chunked"])
def chunking(request, monkeypatch):
    """The aten path in one piece by one call, as small tensors are done, in one piece by sums, and in many pieces."""
    if request.param == "by sums":
        monkeypatch.setattr(aten_output, "FEW", 0)
    if request.param == "chunked":
        monkeypatch.setattr(aten_chunks, "chunk_elements", lambda x: 7)
        monkeypatch.setattr(aten_chunks, "WHOLE", 1)
        monkeypatch.setattr(aten_chunks, "SLOW_STATISTICS", 0)


def check_gradients(backend, device, shape, fmt, activation, param, training, affine):
    x = torch.randn(shape, dtype=torch.float64, device=device)
    if fmt == "channels_last":
        x = channels_last(x)
    x.requires_grad_()
    C = shape[1]
    mean, var = torch.randn(C, dtype=x.dtype, device=device), torch.rand(C, dtype=x.dtype, device=device) + 0.5
    parameters = []
    if affine:
        weight = torch.tensor([1.0, -0.7, 0.0][:C], dtype=x.dtype, device=device)
        parameters = [weight, torch.tensor([0.3, -0.2, 0.4][:C], dtype=x.dtype, device=device)]
        for p in parameters:
            p.requires_grad_()

    def fused(x, *wb):
        return inplace_abn(x * 1, mean.clone(), var.clone(), *wb, training=training, activation=activation,
                           activation_param=param)  # fmt: skip

    # numerical derivatives of every element where that is quick, along random directions in the interpreter
    quick = backend == "aten"
    assert torch.autograd.gradcheck(fused, (x, *parameters), fast_mode=not quick)
    # dz expanded from a scalar
    assert torch.autograd.gradcheck(lambda *a: fused(*a).sum() * 2, (x, *parameters), fast_mode=not quick)
    wb = parameters or [None, None]
    expected = stock(x, mean.clone(), var.clone(), *wb, training, activation, param)
    torch.testing.assert_close(fused(x, *parameters), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_gradcheck_shapes(backend, device, shape, fmt, training):
    check_gradients(backend, device, shape, fmt, "leaky_relu", 0.01, training, True)


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS, ids=INVERTIBLE)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
def test_gradcheck_activations(backend, device, activation, param, training, affine):
    check_gradients(backend, device, (2, 3, 4, 5), "contiguous", activation, param, training, affine)


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS, ids=INVERTIBLE)
def test_gradcheck_chunked(monkeypatch, chunking, fmt, training, activation, param):
    monkeypatch.setattr(fusedseg, "backend", "aten")
    check_gradients("aten", "cpu", (2, 3, 4, 5), fmt, activation, param, training, True)


def test_weight_without_bias_and_bias_without_weight(backend, device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.tensor([1.5, -0.5, 0.2], dtype=x.dtype, device=device, requires_grad=True)
    for wb in ((v, None), (None, v)):
        fused = inplace_abn(x * 1, None, None, *wb, training=True)
        expected = stock(x, None, None, *wb, True)
        grads = torch.autograd.grad(fused.square().sum(), (x, v))
        torch.testing.assert_close(fused, expected)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), (x, v)))


def test_gradient_shared_with_another_branch_is_not_written(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    other = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    dz = torch.randn(2, 3, 4, 5, device=device)
    before = dz.clone()
    # the addition hands the very same gradient tensor to both
    (inplace_abn(x * 1, None, None, training=True) + other).backward(dz)
    assert torch.equal(dz, before)
    assert torch.equal(other.grad, before)


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_in_place_and_strides(backend, device, fmt):
    x = torch.randn(2, 3, 4, 5, device=device)
    if fmt == "channels_last":
        x = channels_last(x)
    z = inplace_abn(x, None, None, training=True)
    assert z.data_ptr() == x.data_ptr()
    assert z.stride() == x.stride()


def test_other_strides_are_copied_once(backend, device):
    base = torch.randn(4, 3, 5, 2, device=device)
    x = base.permute(3, 1, 0, 2)
    before = base.clone()
    z = inplace_abn(x, None, None, training=True)
    assert z.is_contiguous()
    assert torch.equal(base, before)
    torch.testing.assert_close(z, stock(x, None, None, None, None, True))


@pytest.mark.parametrize("view", ["reshaped", "sliced"])
def test_view_of_a_result(backend, device, view):
    x = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)

    def f(x):
        base = x * 3
        v = base.view(2, 2, 6) if view == "reshaped" else base[:, :4]
        return inplace_abn(v, None, None, training=True).square().sum()

    def plain(x):
        v = (x * 3).view(2, 2, 6) if view == "reshaped" else (x * 3)[:, :4]
        return stock(v, None, None, None, None, True).square().sum()

    assert torch.autograd.gradcheck(f, (x,))
    torch.testing.assert_close(f(x), plain(x))


WEIGHTS, BIASES = (1.0, -1.0, 0.05, 1e-4, 0.0), (0.0, 0.5, -0.5, 3.0, -3.0)


def gradient_errors(backend, device, dtype, activation="leaky_relu", fmt="contiguous"):
    """{(weight, bias): (error of dx, of dweight, the same of eager)}, each over 4 channels of 1,024 values."""
    copies, C = 4, 4 * len(WEIGHTS) * len(BIASES)
    w64 = torch.tensor(WEIGHTS, dtype=torch.float64).repeat_interleave(len(BIASES) * copies)
    b64 = torch.tensor(BIASES, dtype=torch.float64).repeat_interleave(copies).repeat(len(WEIGHTS))
    x = (torch.randn(4, C, 16, 16) * 2 + 0.5).to(dtype)
    dz = torch.randn(4, C, 16, 16).to(dtype)

    def run(f, dtype, parameters):
        xs = x.to(dtype=dtype, device=device)
        xs = (channels_last(xs) if fmt == "channels_last" else xs).requires_grad_()
        wb = [p.to(parameters).to(device).requires_grad_() for p in (w64, b64)]
        z = f(xs * 1, None, None, *wb, True, activation=activation)
        return [g.cpu() for g in torch.autograd.grad(z, (xs, wb[0]), dz.to(dtype=dtype, device=device))]

    exact = gradients(dz, x, w64, b64, activation=activation)[:2]
    ours = run(inplace_abn, dtype, torch.float32)
    eager = run(stock, dtype, torch.float32)
    errors = {}
    for i, key in enumerate((w, b) for w in WEIGHTS for b in BIASES):
        c = slice(i * copies, (i + 1) * copies)
        parts = [[g[0][:, c], g[1][c]] for g in (exact, ours, eager)]
        errors[key] = [[relative_error(a, e) for a, e in zip(part, parts[0], strict=True)] for part in parts[1:]]
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_gradients_for_every_weight(backend, device, dtype, fmt):
    allowed = GRADIENT_TOLERANCE[dtype]
    for key, (ours, eager) in gradient_errors(backend, device, dtype, fmt=fmt).items():
        for name, mine, theirs in zip(("dx", "dweight"), ours, eager, strict=True):
            assert mine <= max(allowed, 2 * theirs), (key, name, mine, theirs)


def test_variance_of_large_mean(backend, device):
    """E[x^2] - E[x]^2 in fp32 gives 0 here."""
    x = torch.randn(4, 2, 64, 64, dtype=torch.float64) * 0.1 + 300
    x32 = x.float().to(device)
    var = x32.double().var((0, 2, 3))
    running_mean, running_var = torch.zeros(2, device=device), torch.zeros(2, device=device)
    inplace_abn(x32, running_mean, running_var, training=True, momentum=1.0)
    torch.testing.assert_close(running_var.double(), var, rtol=1e-4, atol=0)


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_bit_identical(backend, device, fmt):
    x = torch.randn(3, 5, 40, 41, device=device)
    x = channels_last(x) if fmt == "channels_last" else x
    results = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        z = inplace_abn(leaf * 1, None, None, training=True)
        results.append((z, *torch.autograd.grad(z.square().sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_saved_bytes(backend, device, dtype, fmt):
    """One activation tensor for each convolution and its norm and activation, where eager keeps two."""
    C, layers = 4, 3

    def net(norm_act):
        blocks = [nn.Sequential(nn.Conv2d(C, C, 3, padding=1, dtype=dtype), norm_act()) for _ in range(layers)]
        return nn.Sequential(*blocks).to(device, memory_format=fmt)

    x = torch.randn(2, C, 16, 16, dtype=dtype, device=device).contiguous(memory_format=fmt)
    eager = measure(net(lambda: nn.Sequential(nn.BatchNorm2d(C), nn.LeakyReLU(0.01, inplace=True))), x).saved
    ours = measure(net(lambda: fusedseg.InPlaceABN(C)), x).saved
    # statistics: mean and rstd in fp32 (our rstd is a row of both)
    per_channel = 2 * 4 * C
    assert ours <= x.nbytes * (1 + layers) + layers * per_channel
    assert eager >= x.nbytes * (1 + 2 * layers)


def test_kept_channels_grow_memory_by_just_those(backend, device):
    leaf = torch.randn(2, 4, 8, 8, device=device, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, 1.0, 1e-3], device=device, requires_grad=True)
    bias = torch.full((4,), 0.5, device=device, requires_grad=True)
    x = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        inplace_abn(x, None, None, weight, bias, training=True)
    assert sorted(t.numel() for t in saved) == [4, 4, 4, 2 * 2 * 64, 2 * 4 * 64]


def test_empty_batch(backend, device):
    bn, ours = nn.BatchNorm2d(3, device=device), fusedseg.InPlaceABN(3, device=device)
    for module in (bn, ours):
        x = torch.randn(0, 3, 4, 4, device=device, requires_grad=True)
        y = module(x * 1)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert torch.equal(module.weight.grad, torch.zeros(3, device=device))
    for (name, a), b in zip(ours.state_dict().items(), bn.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kept", [False, True], ids=["none kept", "one kept"])
def test_opcheck(backend, device, fmt, kept):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device)
    x = (channels_last(x) if fmt == "channels_last" else x).requires_grad_()
    weight = torch.tensor([1.0, 0.0 if kept else 0.5, -1.0], dtype=x.dtype, device=device, requires_grad=True)
    bias = torch.zeros(3, dtype=x.dtype, device=device, requires_grad=True)
    slots = torch.tensor([-1, 0, -1], dtype=torch.int32, device=device) if kept else None
    mean, var = torch.zeros(3, dtype=x.dtype, device=device), torch.ones(3, dtype=x.dtype, device=device)
    for stats in ((None, None), (mean, var)):
        spec = Spec("output", ACT, own=stats[0] is None)
        torch.library.opcheck(op.norm_op, (x, weight, bias, None, None, *stats, slots, int(kept), *op.flat(spec)))


def test_double_backward(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    functional_op = lambda x: op.norm_op(x, *(None,) * 7, 0, *op.flat(Spec("output", ACT)))[0]  # noqa: E731
    for f in (lambda x: inplace_abn(x * 1, None, None, training=True), functional_op):
        (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        assert torch.isfinite(dx).all()
        with pytest.raises(RuntimeError, match=r"fusedseg.inplace_abn: double backward is not supported"):
            dx.sum().backward()


def test_second_backward_with_retain_graph(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    loss = inplace_abn(x * 1, None, None, training=True).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_output_modified_by_the_user_raises(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    z = inplace_abn(x * 1, None, None, training=True)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def call(x=None, training=True, **overrides):
    arguments = {"running_mean": None, "running_var": None, "weight": None, "bias": None} | overrides
    return inplace_abn(torch.randn(2, 64, 3, 3) if x is None else x, training=training, **arguments)


REFUSED = {
    "wrong channel count": (
        lambda: call(weight=torch.ones(32)),
        ValueError,
        r"fusedseg.inplace_abn: weight must have shape \(64,\), one value per channel of x, got \(32,\)",
    ),
    "wrong parameter shape": (
        lambda: call(bias=torch.ones(64, 1)),
        ValueError,
        r"fusedseg.inplace_abn: bias must have shape \(64,\), one value per channel of x, got \(64, 1\)",
    ),
    "wrong parameter dtype": (
        lambda: call(weight=torch.ones(64, dtype=torch.float16)),
        TypeError,
        r"fusedseg.inplace_abn: weight must be torch.float32 for x of torch.float32, got torch.float16",
    ),
    "wrong parameter device": (
        lambda: call(running_mean=torch.ones(64, device="meta"), running_var=torch.ones(64, device="meta")),
        ValueError,
        r"fusedseg.inplace_abn: running_mean must be on cpu, the device of x, got meta",
    ),
    "one of the running statistics": (
        lambda: call(running_mean=torch.ones(64)),
        ValueError,
        r"fusedseg.inplace_abn: running_mean and running_var must be given together, got one of them",
    ),
    "eval without statistics": (
        lambda: call(training=False),
        ValueError,
        r"fusedseg.inplace_abn: running_mean and running_var are needed when training is False, got None",
    ),
    "one value per channel": (
        lambda: call(torch.randn(1, 64, 1, 1)),
        ValueError,
        r"expected more than 1 value per channel when training, got input size \(1, 64, 1, 1\)",
    ),
    "leaf that requires grad": (
        lambda: call(torch.randn(2, 64, requires_grad=True)),
        ValueError,
        r"fusedseg.inplace_abn: x is a leaf that requires grad and would be overwritten",
    ),
    "overlapping view": (
        lambda: call(torch.randn(2, 64, 1).expand(2, 64, 3)),
        ValueError,
        r"fusedseg.inplace_abn: x must not overlap itself, since it is overwritten, got shape \(2, 64, 3\)",
    ),
    "multi-output view": (
        lambda: call((torch.randn(4, 64, requires_grad=True) * 1).chunk(2)[0]),
        ValueError,
        r"fusedseg.inplace_abn: x is one of several views made by one call",
    ),
    "integer input": (
        lambda: call(torch.ones(2, 64, dtype=torch.int64)),
        TypeError,
        r"fusedseg.inplace_abn: x must be float16, bfloat16, float32 or float64, got torch.int64",
    ),
    "complex input": (
        lambda: call(torch.ones(2, 64, dtype=torch.complex64)),
        TypeError,
        r"fusedseg.inplace_abn: x must be float16, bfloat16, float32 or float64, got torch.complex64",
    ),
    "a vector": (
        lambda: call(torch.ones(64)),
        ValueError,
        r"fusedseg.inplace_abn: x must have shape \(N, C\) or \(N, C, \*spatial\), got \(64,\)",
    ),
    "relu": (
        lambda: call(activation="relu"),
        ValueError,
        r"fusedseg.inplace_abn: activation 'relu' cannot be inverted; use fusedseg.BatchNormAct, which is exact for it",
    ),
    "slope 0": (
        lambda: call(activation_param=0.0),
        ValueError,
        r"leaky_relu with slope 0.0 cannot be inverted \(the slope must be > 0\); use fusedseg.BatchNormAct",
    ),
    "unknown activation": (
        lambda: call(activation="leaky_relu_0.01"),
        ValueError,
        f"activation must be one of {', '.join(INVERTIBLE)}, got 'leaky_relu_0.01'",
    ),
    "slope True": (
        lambda: call(activation_param=True),
        TypeError,
        r"activation_param must be a finite number, the slope of leaky_relu, got True",
    ),
}


@pytest.mark.parametrize(("attempt", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(attempt, error, text):
    with pytest.raises(error, match=text):
        attempt()


def test_refusal_leaves_everything_as_it_was(backend, device):
    module = fusedseg.InPlaceABN(3, device=device)
    x = torch.randn(1, 3, 1, 1, device=device)
    before = x.clone()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        module(x)
    assert torch.equal(x, before)
    assert module.num_batches_tracked == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
def test_saturated_elu_has_gradients(backend, device, dtype, alpha):
    """z = -alpha was inverted to -infinity on aten, since the clamp before the logarithm rounded to -1: NaN for all of
    the channel's gradients."""
    x = torch.tensor([-100.0, -20.0, -9.0, -1.0, 2.0, 30.0], dtype=dtype, device=device).view(1, 1, -1)
    leaf = x.clone().requires_grad_()
    parameters = [t.to(device, leaf.dtype).requires_grad_() for t in (torch.tensor([2.5]), torch.tensor([0.25]))]
    statistics = torch.zeros(1, dtype=dtype, device=device), torch.ones(1, dtype=dtype, device=device)
    z = inplace_abn(leaf * 1, *statistics, *parameters, activation="elu", activation_param=alpha)
    gradients = torch.autograd.grad(z.sum(), [leaf, *parameters])
    exact = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    y = torch.nn.functional.batch_norm(exact[0], *(t.double() for t in statistics), *exact[1:])
    expected = torch.autograd.grad(torch.nn.functional.elu(y, alpha).sum(), exact)
    for mine, theirs in zip(gradients, expected, strict=True):
        # what saturates has a gradient of 0 beside exp(y): the rounding of z is all that is left of it
        assert relative_error(mine, theirs) <= 2 * GRADIENT_TOLERANCE[dtype]
