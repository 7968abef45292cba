"""Weights under autocast: no cast copy is kept, and gradients are the same as with kept copies."""

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory import SavedBytes
from fusedseg.ops.conv import join_conv


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


LAYERS = {
    "JoinConv2d": lambda: fusedseg.nn.JoinConv2d(32, 32, 3, padding=1),
    "ConvABN2d": lambda: fusedseg.ConvABN2d(32, 32, 3, padding=1),
}


@pytest.fixture(params=LAYERS.values(), ids=LAYERS)
def layer(request):
    return request.param()


@pytest.fixture
def x():
    return torch.randn(2, 32, 4, 4)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def run(layer, x, calls):
    """Returns the kept bytes and the output."""
    with SavedBytes(layer.parameters()) as saved, autocast():
        for _ in range(calls):
            x = layer(x)
    return saved.nbytes, x


def gradients(layer, out):
    grads = torch.autograd.grad(out.float().square().mean(), [*layer.parameters()])
    return [out.detach(), *grads]


@pytest.mark.parametrize("calls", [1, 2])
def test_no_copy_is_kept(layer, x, monkeypatch, calls):
    """Two calls in a region of autocast share a copy."""
    nbytes, out = run(layer, x, calls)
    # Only x, the outputs and vectors are kept.
    assert nbytes <= (1 + calls) * x.numel() * 2 + calls * 1024
    got = gradients(layer, out)
    monkeypatch.setattr(join_conv, "uncast", lambda w: w)
    nbytes, out = run(layer, x, calls)
    assert nbytes >= 2 * 32 * 32 * 9
    assert_equal(got, gradients(layer, out))


def test_a_weight_that_changes_before_backward_raises(layer, x):
    with autocast():
        out = layer(x.requires_grad_())
    with torch.no_grad():
        next(layer.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_copy_older_than_its_weight_is_kept(x, monkeypatch):
    """A weight changes within a region of autocast, which uses the old copy; backward needs the old copy too."""
    results = []
    for uncast in (join_conv.uncast, lambda w: w):
        monkeypatch.setattr(join_conv, "uncast", uncast)
        torch.manual_seed(0)
        layer = fusedseg.nn.JoinConv2d(32, 32, 3, padding=1)
        with autocast():
            for _ in range(2):
                leaf = x.clone().requires_grad_()
                out = layer(leaf)
                dx, dw = torch.autograd.grad(out.float().square().mean(), [leaf, layer.weight])
                with torch.no_grad():
                    layer.weight.add_(1.0)
        results.append([out, dx, dw])
    assert_equal(*results)


def test_a_cast_of_the_callers_is_data_like_any_other(x):
    """A copy that the caller has cast may be older than the weight, so it is not rebuilt from the weight."""
    weight = torch.randn(32, 32, 3, 3, requires_grad=True)
    half = weight.bfloat16()
    with torch.no_grad():
        weight.zero_()
    results = []
    for convolve in (fusedseg.functional.join_conv, nn.functional.conv2d):
        leaf = x.bfloat16().requires_grad_()
        with autocast():
            out = convolve(leaf, half)
        results.append(torch.autograd.grad(out.float().square().mean(), leaf, retain_graph=True))
    assert results[0][0].any()
    assert_equal(*results)
