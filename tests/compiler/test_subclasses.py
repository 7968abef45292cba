"""Inputs of a subclass of torch.Tensor, such as MONAI's MetaTensor, train as plain tensors do."""

import copy
import sys
import types

import pytest
import torch
from torch import nn

from fusedseg import _torch
from fusedseg.compiler import report
from tests.compiler.networks import compiled, make, results, same


class Named(torch.Tensor):
    """Its calls return tensors of this class, as those of a subclass without a ``__torch_function__`` do."""


class Image(torch.Tensor):
    """Its calls return plain tensors, as those of torchvision's Image do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with _torch.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class MetaTensor(torch.Tensor):
    """Its calls copy attributes, which Dynamo cannot trace, as those of MONAI's MetaTensor do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs)
        if isinstance(made, cls):
            made.__dict__ = dict(next(x.__dict__ for x in _torch.tree_leaves(args) if isinstance(x, cls)))
        return made


@pytest.fixture
def meta_tensor(monkeypatch):
    """The class of a fresh stand-in for MONAI."""
    made = types.ModuleType("a stand-in")
    made.MetaTensor = type(
        "MetaTensor", (MetaTensor,), {"__torch_function__": MetaTensor.__dict__["__torch_function__"]}
    )
    monkeypatch.setitem(sys.modules, "monai.data.meta_tensor", made)
    return made.MetaTensor


@pytest.mark.parametrize("kind", [Named, Image])
def test_a_subclass_trains(kind, codegen):
    """AOTAutograd raised "Multiple dispatch failed for aten.convolution"."""
    net, (x,) = make("U-Net")
    stock = copy.deepcopy(net)
    found = results(net, compiled(net, codegen), [x.as_subclass(kind)])
    torch.testing.assert_close([t.as_subclass(torch.Tensor) for t in found], results(stock, stock, [x]))


def test_a_meta_tensor_is_one_graph_of_plain_tensors(meta_tensor):
    """Dynamo ended a graph at each call, as it cannot trace a copy of ``__dict__``."""
    net, (x,) = make("U-Net")
    stock = copy.deepcopy(net)
    run = compiled(net)
    given = x.as_subclass(meta_tensor)
    given.origin = "a.nii"
    assert same(results(net, run, [given]), results(stock, stock, [x]))
    assert type(run(given)) is torch.Tensor
    assert len(report(run).graphs) == 1
    # Nothing changes in eager mode.
    assert (type(stock(given)), stock(given).origin) == (meta_tensor, "a.nii")


def test_gradients_and_writes_reach_the_input(meta_tensor):
    class Halves(nn.Module):
        def forward(self, x, y):
            y.mul_(0.5)
            return (x * y).sum()

    run = compiled(Halves())
    x, y = torch.ones(3).as_subclass(meta_tensor).requires_grad_(), torch.ones(3).as_subclass(meta_tensor)
    run(x, y).backward()
    assert x.grad.tolist() == y.tolist() == [0.5] * 3


def test_several_sizes(meta_tensor):
    """A tensor without values of another shape environment would not know the symbols of the graph."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1))
    run = compiled(net)
    for size in (16, 24, 32, 40):
        x = torch.randn(2, 3, 16, size)
        assert torch.equal(run(x.as_subclass(meta_tensor)), net(x))
    assert len(report(run).graphs) == 2
