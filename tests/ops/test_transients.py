"""Backward writes over gradients that nobody else sees, and frees rebuilt inputs early; the bits stay the same."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import fusedseg
from fusedseg.functional import Interpolated
from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import LiveBytes, measure
from fusedseg.ops import reuse

NEVER = 2**60


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Small tensors are treated as large ones."""
    monkeypatch.setattr(reuse, "LEAST_BYTES", 1)


def test_g_takes_no_memory_if_nobody_sees_dz(monkeypatch):
    """A converted network peaked one tensor higher than the same network in the scope, whose stock ReLU frees dz."""
    x = torch.randn(2, 64, 128, 128, requires_grad=True)
    norm = fusedseg.BatchNormAct(64, activation="relu")

    def peak(least):
        monkeypatch.setattr(reuse, "LEAST_BYTES", least)
        return measure(lambda x: norm(x * 1) * 2, x, loss=torch.sum).peak

    # Forward has three tensors at its end, and backward does not need more.  With a new dx it has x, dz and dx, and
    # tiles beside them.
    assert peak(1) <= 3.01 * x.nbytes
    assert peak(NEVER) >= 3.3 * x.nbytes


def addresses(norm, x):
    """The addresses of dz and dx."""
    seen: list[int] = []
    y = x * 1
    y.register_hook(lambda dy: seen.append(dy.data_ptr()))
    z = norm(y)
    z.register_hook(lambda dz: seen.append(dz.data_ptr()))
    (z * 2).sum().backward()
    return seen


@pytest.mark.parametrize(
    "norm", [fusedseg.InPlaceABN, fusedseg.InPlaceInstanceNormAct, partial(fusedseg.BatchNormAct, activation="relu")]
)
def test_dx_lies_in_the_memory_of_dz(norm, backend, monkeypatch):
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    dz, dx = addresses(norm(4), x)
    assert dz == dx
    monkeypatch.setattr(reuse, "LEAST_BYTES", NEVER)
    dz, dx = addresses(norm(4), x)
    assert dz != dx


def test_a_gradient_that_a_function_keeps_is_left_alone():
    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z, gradient):
            ctx.save_for_backward(gradient)
            return z.sum()

        @staticmethod
        def backward(ctx, dsum):
            return ctx.saved_tensors[0], None

    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    total = Keeps.apply(fusedseg.InPlaceABN(4)(x * 1), torch.randn(2, 4, 9, 8))
    first, second = (torch.autograd.grad(total, x, retain_graph=True) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_dx_is_written_over_an_unpacked_output_if_dz_is_held(monkeypatch):
    """The hooks around the op keep the output elsewhere, so that the output that backward gets is its own."""
    norm = fusedseg.InPlaceABN(4)
    x = torch.randn(2, 4, 9, 8, requires_grad=True)
    results = []
    for least in (1, NEVER):
        monkeypatch.setattr(reuse, "LEAST_BYTES", least)
        unpacked, seen, held = [], [], []

        def unpack(t, unpacked=unpacked):
            copy = t.clone()
            unpacked.append(copy.data_ptr())
            return copy

        y = x * 1
        y.register_hook(lambda dx, seen=seen: seen.append(dx.data_ptr()))
        with saved_tensors_hooks(torch.clone, unpack):
            z = norm(y)
        z.register_hook(held.append)
        results.append(torch.autograd.grad((z * 2).sum(), [x, *norm.parameters()]))
        assert torch.equal(held[0], torch.full_like(z, 2.0))
        assert (seen[0] in unpacked) == (least == 1)
    assert all(map(torch.equal, *results))


# -- the input of a convolution ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("formed", [2**22, 0], ids=["formed", "apart"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_freed_early_give_the_same_bits(dtype, formed, memory_format, monkeypatch):
    monkeypatch.setattr("fusedseg.ops.conv.convolutions.FORMED_BYTES", formed)
    conv = fusedseg.nn.JoinConv2d(12, 6, 3, padding=1).to(dtype=dtype, memory_format=memory_format)
    small, skip = torch.randn(2, 8, 5, 5, dtype=dtype), torch.randn(2, 4, 10, 10, dtype=dtype)
    small, skip = (t.to(memory_format=memory_format).requires_grad_() for t in (small, skip))
    results = []
    for least in (1, NEVER):
        monkeypatch.setattr(reuse, "LEAST_BYTES", least)
        # Hooks that copy make every saved tensor one that nobody else has.
        with saved_tensors_hooks(torch.clone, torch.clone):
            out = conv([Interpolated(small * 1, (10, 10), "bilinear"), skip * 1])
        results.append(torch.autograd.grad(out.square().sum(), [small, skip, *conv.parameters()]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("formed", [2**62, 0], ids=["one tensor", "apart"])
def test_an_unpacked_input_is_freed_before_dx(formed, monkeypatch):
    """The input, the gradient of the output and the gradient of the input are never there together.

    Hooks keep no data at all here, and make the tensors when backward asks for them.
    """
    monkeypatch.setattr("fusedseg.ops.conv.convolutions.FORMED_BYTES", formed)
    with FakeTensorMode():
        conv = fusedseg.nn.JoinConv2d(8, 8, 3, padding=1)
        x = torch.empty(4, 8, 64, 64, requires_grad=True)
        peaks = []
        for least in (1, NEVER):
            monkeypatch.setattr(reuse, "LEAST_BYTES", least)
            with LiveBytes() as live:
                with saved_tensors_hooks(lambda t: t.shape, torch.empty):
                    out = conv(x * 1) * 1
                total = out.sum()
                del out
                live.peak = live.current
                total.backward()
            peaks.append(live.peak / x.nbytes)
    # The weight and its gradient are small.  sum() expands its gradient, which the product makes a tensor.
    assert peaks[1] >= 3
    assert peaks[0] <= 2.1


def test_the_peak_of_a_network_of_two_blocks():
    """At the peak of backward, beside what is kept, there is one tensor of the largest size: dz, or the dx over it.

    Without that, both are there.  So it is on a GPU; on a CPU the memory of one chunk comes on top.
    """
    with fake_mode():
        net = nn.Sequential(fusedseg.ConvABN2d(3, 16, 3, padding=1), fusedseg.ConvABN2d(16, 16, 3, padding=1))
        x = torch.empty(8, 3, 128, 128)
        found = measure(net, x, loss=lambda out: (out * 1).sum())
    largest = 8 * 16 * 128 * 128 * 4
    assert found.saved == pytest.approx(2 * largest + x.nbytes, rel=0.01)
    assert found.peak - found.saved <= 1.1 * largest
