"""Compares the modules with nn.MaxPool2d and nn.MaxPool3d."""

import copy

import pytest
import torch
from torch import nn

from fusedseg import MaxPool2d, MaxPool3d

PAIRS = pytest.mark.parametrize(
    ("ours", "stock", "shape"),
    [(MaxPool2d, nn.MaxPool2d, (2, 3, 7, 6)), (MaxPool3d, nn.MaxPool3d, (2, 3, 5, 4, 6))],
    ids=["2d", "3d"],
)


@PAIRS
@pytest.mark.parametrize("arguments", [(2,), (3, 2, 1), (3, 1, 1, 1, False, True), ((2,), ())], ids=str)
def test_as_stock(backend, device, ours, stock, shape, arguments):
    x = torch.randn(shape, device=device, requires_grad=True)
    module, plain = ours(*arguments), stock(*arguments)
    assert isinstance(module, stock)
    assert repr(module) == repr(plain)
    assert module.state_dict() == {}
    z, expected = module(x), plain(x)
    assert torch.equal(z, expected)
    grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (z, expected)]
    torch.testing.assert_close(*grads)
    assert torch.equal(copy.deepcopy(module)(x[0]), plain(x[0]))


def test_autocast_leaves_the_dtype_alone(backend, device):
    with torch.autocast(device.type, torch.bfloat16):
        assert MaxPool2d(2)(torch.randn(1, 2, 4, 4, device=device)).dtype == torch.float32
        assert MaxPool2d(2)(torch.randn(1, 2, 4, 4, device=device).bfloat16()).dtype == torch.bfloat16


# The graphs of both backends hold the same op, so one memory format for each backend is enough.
COMPILED = [
    pytest.param("aten", torch.contiguous_format, id="aten-contiguous"),
    pytest.param("triton", torch.channels_last, id="triton-channels_last"),
]


@pytest.mark.parametrize(("backend", "fmt"), COMPILED, indirect=["backend"])
def test_compile_fullgraph_follows_eager(backend, device, fmt):
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(2, 4, 3), MaxPool2d(2), nn.Conv2d(4, 3, 1), MaxPool2d(3, 2, 1))
    net = net.to(device, torch.float64, memory_format=fmt)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 2, 12, 12, dtype=torch.float64, device=device).contiguous(memory_format=fmt)
    grads = []
    for f in (net, compiled):
        z = f(x)
        grads.append((z, *torch.autograd.grad(z.square().mean(), list(net.parameters()))))
    torch.testing.assert_close(grads[1], grads[0])
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))


@PAIRS
def test_saved_tensors_may_be_changed(ours, stock, shape):
    """``allow_mutation_on_saved_tensors`` raised KeyError in backward."""
    x = torch.randn(shape, requires_grad=True)
    (expected,) = torch.autograd.grad(stock(2)(x).square().sum(), x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        (found,) = torch.autograd.grad(ours(2)(x).square().sum(), x)
    assert torch.equal(found, expected)


@PAIRS
def test_refused(ours, stock, shape):
    with pytest.raises(ValueError, match=f"return_indices must be False, got True; use torch.nn.{stock.__name__}"):
        ours(2, return_indices=True)
    with pytest.raises(ValueError, match=rf"fusedseg.{stock.__name__}: x must have shape .* got \(3, 4\)"):
        ours(2)(torch.randn(3, 4))
    with pytest.raises(TypeError, match=f"fusedseg.{stock.__name__}: x must be a tensor, got str"):
        ours(2)("x")
