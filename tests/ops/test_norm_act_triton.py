"""Compares norm_act on Triton's kernels with the stock functions."""

import inspect

import pytest
import torch

import fusedseg
from fusedseg.activation import Activation
from fusedseg.ops.norm import passes
from fusedseg.ops.norm import reference as norm_reference
from fusedseg.ops.norm import triton as norm_triton
from fusedseg.ops.norm.call import Norm, Operands
from fusedseg.ops.norm.graph import NormCall, norm_op
from fusedseg.ops.norm.statistic import INSTANCE, Statistic
from tests import reference
from tests.ops.norm_act_cases import ACTIVATIONS, GROUPS, NORMS, both, fused, inputs
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error


@pytest.mark.parametrize("name", ["forward", "recompute", "backward", "moments"])
def test_both_implementations_have_one_signature(name):
    mine, other = (inspect.signature(getattr(of, name)) for of in (norm_triton, norm_reference))
    assert mine == other
    of_protocol = inspect.signature(getattr(passes.Implementation, name)).parameters
    assert list(of_protocol)[1:] == list(mine.parameters)


@pytest.fixture
def triton(needs_interpreter, monkeypatch, device):
    monkeypatch.setattr(fusedseg, "backend", "triton")


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_on_triton(norm, name, fmt, device):
    """In float64 the results agree to a few roundings; prelu runs on aten because of its learned slope."""
    for training, residual, affine in ((True, True, True), (False, False, True), (True, False, False)):
        x, weight, bias, r = inputs((2, 6, 4, 5), torch.float64, fmt, residual, device)
        parameters = (weight, bias) if affine else (None, None)
        stock, ours = both(norm, name, x, *parameters, r, training=training)
        assert ours[0].stride() == x.stride()
        for expected, found in zip(stock, ours, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_accuracy_on_triton(norm, dtype, device):
    """The results are accurate for any weight, also 0: xhat comes from x, and only stored values are rounded."""
    x, dz = torch.randn(2, 3, 6, 9, 8, dtype=torch.float64) * 2
    x, dz = x.to(dtype), (dz + x / 4).to(dtype)
    weight = torch.tensor([1.0, -1.0, 0.05, 1e-4, 0.0, 2.0], requires_grad=True, device=device)
    bias = torch.tensor([0.5, 3.0, -3.0, 0.5, 0.5, 0.0], requires_grad=True, device=device)
    leaf = x.to(device).requires_grad_()
    groups = {"batch": None, "instance": 6, "group": GROUPS}[norm]
    z = fused(norm, leaf, weight, bias, activation="silu")
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
    """A recipe gives the same bits as the forward pass."""
    for training in (True, False):
        if norm == "group" and not training:
            continue
        x, weight, bias, residual = inputs((2, 6, 9, 7), torch.float32, device=device)
        buffers = (None, None) if norm == "group" else (bias.clone(), bias + 1)
        spec = Norm(
            "input", Activation("silu", 0.0), 1e-5, 0.1, training, Statistic(norm if training else "batch", GROUPS)
        )
        passed = Operands(x, weight, bias, residual, None, *buffers)
        z, stats = passes.forward(passed, spec, None, None)
        again = passes.recompute(passed, stats, spec)
        assert torch.equal(again, z)


@pytest.mark.usefixtures("triton")
def test_opcheck_on_triton(device):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((2, 3, 4, 5), torch.float64, device=device))
    spec = Norm("input", Activation("relu", 0.0), over=INSTANCE)
    torch.library.opcheck(norm_op, NormCall(spec, x, weight, bias, residual).arguments)
