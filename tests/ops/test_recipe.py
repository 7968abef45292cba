"""Recipes that the scope saves in place of tensors.  The tests define an op of their own that keeps its input."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fusedseg import recompute
from fusedseg.memory import SavedBytes
from fusedseg.ops import observer
from fusedseg.scope.saved import turns
from tests.ops.scope_cases import assert_equal, assert_same_gradients

SHAPE = (2, 4, 8, 8)
BYTES = 2 * 4 * 8 * 8 * 4


class Scaled(torch.autograd.Function):
    """silu(x * weight[c]); it keeps x for backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return rebuild(x, weight)

    @staticmethod
    def backward(ctx, dz):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            return torch.autograd.grad(rebuild(x, weight), (x, weight), dz)


def rebuild(x, weight):
    return F.silu(x * weight.view(-1, 1, 1))


class ScaledCall(observer.OpCall):
    def __init__(self, x, weight, again):
        self.x, self.weight, self.again = x, weight, again

    @property
    def inputs(self):
        return self.x, self.weight

    def run(self):
        return Scaled.apply(self.x, self.weight)

    def rebuild(self):
        return self.again


def scaled(x, weight, again=rebuild):
    return observer.observed(ScaledCall(x, weight, again))


@pytest.fixture
def made():
    conv = nn.Conv2d(4, 4, 3, padding=1)
    weight = torch.rand(4, requires_grad=True)
    return conv, weight, torch.randn(SHAPE)


def gradients(fn, made):
    """Returns the gradients of the parameters, and the saved bytes."""
    conv, weight, x = made
    with SavedBytes([*conv.parameters(), weight]) as saved:
        out = fn(conv, weight, x)
        kept = saved.nbytes
    return torch.autograd.grad(out.square().mean(), [*conv.parameters(), weight]), kept


def same(fn, made, bytes_fewer):
    """Asserts that the scope leaves the gradients identical, and saves the given number of tensors fewer."""
    plain, kept_plain = gradients(fn, made)
    inside, kept = gradients(recompute()(fn), made)
    assert_equal(inside, plain)
    # The scope keeps copies of the weight.
    assert abs(kept_plain - kept - bytes_fewer) <= 4 * 16


def test_the_consumer_of_an_offered_output_keeps_no_data(made):
    same(lambda conv, w, x: conv(scaled(conv(x), w)), made, BYTES)


def test_several_consumers_and_a_view(made):
    def fn(conv, w, x):
        z = scaled(conv(x), w)
        return conv(z) + conv(z.flip(0)) * z[:, :1].exp() + z[:, 1:3].transpose(1, 3).sigmoid().sum() + z.square()

    assert_same_gradients(lambda: fn(*made), *made[:2])
    assert gradients(recompute()(fn), made)[1] < gradients(fn, made)[1]


def test_recipes_of_recipes(made):
    same(lambda conv, w, x: conv(scaled(scaled(conv(x), w), w)), made, 2 * BYTES)


def test_a_scope_that_ended_and_none_at_all(made):
    conv, weight, x = made
    with recompute():
        z = scaled(conv(x), weight)
    assert observer.active() is None
    with SavedBytes([*conv.parameters(), weight]) as saved:
        out = conv(z)
    assert saved.nbytes == BYTES
    del out


@pytest.mark.parametrize("how", ["exp_", "view", "data", "no_grad"])
def test_modified_output_is_saved_as_data(made, how):
    def fn(conv, w, x):
        z = scaled(conv(x), w)
        if how == "exp_":
            z.exp_()
        elif how == "view":
            z[:, :2].mul_(2)
        elif how == "no_grad":
            with torch.no_grad():
                z.mul_(2)
        else:
            z = z.data
            z.mul_(2)
        return conv(z) * w.sum()

    same(fn, made, 0)


def test_stock_functions_take_it_on(made):
    same(lambda conv, w, x: conv(scaled(conv(x), w).add_(1)), made, BYTES)


