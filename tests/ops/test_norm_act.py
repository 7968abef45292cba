"""Compares norm_act with the stock norm, residual and activation: the same bits on aten, and gradients."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import inplace_abn, norm_act
from fusedseg.ops.norm import reference as norm_reference
from tests.ops.norm_act_cases import ACTIVATIONS, NORMS, U, both, close_gradients, fused, inputs, slope_of


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("dtype", "fmt"),
    [(torch.float32, "contiguous"), (torch.float32, "channels_last"), (torch.float64, "contiguous")],
    ids=["fp32", "fp32-channels_last", "fp64"],
)
def test_forward_has_the_bits_of_stock(norm, name, dtype, fmt):
    """Output and running statistics come from the functions that the stock modules call; gradients agree to rounding.

    InstanceNorm in channels_last agrees to rounding too, because stock copies the input.
    """
    for training, residual in ((True, True), (True, False), (False, True)):
        x, *rest = inputs(dtype=dtype, fmt=fmt, residual=residual)
        stock, ours = (list(found) for found in both(norm, name, x, *rest, training=training))
        assert ours[0].stride() == x.stride()
        # The output comes first, and the running statistics last.
        of_forward = [0] if norm == "group" else [0, -1, -2]
        for i in of_forward:
            if norm == "instance" and fmt == "channels_last":
                torch.testing.assert_close(ours[i], stock[i], rtol=20 * U[dtype], atol=20 * U[dtype])
            else:
                assert torch.equal(ours[i], stock[i])
        close_gradients(ours[1 : len(ours) - len(of_forward) + 1], stock[1 : len(stock) - len(of_forward) + 1], x)


@pytest.fixture(params=[128, 32], ids=["two planes", "half a plane"])
def tiles(request, monkeypatch):
    """Large tensors are computed in tiles; here every tensor is, in tiles of two planes of (8, 8) or half a plane."""
    monkeypatch.setattr(norm_reference, "TILE", request.param)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_in_tiles(norm, name):
    """Tiles agree to rounding."""
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
    given = [t.requires_grad_() for t in inputs((2, 3, 4, 3), torch.float64)]
    slope = slope_of(name, given[0])
    if slope is not None:
        given.append(slope.requires_grad_())

    def call(x, weight, bias, residual, slope=None):
        options = {"eps": 1e-3, "activation": activation, "activation_param": param}
        return fused(norm, x, weight, bias, residual=residual, slope=slope, **options)

    if norm == "group":
        # A group has one channel; the scale keeps the gradient of x from being small.
        given[0].data *= torch.linspace(0.5, 2, given[0].numel()).view_as(given[0])
    # One activation is tested with numerical derivatives of every element.
    assert torch.autograd.gradcheck(call, given, fast_mode=name != "silu")


TAILS = torch.tensor([-0.0, 0.0, 1e-42, -1e-42, 1e-30, -1e-30, 3.0, -3.0, 6.0, 7.0, -7.0, 30.0, -30.0, 200.0, -200.0,
                      1e30, -1e30, float("inf"), -float("inf"), float("nan"), 0.5, -0.5])  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kinks_and_tails(name):
    """y equals x, which holds zeros of both signs, kinks, subnormal and infinite values, and NaN."""
    activation, param, stock = ACTIVATIONS[name]
    # This eps does not change a variance of 1; PyTorch 2.11 refuses 0.
    eps = 1e-30
    x = TAILS.repeat(3).view(1, 3, -1)
    slope = slope_of(name, x)
    results = []
    for ours in (False, True):
        leaf = x.clone().requires_grad_()
        if ours:
            z = norm_act(leaf, torch.zeros(3), torch.ones(3), eps=eps, activation=activation, activation_param=param,
                         slope=slope)  # fmt: skip
        else:
            # The stock norm turns minus zero into zero, so it runs here too.
            y = F.batch_norm(leaf, torch.zeros(3), torch.ones(3), eps=eps)
            z = stock(y) if slope is None else F.prelu(y, slope)
        results.append((z, *torch.autograd.grad(z, leaf, torch.linspace(1, 2, x.numel()).view_as(x))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(torch.signbit(found), torch.signbit(expected))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("parameters", ["fp32", "half", "none"])
def test_half_precision(norm, dtype, parameters):
    """Half precision is as near to float64 as eager mode: statistics and parameters are computed in fp32."""
    x, weight, bias, _ = (t if t is None else t.to(dtype) for t in inputs(dtype=torch.float64, residual=False))
    affine = (None, None) if parameters == "none" else (weight.double(), bias.double())
    exact = next(iter(both(norm, "silu", x.double(), *affine, None)))
    given = {"fp32": (weight.float(), bias.float()), "half": (weight, bias), "none": (None, None)}[parameters]
    leaves = [None if t is None else t.clone().requires_grad_() for t in (x, *given)]
    z = fused(norm, *leaves, activation="silu")
    assert z.dtype == dtype
    u = torch.finfo(dtype).eps
    torch.testing.assert_close(z.double(), exact[0], rtol=2 * u, atol=2 * u)
    torch.autograd.grad(z.sum(), [t for t in leaves if t is not None])


def test_autocast_residual():
    x, _, _, residual = inputs(residual=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = norm_act(x.bfloat16(), None, None, training=True, residual=residual)
    assert z.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"residual must be torch.bfloat16, the dtype of x"):
        norm_act(x.bfloat16(), None, None, training=True, residual=residual)


def test_instance_norm_by_running_statistics_needs_no_positions():
    x, running = torch.randn(5, 3), (torch.randn(3), torch.rand(3) + 0.5)
    expected = F.leaky_relu(F.instance_norm(x, *running, use_input_stats=False), 0.01)
    assert torch.equal(norm_act(x, *running, norm="instance"), expected)


IN_EVAL = {"batch": norm_act, "instance": partial(norm_act, norm="instance"), "in place": inplace_abn}


@pytest.mark.parametrize("op", IN_EVAL.values(), ids=IN_EVAL)
def test_buffers_may_change_before_backward(backend, device, op):
    """In eval mode the op keeps copies of the running statistics, because another forward pass may move them."""
    x, weight, bias, _ = (t.requires_grad_() for t in inputs((2, 6, 5, 7), device=device))
    running = torch.linspace(-0.5, 1, 6, device=device), torch.linspace(0.5, 1.5, 6, device=device)
    z = op(x * 1, *running, weight, bias, activation="elu", activation_param=1.0)
    dz = torch.randn_like(z)
    stock = F.elu(F.batch_norm(x, *running, weight, bias))
    expected = torch.autograd.grad(stock, (x, weight, bias), dz)
    for v in running:
        v.fill_(100.0)
    found = torch.autograd.grad(z, (x, weight, bias), dz)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
