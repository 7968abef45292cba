"""The op on both backends: how it behaves with memory, formats and autograd, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedseg
from fusedseg.activation import Activation
from fusedseg.functional import inplace_abn
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import NormCall, norm_op
from tests import reference
from tests.reference import GRADIENT_TOLERANCE, relative_error, stock_activation
from tests.tools.tensors import channels_last

ACT = Activation("leaky_relu", 0.01)


def stock(x, running_mean, running_var, weight, bias, training, activation="leaky_relu", param=0.01):
    return stock_activation(activation, param)(F.batch_norm(x, running_mean, running_var, weight, bias, training))


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


def test_variance_of_large_mean(backend, device):
    """The formula E[x^2] - E[x]^2 in fp32 would give 0 here."""
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


def test_double_backward(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    functional_op = lambda x: norm_op(*NormCall(Norm("output", ACT), x).arguments)[0]  # noqa: E731
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


def test_weight_without_bias_and_bias_without_weight(backend, device):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device, requires_grad=True)
    v = torch.tensor([1.5, -0.5, 0.2], dtype=x.dtype, device=device, requires_grad=True)
    for wb in ((v, None), (None, v)):
        fused = inplace_abn(x * 1, None, None, *wb, training=True)
        # PyTorch has no gradient of a batch norm with a bias and no weight on CUDA.
        expected = reference.norm_act(x, *wb).out
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
