"""Compares activations on the device with float64: values, derivatives, kinks and tails."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from fusedseg.kernels.activation import act_fwd, act_grad, act_grad_of_input, act_inverse
from fusedseg.kernels.launcher import FP_FUSION

from fusedseg.activation import INVERTIBLE, TABLE
from tests.reference import PARAMS, stock_activation

ACTIVATIONS = {row.name: PARAMS.get(row.name, 0.0) for row in TABLE.values() if not row.learned}
KINKS = (0.0, -0.0, 3.0, -3.0, 6.0, 1e-30, -1e-30)
TAILS = (10.0, -10.0, 30.0, -30.0, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 1e18, -1e18)


@triton.jit
def inverse_kernel(z_ptr, y_ptr, g_ptr, ACT: tl.constexpr, PARAM: tl.constexpr, CLAMP: tl.constexpr,
                   BLOCK: tl.constexpr):  # fmt: skip
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(z_ptr + offs)
    tl.store(y_ptr + offs, act_inverse(z, ACT, PARAM, CLAMP))
    tl.store(g_ptr + offs, act_grad(tl.full((BLOCK,), 1.0, z.dtype), z, ACT, PARAM))


@triton.jit
def one_function_kernel(y_ptr, NAME: tl.constexpr, ACT: tl.constexpr):
    y = tl.load(y_ptr)
    if NAME == "act_fwd":
        y = act_fwd(y, ACT, 0.0)
    if NAME == "act_grad":
        y = act_grad(1.0, y, ACT, 0.0)
    if NAME == "act_grad_of_input":
        y = act_grad_of_input(1.0, y, ACT, 0.0)
    if NAME == "act_inverse":
        y = act_inverse(y, ACT, 1.0, 1e-12)
    tl.store(y_ptr, y)


@triton.jit
def activation_kernel(y_ptr, z_ptr, g_ptr, ACT: tl.constexpr, PARAM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + offs)
    tl.store(z_ptr + offs, act_fwd(y, ACT, PARAM))
    tl.store(g_ptr + offs, act_grad_of_input(tl.full((BLOCK,), 1.0, y.dtype), y, ACT, PARAM))


def run(y, name):
    """Returns phi(y) and its derivative."""
    padded = torch.zeros(triton.next_power_of_2(y.numel()), dtype=y.dtype, device=y.device)
    padded[: y.numel()] = y
    z, g = torch.full_like(padded, float("nan")), torch.full_like(padded, float("nan"))
    options = {"PARAM": ACTIVATIONS[name], "BLOCK": padded.numel(), "enable_fp_fusion": FP_FUSION}
    activation_kernel[(1,)](padded, z, g, ACT=name, **options)
    return z[: y.numel()], g[: y.numel()]


def exact(y, name):
    # PyTorch's hardswish on CUDA multiplies by one sixth in fp32, in fp64 too.
    leaf = y.double().cpu().requires_grad_()
    z = stock_activation(name, ACTIVATIONS[name])(leaf)
    return z.detach().to(y.device), torch.autograd.grad(z.sum(), leaf)[0].to(y.device)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.float64, 1e-14)], ids=["fp32", "fp64"])
def test_values_and_derivatives(device, name, dtype, tolerance):
    """The error is a few roundings of the largest of y, z and 1, over the whole range."""
    y = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor(TAILS)]).to(device, dtype)
    found, expected = run(y, name), exact(y, name)
    for value, reference, scale in zip(found, expected, (y.double().abs().clamp(min=1), 1.0), strict=True):
        assert ((value.double() - reference).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_kinks_and_nan_as_on_aten(device, name):
    y = torch.tensor([*KINKS, float("nan")], device=device)
    leaf = y.clone().requires_grad_()
    z = stock_activation(name, ACTIVATIONS[name])(leaf)
    (g,) = torch.autograd.grad(z.sum(), leaf)
    found = run(y, name)
    finite = y.isfinite()
    assert ((found[0] - z.detach()).abs() <= 4e-7 * torch.maximum(y.abs(), z.detach().abs()))[finite].all()
    assert found[0][-1].isnan()
    assert name in ("relu", "relu6", "leaky_relu", "hardswish", "identity") or found[1][-1].isnan()
    torch.testing.assert_close(found[1][finite], g[finite], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_subnormal_numbers(device, name):
    """Smooth activations are linear for subnormal numbers; a GPU's exponentials may treat such numbers as zero.

    If the value at 0 is not 0, the result is that value, rounded.
    """
    y = torch.tensor([1e-40, -1e-40], dtype=torch.float32, device=device)
    expected = exact(y, name)[0]
    assert ((run(y, name)[0].double() - expected).abs() <= 2e-40 + 2**-23 * expected.abs()).all()


@pytest.mark.parametrize("name", INVERTIBLE)
def test_inverses(device, name):
    """The kernel computes y and phi'(y) from z = phi(y)."""
    y = torch.linspace(-6, 6, 64, dtype=torch.float64, device=device)
    z, derivative = exact(y, name)
    found, g = torch.full_like(y, float("nan")), torch.full_like(y, float("nan"))
    options = {"PARAM": ACTIVATIONS[name], "CLAMP": 1e-12, "BLOCK": 64, "enable_fp_fusion": FP_FUSION}
    inverse_kernel[(1,)](z, found, g, ACT=name, **options)
    # The inverse loses digits in the tail, where exp(-6) is added to 1.
    torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(g, derivative, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "param"), [("elu", 1.0), ("elu", 0.1), ("elu", 3.7), ("selu", 0.0), ("leaky_relu", 0.01)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
def test_inverses_in_fp32(device, name, param, dtype):
    """y is exact to 7 roundings for every z, tiny ones and the limit included, beside what rounding z / p makes.

    Over all values of fp32 in [-1, -1 / 4] and every 97th one in (-1 / 4, 0], p = 1 had 3.5 units in the last place,
    and 5.9 if the reciprocal is off by the most that a GPU allows.
    """
    of_tail = {"elu": param, "selu": 1.7580993408473766, "leaky_relu": 1.0}[name]
    bits = torch.cat([torch.linspace(of, 0x3F800000, 2**13, dtype=torch.float64) for of in (0, 0x3E800000)]).int()
    tail = bits.view(torch.float32).neg() * of_tail
    z = torch.cat([tail, -tail]).to(dtype).float().clamp_(min=-of_tail).to(device)
    clamp, u = torch.finfo(dtype).eps / 8, 2.0**-24
    y, g = torch.full_like(z, float("nan")), torch.full_like(z, float("nan"))
    options = {"PARAM": param, "CLAMP": clamp, "BLOCK": 1024, "enable_fp_fusion": FP_FUSION}
    inverse_kernel[(len(z) // 1024,)](z, y, g, ACT=name, **options)
    exact = z.double()
    if name == "leaky_relu":
        expected, rounding = torch.where(exact > 0, exact, exact / param), 0.0
    else:
        scale = 1.0507009873554805 if name == "selu" else 1.0
        e = (exact / of_tail).clamp(max=0)
        left = (1 + e).clamp(min=clamp)
        expected = torch.where(exact > 0, exact / scale, torch.where(1 + e > clamp, e, clamp - 1).log1p())
        rounding = 2 * u * (e.abs() / left)
    assert ((y.double() - expected).abs() <= 7 * u * expected.abs() + rounding + 2.0**-148).all()


# An activation without an inverse was once treated as the identity, without an error.
@pytest.mark.parametrize(
    ("function", "other"),
    [("act_fwd", "prelu"), ("act_grad_of_input", "prelu"), ("act_grad", "relu"), ("act_inverse", "relu")],
)
def test_an_activation_without_a_branch_does_not_compile(device, function, other):
    for name in ("swish", other):
        with pytest.raises(Exception, match=r"^at \d+|has no branch") as raised:
            one_function_kernel[(1,)](torch.ones(1, device=device), function, name, enable_fp_fusion=FP_FUSION)
        # The compiler names the line of the caller first, and its cause is the error.
        errors = [raised.value]
        while errors[-1].__cause__ is not None:
            errors.append(errors[-1].__cause__)
        assert any(f"{function} has no branch for this activation" in str(error) for error in errors)
