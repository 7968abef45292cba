"""Weights under autocast: no cast copy is kept, and gradients are the same as with kept copies."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory import SavedBytes
from fusedseg.ops.conv import join_conv
from tests.ops.scope_cases import assert_equal

LAYERS = {
    "Conv2d": lambda: nn.Conv2d(32, 32, 3, padding=1),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(32, 32, 3, padding=1),
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


def scope(layer):
    """The scope for stock layers; our layers need no scope."""
    return fusedseg.recompute() if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)) else nullcontext()


def run(layer, x, scoped=True, calls=1):
    """Returns the kept bytes and the output."""
    with SavedBytes(layer.parameters()) as saved, autocast(), scope(layer) if scoped else nullcontext():
        for _ in range(calls):
            x = layer(x)
    return saved.nbytes, x


def gradients(layer, out):
    grads = torch.autograd.grad(out.float().square().mean(), [*layer.parameters()])
    return [out.detach(), *grads]


def test_no_copy_is_kept(layer, x, monkeypatch):
    nbytes, out = run(layer, x)
    # Only x, z and vectors are kept.
    assert nbytes <= 2 * x.numel() * 2 + 1024
    got = gradients(layer, out)
    monkeypatch.setattr(join_conv, "uncast", lambda w: w)
    nbytes, out = run(layer, x, scoped=False)
    assert nbytes >= 2 * 32 * 32 * 9
    assert_equal(got, gradients(layer, out))


def test_a_weight_that_changes_before_backward_raises(layer, x):
    with autocast(), scope(layer):
        out = layer(x.requires_grad_())
    with torch.no_grad():
        next(layer.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_two_calls_of_a_region_share_a_copy(layer, x):
    nbytes, out = run(layer, x, calls=2)
    assert nbytes <= 3 * x.numel() * 2 + 2048
    _, expected = run(layer, x, scoped=False, calls=2)
    assert_equal(gradients(layer, out), gradients(layer, expected))


def test_a_copy_older_than_its_weight_is_kept(x):
    """A weight changes within a region of autocast, which uses the old copy; backward needs the old copy too."""
    results = []
    for scoped in (True, False):
        torch.manual_seed(0)
        layer = nn.Conv2d(32, 32, 3, padding=1)
        with autocast():
            for _ in range(2):
                with scope(layer) if scoped else nullcontext():
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
        with autocast(), fusedseg.recompute():
            out = convolve(leaf, half)
        results.append(torch.autograd.grad(out.float().square().mean(), leaf, retain_graph=True))
    assert results[0][0].any()
    assert_equal(*results)