def test_reused_memory_is_not_mistaken(made):
    """The allocator returns the address of a freed tensor at once; the scope must not mistake the new tensor for it."""

    def fn(conv, w, x):
        z = scaled(conv(x), w)
        address = z.data_ptr()
        del z
        others = [conv(x) for _ in range(8)]
        fn.hit = any(other.data_ptr() == address for other in others)
        return sum(conv(other) for other in others) * w.sum()

    same(fn, made, 0)


def test_what_the_graph_no_longer_keeps_is_no_source(made):
    def fn(conv, w, x):
        # The graph that keeps the input of `scaled` is freed here.
        z = scaled(conv(x), w).detach()
        return conv(z) * w.sum()

    same(fn, made, 0)


def test_an_optimizer_may_change_the_weight_before_backward(made):
    """Eager mode keeps the data, so a change of the weight does not matter on a path without the op."""

    def fn(conv, w, x):
        z = scaled(conv(x), w)
        fn.graph = z
        out = conv(z.detach()) * w.detach().sum()
        with torch.no_grad():
            w.mul_(2)
        return out

    conv, weight, x = made
    value = weight.detach().clone()
    results = []
    for scope in (fn, recompute()(fn)):
        with torch.no_grad():
            weight.copy_(value)
        results.append(torch.autograd.grad(scope(conv, weight, x).square().mean(), conv.parameters()))
    assert_equal(*results)


def test_modified_source_raises_as_in_eager(made):
    conv, weight, x = made
    for scope in (nullcontext(), recompute()):
        with scope:
            y = conv(x)
            out = conv(scaled(y, weight))
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_nothing_is_left_behind(made):
    conv, weight, x = made
    gc.collect()
    gc.disable()
    try:
        with recompute():
            z = scaled(conv(x), weight)
            out = conv(z)
        memory = [weakref.ref(z.untyped_storage()), weakref.ref(z.grad_fn.saved_tensors[0].untyped_storage())]
        del z
        assert memory[0]() is None
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        assert memory[1]() is None
        # This graph never runs backward.
        with recompute():
            out = conv(scaled(conv(x), weight))
        memory = weakref.ref(out.untyped_storage())
        del out
        assert memory() is None
    finally:
        gc.enable()


def test_rebuilt_once_for_neighbours(made):
    calls = []

    def counted(x, weight):
        calls.append(1)
        return rebuild(x, weight)

    def fn(conv, w, x):
        z = scaled(conv(x), w, counted)
        return conv(z) + conv(z)

    out = recompute()(fn)(*made)
    for _ in range(2):
        calls.clear()
        out.sum().backward(retain_graph=True)
        assert len(calls) == 1


@pytest.mark.parametrize("part", [lambda w: w[1], lambda w: w[:, 0]], ids=["offset", "strided"])
def test_small_inputs_that_are_parts_of_larger_memory(made, part):
    """Regression: the copy of a small input was read with the offset and strides of the part of the larger memory."""
    conv, _, x = made
    weight = part(torch.rand(4, 4) + 0.5)
    assert_same_gradients(lambda: conv(scaled(conv(x), weight)), conv)


@pytest.mark.parametrize(
    ("needs", "overwrites", "order", "most"),
    [
        # Data takes no memory of its own.
        ([0, 0], False, [0, 1], 1),
        ([1, 0], True, [0, 1], 1),
        ([1, 0], False, [0, 1], 2),
        # The first result lies beside the second input.
        ([1, 3, 0], True, [1, 0, 2], 3),
        ([2, 2], True, [0, 1], 3),
        ([1, 1], False, [0, 1], 3),
    ],
)
def test_the_input_that_needs_most_is_rebuilt_first(needs, overwrites, order, most):
    assert turns(needs, overwrites) == (order, most)


def test_a_value_that_was_saved_keeps_a_recipe_of_its_own(made):
    """A later call that overwrites the memory does not change how the value is rebuilt."""
    conv, _, x = made
    norm = nn.BatchNorm2d(4)

    def fn():
        z = norm(conv(x))
        saved = conv(z * 2)
        z.relu_()
        return conv(z) + saved

    assert_same_gradients(fn, conv, norm)
