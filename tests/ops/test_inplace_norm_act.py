"""Norms that keep their output: how exact their gradients are, and refused calls."""

import pytest
import torch
import torch.nn.functional as F

from fusedseg.activation import Activation
from fusedseg.functional import inplace_abn, inplace_group_norm_act, inplace_instance_norm_act
from fusedseg.ops.norm.kept import KAPPA, kept_mask
from tests.reference import GRADIENT_TOLERANCE, Rounded, amplification, from_output, relative_error
from tests.tools.tensors import channels_last

# Name -> number of groups of 4 channels; None takes the statistics of the batch.  Eval mode has a bound of its own, as
# no sum is subtracted from its dx.
STATISTICS = {"batch": None, "instance": 4, "one group": 1}
by_kind = pytest.mark.parametrize("groups", STATISTICS.values(), ids=STATISTICS)
LEAKY = Activation("leaky_relu", 0.01)


def fused(x, groups, weight, bias, residual=None, **options):
    """Calls the op, which overwrites ``x``."""
    options["residual"] = residual
    if groups is None:
        return inplace_abn(x, None, None, weight, bias, True, **options)
    if groups == x.shape[1]:
        return inplace_instance_norm_act(x, None, None, weight, bias, **options)
    return inplace_group_norm_act(x, groups, weight, bias, **options)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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
    [pytest.param(dtype, id=f"{dtype}"[6:], marks=[pytest.mark.gpu] * (dtype == torch.float32)) for dtype in DTYPES],
)
def test_gradients_for_every_weight(backend, device, groups, dtype):
    """The errors of dx and dweight are within the bound of docs/design.md, for seed after seed.

    A pair of a weight and a bias has 4 channels: one group, two groups or single channels.
    """
    C = 4 * len(PAIRS)
    count = None if groups is None else groups * len(PAIRS)
    weight, bias = torch.tensor(PAIRS).repeat_interleave(4, 0).T.contiguous()
    # The interpreter is slow: there each dtype has two rows, and each row one of the statistics.
    first = [*STATISTICS.values()].index(groups) + DTYPES.index(dtype)
    for seed in range(2 * len(ROUNDED)) if backend == "aten" else (first % 3 + 3 * (first % 2),):
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
    xhat = torch.linspace(-4.5, 4.5, 501, dtype=torch.float64)
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


@pytest.mark.parametrize("view", ["reshaped", "sliced"])
def test_view_of_a_result(backend, device, view):
    x = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)

    def f(x):
        base = x * 3
        v = base.view(2, 2, 6) if view == "reshaped" else base[:, :4]
        return inplace_abn(v, None, None, training=True).square().sum()

    def plain(x):
        v = (x * 3).view(2, 2, 6) if view == "reshaped" else (x * 3)[:, :4]
        return F.leaky_relu(F.batch_norm(v, None, None, training=True), 0.01).square().sum()

    assert torch.autograd.gradcheck(f, (x,))
    torch.testing.assert_close(f(x), plain(x))


def test_kept_channels_grow_memory_by_just_those(backend, device):
    leaf = torch.randn(2, 4, 8, 8, device=device, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, 1.0, 1e-3], device=device, requires_grad=True)
    bias = torch.full((4,), 0.5, device=device, requires_grad=True)
    x = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        inplace_abn(x, None, None, weight, bias, training=True)
    assert sorted(t.numel() for t in saved) == [4, 4, 4, 2 * 2 * 64, 2 * 4 * 64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.3])
def test_saturated_elu_has_gradients(backend, device, dtype, alpha):
    """The clamp before the logarithm rounded to -1 on aten, so that z = -alpha was inverted to -infinity.

    All gradients of the channel were NaN.
    """
    x = torch.tensor([-100.0, -20.0, -9.0, -1.0, 2.0, 30.0], dtype=dtype, device=device).view(1, 1, -1)
    leaf = x.clone().requires_grad_()
    parameters = [t.to(device, leaf.dtype).requires_grad_() for t in (torch.tensor([2.5]), torch.tensor([0.25]))]
    statistics = torch.zeros(1, dtype=dtype, device=device), torch.ones(1, dtype=dtype, device=device)
    z = inplace_abn(leaf * 1, *statistics, *parameters, activation="elu", activation_param=alpha)
    gradients = torch.autograd.grad(z.sum(), [leaf, *parameters])
    exact = [t.detach().double().requires_grad_() for t in (x, *parameters)]
    y = F.batch_norm(exact[0], *(t.double() for t in statistics), *exact[1:])
    expected = torch.autograd.grad(F.elu(y, alpha).sum(), exact)
    for mine, theirs in zip(gradients, expected, strict=True):
        # Saturated values have a gradient of 0 instead of exp(y), because only the rounding of z is left of them.
        assert relative_error(mine, theirs) <= 2 * GRADIENT_TOLERANCE[dtype]
