"""Compares the value and the gradient of two losses."""

import torch


def check_same(ours, expected, x, tolerance=1e-12):
    """``ours`` and ``expected`` are a function of the logits, and its arguments after the logits.

    The tolerance is relative to the largest value of the gradient.
    """
    values, grads = [], []
    for loss, *arguments in (ours, expected):
        leaf = x.detach().clone().requires_grad_()
        value = loss(leaf, *arguments)
        grads.append(torch.autograd.grad(value.sum(), leaf)[0])
        values.append(value.detach())
    assert values[0].shape == values[1].shape
    assert (values[0] - values[1]).abs().max() <= tolerance * max(1.0, values[1].abs().max().item())
    assert (grads[0] - grads[1]).abs().max() <= tolerance * grads[1].abs().max()
