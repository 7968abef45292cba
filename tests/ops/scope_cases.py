"""Functions that run a program without and with the recompute scope."""

import functools
import inspect
from contextlib import nullcontext

import torch
from torch import nn

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


def same_in_the_scope(program):
    """Makes ``program(scope, ...)`` a test: the tensors that it returns are the same without and with the scope."""

    @functools.wraps(program)
    def test(**given):
        assert_same(functools.partial(program, **given))

    signature = inspect.signature(program)
    others = [parameter for name, parameter in signature.parameters.items() if name != "scope"]
    test.__signature__ = signature.replace(parameters=others)
    return test


def leaves(*of):
    """The tensors among the arguments, and the parameters of the modules among them."""
    return [t for one in of for t in (one.parameters() if isinstance(one, nn.Module) else [one])]


def grads(*of):
    return [t.grad for t in leaves(*of)]


def assert_same_gradients(fn, *of):
    """Asserts that the scope does not change the output of ``fn()``, nor its gradients."""

    def program(scope):
        with scope():
            out = fn()
        return [out.detach(), *torch.autograd.grad(out.square().mean(), leaves(*of))]

    assert_same(program)
