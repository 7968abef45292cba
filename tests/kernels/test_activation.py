"""Activations on the device beside float64: values, derivatives, kinks and tails."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from fusedseg.kernels.activation import act_fwd, act_grad_of_input

from tests.reference import STOCK_ACTIVATIONS, activate

ACTIVATIONS = dict.fromkeys(STOCK_ACTIVATIONS, 0.0) | {"leaky_relu": 0.2, "elu": 1.3, "identity": 0.0}
KINKS = (0.0, -0.0, 3.0, -3.0, 6.0, 1e-30, -1e-30)
TAILS = (10.0, -10.0, 30.0, -30.0, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 1e18, -1e18)


@triton.jit
def activation_kernel(y_ptr, z_ptr, g_ptr, ACT: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + offs)
    tl.store(z_ptr + offs, act_fwd(y, ACT, PARAM))
    tl.store(g_ptr + offs, act_grad_of_input(tl.full((BLOCK,), 1.0, y.dtype), y, ACT, PARAM))


def run(y, name):
    """phi(y) and its derivative."""
    padded = torch.zeros(triton.next_power_of_2(y.numel()), dtype=y.dtype, device=y.device)
    padded[: y.numel()] = y
    z, g = torch.full_like(padded, float("nan")), torch.full_like(padded, float("nan"))
    activation_kernel[(1,)](padded, z, g, ACT=name, PARAM=ACTIVATIONS[name], BLOCK=padded.numel())
    return z[: y.numel()], g[: y.numel()]


def exact(y, name):
    leaf = y.double().requires_grad_()
    z = activate(leaf, name, ACTIVATIONS[name])
    return z.detach(), torch.autograd.grad(z.sum(), leaf)[0]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.float64, 1e-14)], ids=["fp32", "fp64"])
def test_values_and_derivatives(device, name, dtype, tolerance):
    """To a few roundings of the largest of y, z and 1, from one end of the range to the other."""
    y = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor(TAILS)]).to(device, dtype)
    found, expected = run(y, name), exact(y, name)
    for value, reference, scale in zip(found, expected, (y.double().abs().clamp(min=1), 1.0), strict=True):
        assert ((value.double() - reference).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kinks_and_nan_as_on_aten(device, name):
    y = torch.tensor([*KINKS, float("nan")], device=device)
    leaf = y.clone().requires_grad_()
    z = activate(leaf, name, ACTIVATIONS[name])
    (g,) = torch.autograd.grad(z.sum(), leaf)
    found = run(y, name)
    finite = y.isfinite()
    assert ((found[0] - z.detach()).abs() <= 4e-7 * y.abs())[finite].all()
    assert found[0][-1].isnan()
    assert name in ("relu", "relu6", "leaky_relu", "hardswish", "identity") or found[1][-1].isnan()
    torch.testing.assert_close(found[1][finite], g[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_subnormal_numbers(device, name):
    """Smooth activations are linear there; a GPU may take them for zero in between, as its exponentials do."""
    y = torch.tensor([1e-40, -1e-40], dtype=torch.float32, device=device)
    assert ((run(y, name)[0].double() - exact(y, name)[0]).abs() <= 2e-40).all()
