"""Gradients are written over the output: the numbers are the same, and no tensor that the user sees is overwritten."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory import allocator_peak
from fusedseg.ops.norm import aten_chunks
from fusedseg.unet import UNet


@pytest.fixture(autouse=True)
def reuse(monkeypatch):
    monkeypatch.setattr(fusedseg, "reuse_output", True)
    # On a CPU, only large tensors, which are computed in chunks, can have gradients written over the output.
    monkeypatch.setattr(aten_chunks, "WHOLE", 0)


def block():
    conv = nn.Conv2d(3, 8, 3, padding=1)
    return nn.Sequential(conv, fusedseg.InPlaceABN(8), nn.Conv2d(8, 4, 3, padding=1), fusedseg.InPlaceABN(4))


def gradients(net, x, monkeypatch, reuse):
    monkeypatch.setattr(fusedseg, "reuse_output", reuse)
    return torch.autograd.grad(net(x).square().sum(), [*net.parameters()])


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_same_gradients(backend, memory_format, training, monkeypatch):
    net = block().train(training)
    x = torch.randn(2, 3, 9, 8).to(memory_format=memory_format)
    assert all(map(torch.equal, *(gradients(net, x, monkeypatch, reuse) for reuse in (True, False))))


def test_it_happens(backend, memory_format):
    """dx of the norm lies in the memory of the norm's output."""
    seen: list[int] = []
    x = torch.randn(2, 3, 9, 8, requires_grad=True).to(memory_format=memory_format)
    y = x * 1
    y.register_hook(lambda dy: seen.append(dy.data_ptr()))
    z = fusedseg.InPlaceABN(3)(y)
    address, total = z.data_ptr(), z.sum()
    del y, z
    total.backward()
    assert seen == [address]


HELD = {
    "by a variable": lambda z: z,
    "by a detached view": lambda z: z.detach()[:, 0],
    "by numpy": lambda z: z.detach().numpy(),
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_what_is_held_is_left_alone(hold):
    norm = fusedseg.InPlaceABN(3)
    z = norm(torch.randn(2, 3, 8, 8, requires_grad=True) * 1)
    held = hold(z)
    before = torch.as_tensor(held).detach().clone()
    total = z.square().sum()
    del z
    total.backward()
    assert torch.equal(torch.as_tensor(held).detach(), before)


def test_a_second_backward_is_right_or_raises(backend):
    norm = fusedseg.InPlaceABN(3)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    # sum keeps nothing: the output is overwritten, and the second backward raises an error.
    total = norm(x * 1).sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
    # square keeps the output, so the output is not overwritten.
    total = norm(x * 1).square().sum()
    first = torch.autograd.grad(total, x, retain_graph=True)
    second = torch.autograd.grad(total, x)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_saved_tensor_hooks_keep_their_tensors():
    norm = fusedseg.InPlaceABN(3)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        total = norm(x * 1).sum()
    first = torch.autograd.grad(total, x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, x), first, rtol=0, atol=0)


def test_a_u_net_peaks_lower_with_the_same_gradients(monkeypatch):
    net = UNet(1, 2, widths=(8, 16))
    x = torch.randn(2, 1, 64, 64)
    results, peaks = [], []
    for reuse in (False, True):
        results.append(gradients(net, x, monkeypatch, reuse))
        peaks.append(allocator_peak(lambda: net(x).square().mean().backward()))
    assert all(map(torch.equal, *results))
    assert peaks[1] < peaks[0]


def test_only_a_bool_is_taken():
    with pytest.raises(TypeError, match=r"fusedseg\.reuse_output must be True or False, got 1"):
        fusedseg.reuse_output = 1
