"""Compares the value and the gradient of two losses."""

import torch


def check_same(ours, expected, x, tolerance=1e-12):
    """``ours`` and ``expected`` are a function of the logits, and its arguments after the logits.

    The tolerance is relative to the largest value of the gradient.  NaN and infinity must be at the same places.
    """
    values, grads = [], []
    for loss, *arguments in (ours, expected):
        leaf = x.detach().clone().requires_grad_()
        value = loss(leaf, *arguments)
        grads.append(torch.autograd.grad(value.sum(), leaf)[0])
        values.append(value.detach())
    bounds = tolerance * max(1.0, largest(values[1])), tolerance * largest(grads[1])
    for pair, bound in zip((values, grads), bounds, strict=True):
        torch.testing.assert_close(*pair, rtol=0, atol=bound, equal_nan=True)


def largest(t):
    """The largest finite value."""
    return max(t[t.isfinite()].abs().tolist(), default=0.0)
