"""A convolution with the norms beside it: the formulas of ``norm_conv.py`` against autograd of PyTorch's ops."""

import math

import pytest
import torch
from torch.nn import functional as F

import fusedseg
from fusedseg.ops.conv import choice, norm_conv
from fusedseg.ops.conv.geometry import Geometry
from fusedseg.ops.conv.norm_conv import NormConv
from fusedseg.ops.layout import FORMATS

EPS, MOMENTUM = 1e-5, 0.1
ACTIVATIONS = {
    "identity": (("identity", 0.0), lambda y: y),
    "relu": (("relu", 0.0), F.relu),
    "leaky_relu": (("leaky_relu", 0.1), lambda y: F.leaky_relu(y, 0.1)),
}
# The activation, dimensions, whether samples have statistics of their own, channels_last, the bias, stride.
CASES = {
    "batch, relu": ("relu", 2, False, True, False, 1),
    "batch, leaky_relu, stride 2": ("leaky_relu", 2, False, True, True, 2),
    "batch, identity, planes": ("identity", 2, False, False, True, 1),
    "instance, leaky_relu, 3D": ("leaky_relu", 3, True, True, False, 1),
    "instance, relu, planes, 3D, stride 2": ("relu", 3, True, False, True, 2),
    "batch, leaky_relu, 3D": ("leaky_relu", 3, False, True, False, 1),
}


class Case:
    """The calls of a case in float64, and what autograd of PyTorch's ops gives for it."""

    def __init__(self, name: str, offset: float = 0.0) -> None:
        act, dims, of_samples, rows, has_bias, stride = CASES[name]
        torch.manual_seed(0)
        x, w = torch.randn(2, 3, *(5, 6, 7)[:dims]) * 2 + 3, torch.randn(4, 3, *[3] * dims)
        x, w = (t.contiguous(memory_format=FORMATS[dims + 2]) if rows else t for t in (x, w))
        leaves = [x, torch.rand(3) + 0.5, torch.randn(3), w, *([torch.randn(4)] if has_bias else [])]
        leaves = [t.double().requires_grad_() for t in leaves]
        x, weight, bias, w, *more = leaves
        given, function = ACTIVATIONS[act]
        running = [None, None] if of_samples else [torch.randn(4).double() + offset, torch.rand(4).double()]
        over = tuple(range(2, 2 + dims)) if of_samples else (0, *range(2, 2 + dims))

        def statistics(t):
            return t.mean(over).flatten(), (t.var(over, correction=0).flatten() + EPS).rsqrt()

        def normed(t, weight=None, bias=None, moved=(None, None)):
            if of_samples:
                return F.instance_norm(t, None, None, weight, bias, eps=EPS)
            return F.batch_norm(t, *moved, weight, bias, True, MOMENTUM, EPS)

        conv = (F.conv2d, F.conv3d)[dims - 2]
        y = conv(function(normed(x, weight, bias)), w, *more, padding=1, stride=stride)
        moved = [None if v is None else v.clone() for v in running]
        normed(y.detach(), moved=moved)
        self.dy = torch.randn_like(y)
        self.gradients = torch.autograd.grad(y, leaves, self.dy)
        self.forward = [y.detach(), *statistics(y.detach()), *moved]
        before = *(t.detach() for t in (x, weight, bias)), *statistics(x.detach()), w.detach()
        shared = *before, norm_conv.norm_of(*given, of_samples), Geometry((stride,) * dims, (1,) * dims, (1,) * dims, 1)
        after = norm_conv.norm_of("identity", 0.0, of_samples, EPS, MOMENTUM)
        self.call = NormConv(*shared, more[0].detach() if more else None, *running, after)
        self.gradient = NormConv(*shared, dy=self.dy, wanted=(True, True, has_bias))


@pytest.fixture(params=["aten", "triton"], autouse=True)
def by(request, monkeypatch, needs_interpreter):
    monkeypatch.setattr(fusedseg, "backend", request.param)


def check(found, wanted):
    for one, other in zip(found, wanted, strict=False):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", [norm_conv.meaning, None], ids=["fused", "stock"])
def test_values_and_gradients(name, kernels):
    """Both ways to compute a call: the formulas of the fused kernels, and the ops that they stand for."""
    case = Case(name)
    check(norm_conv._forward(case.call, kernels), case.forward)
    check(norm_conv._backward(case.gradient, kernels), case.gradients)


@pytest.mark.parametrize("name", ["batch, relu", "batch, identity, planes"])
@pytest.mark.parametrize("offset", [1e3, 1e7])
def test_a_shift_that_is_far_from_the_mean_costs_no_digits(name, offset):
    """In float64 sums around 1e7 leave 2 of 16 digits of a variance of 1."""
    case = Case(name, offset)
    found = norm_conv.norm_conv_op(*case.call.arguments)
    torch.testing.assert_close(found[1], case.forward[1], rtol=1e-12, atol=1e-8)
    torch.testing.assert_close(found[2], case.forward[2], rtol=1e-12, atol=0)
    check(found, case.forward)


def test_a_near_shift_takes_no_second_pass():
    case = Case("batch, relu")
    y, sums = norm_conv.meaning(case.call)
    # The second pass alone reads y.
    found = norm_conv.statistics_of_sums(
        y * math.nan, sums, case.call.after, (case.call.running_mean, case.call.running_var)
    )
    check(found, case.forward[1:3])


def test_moving_writes_the_running_statistics_where_they_are():
    case = Case("batch, relu")
    y, mean, rstd, *moved = norm_conv.norm_conv_moving(*case.call.arguments)
    assert moved == [None, None]
    check([y, mean, rstd, case.call.running_mean, case.call.running_var], case.forward)


def test_frozen_parameters():
    case = Case("batch, relu")
    call = case.gradient._replace(wanted=(False, False, False))
    dx, *others = norm_conv.norm_conv_backward(*call.arguments)
    assert others == [None] * 4
    torch.testing.assert_close(dx, case.gradients[0])


def test_a_measurement_compares_every_result():
    """On a GPU a wrong statistic beside a right y must not be taken."""
    right = (torch.ones(4), torch.ones(2))
    results = {"aten": right, "triton": (torch.ones(4), torch.tensor([1.0, 1.1]))}
    record = choice.measure(torch.float16, lambda by: tuple(t.clone() for t in results[by]), lambda run: 1.0)
    assert not record.agree
    results["triton"] = right
    assert choice.measure(torch.float16, lambda by: tuple(t.clone() for t in results[by]), lambda run: 1.0).agree


def test_what_no_kernel_computes_is_no_failure(recwarn):
    def run(by):
        if by == "triton":
            raise choice.Unserved
        return torch.ones(4)

    kind = choice.kind_of("op", torch.ones(1))
    assert choice._measured(kind, torch.float16, run).choice == "aten"
    assert not recwarn
