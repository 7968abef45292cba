"""Functions that run a program without and with the recompute scope."""

from contextlib import nullcontext

import torch

from fusedseg import recompute


def both(program):
    """Runs ``program(scope)``, which returns tensors, from the same random state without and with the scope."""
    results = []
    for scope in (nullcontext, recompute):
        torch.manual_seed(0)
        results.append(program(scope))
    return results


def assert_equal(got, expected):
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        assert torch.equal(g, e)


def assert_same(program):
    assert_equal(*reversed(both(program)))


def grads(*tensors):
    return [t.grad for t in tensors]
