"""The packed copies in a scope with ``bits``: which readers share one copy, and how many bits a value has."""

import contextlib

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory import SavedBytes


def kept_bits(read, *tensors, owned=()):
    """The bits that the scope keeps for each value of the first tensor."""
    leaves = [t.requires_grad_() for t in tensors]
    with SavedBytes(owned) as saved, fusedseg.recompute(bits=4):
        # Not the caller's data, which the scope keeps as it is.
        out = read(*(t * 1 for t in leaves))
    assert out.requires_grad
    return 8 * saved.nbytes / tensors[0].numel()


@pytest.mark.parametrize(("order", "copies"), [("norm conv", 1), ("conv norm", 2), ("norm other", 2)])
def test_one_copy_serves_a_convolution_and_a_norm(order, copies):
    """The copy of a norm serves a later convolution.

    A norm does not read the copy of another call: the sign on each side of its bend is exact in its own copy only.
    """
    modules = {name: fusedseg.BatchNormAct(8, activation="relu") for name in ("norm", "other")}
    modules["conv"] = nn.Conv2d(8, 8, 1)

    def read(x):
        return sum(modules[name](x).sum() for name in order.split())

    bits = kept_bits(read, torch.randn(2, 8, 32, 32), owned=modules["conv"].parameters())
    # Each group of values has its smallest and largest one beside it, and each channel its statistics.
    assert 4 * copies <= bits <= 4.5 * copies


@pytest.mark.parametrize("before", [lambda x: 0, nn.Conv2d(8, 8, 1), fusedseg.BatchNormAct(8, activation="relu")])
def test_signs_of_a_norm_whose_input_others_have_packed_are_exact(before):
    """The gradient of the bias sums dz over the positions whose sign is positive, without any rounded value."""
    norm, conv = fusedseg.BatchNormAct(8, activation="relu").double(), nn.Conv2d(8, 8, 1).double()
    before = before.double() if isinstance(before, nn.Module) else before
    nn.init.normal_(norm.bias)
    x, found = torch.randn(2, 8, 32, 32, dtype=torch.float64, requires_grad=True), []
    for scope in (contextlib.nullcontext(), fusedseg.recompute(bits=4, seed=0)):
        with scope:
            y = x * 1
            out = before(y) + conv(norm(y))
        found.append(torch.autograd.grad(out.square().sum(), norm.bias))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("module", "bits"), [(fusedseg.BatchNormAct, 32), (fusedseg.InPlaceABN, 4)])
def test_a_sum_is_exact_where_its_sign_must_be(module, bits):
    """A norm that keeps its input finds the sign of input and residual together; the output alone has its own sign."""
    norm = module(8, activation="leaky_relu", activation_param=0.01)
    found = kept_bits(norm, *torch.randn(2, 2, 8, 32, 32))
    assert 2 * bits <= found <= 2 * bits + 1
