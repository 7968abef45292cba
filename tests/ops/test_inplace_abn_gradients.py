"""Gradients of the op on both backends: numerical derivatives and saturated activations."""

import pytest
import torch

import fusedseg
from fusedseg.activation import INVERTIBLE
from fusedseg.functional import inplace_abn
from fusedseg.ops.norm import aten_chunks
from tests.ops.test_inplace_abn import stock
from tests.reference import GRADIENT_TOLERANCE, PARAMS, relative_error
from tests.tools.tensors import channels_last

# Each activation with its parameter.
ACTIVATIONS = [(name, PARAMS.get(name, 0.0)) for name in INVERTIBLE]
# The shapes are small enough for the interpreter; each has a property to get wrong.
SHAPES = {
    "N x C": (6, 3),
    "1d": (2, 3, 7),
    "2d": (2, 3, 2, 3),
    "3d": (2, 2, 3, 2, 3),
    "one sample": (1, 2, 3, 3),
    "one channel": (2, 1, 3, 3),
    "one position": (4, 3, 1, 1),
}


@pytest.fixture
def chunked(monkeypatch):
    """The aten path runs in many pieces; other tests run it in one."""
    monkeypatch.setattr(aten_chunks, "chunk_elements", lambda x: 7)
    monkeypatch.setattr(aten_chunks, "WHOLE", 1)


def check_gradients(backend, device, shape, fmt, activation, param, training, affine):
    """Compares with numerical derivatives; returns the function and its arguments."""
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

    # Aten tests numerical derivatives of every element.  The interpreter and small pieces are slow, and test random
    # directions.
    quick = backend == "aten" and aten_chunks.WHOLE > 1
    assert torch.autograd.gradcheck(fused, (x, *parameters), fast_mode=not quick)
    wb = parameters or [None, None]
    expected = stock(x, mean.clone(), var.clone(), *wb, training, activation, param)
    torch.testing.assert_close(fused(x, *parameters), expected)
    return fused, (x, *parameters)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_gradcheck_shapes(backend, device, shape, fmt, training):
    if fmt == "channels_last" and len(shape) == 2:
        pytest.skip("rows have one layout")
    fused, leaves = check_gradients(backend, device, shape, fmt, "leaky_relu", 0.01, training, True)
    # The sum gives a dz that is expanded from a scalar.
    assert torch.autograd.gradcheck(lambda *a: fused(*a).sum() * 2, leaves, fast_mode=True)


@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS, ids=INVERTIBLE)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "not affine"])
def test_gradcheck_activations(backend, device, activation, param, training, affine):
    check_gradients(backend, device, (2, 3, 2, 3), "contiguous", activation, param, training, affine)


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("activation", "param"), ACTIVATIONS, ids=INVERTIBLE)
def test_gradcheck_chunked(monkeypatch, chunked, fmt, training, activation, param):
    monkeypatch.setattr(fusedseg, "backend", "aten")
    check_gradients("aten", "cpu", (2, 3, 2, 3), fmt, activation, param, training, True)


def test_weight_without_bias_and_bias_without_weight(backend, device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.tensor([1.5, -0.5, 0.2], dtype=x.dtype, device=device, requires_grad=True)
    for wb in ((v, None), (None, v)):
        fused = inplace_abn(x * 1, None, None, *wb, training=True)
        expected = stock(x, None, None, *wb, True)
        grads = torch.autograd.grad(fused.square().sum(), (x, v))
        torch.testing.assert_close(fused, expected)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), (x, v)))


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
    y = torch.nn.functional.batch_norm(exact[0], *(t.double() for t in statistics), *exact[1:])
    expected = torch.autograd.grad(torch.nn.functional.elu(y, alpha).sum(), exact)
    for mine, theirs in zip(gradients, expected, strict=True):
        # Saturated values have a gradient of 0 instead of exp(y), because only the rounding of z is left of them.
        assert relative_error(mine, theirs) <= 2 * GRADIENT_TOLERANCE[dtype]
