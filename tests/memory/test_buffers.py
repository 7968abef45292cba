"""The peak of a graph that a compiler runs with fusion, against graphs whose buffers can be counted by hand."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fusedseg import _torch
from fusedseg.memory.buffers import Buffers

# The bytes of one value of these functions.
ONE = 8 * 16 * 16 * 4


def chain(x, w):
    """The products are buffers; the first activation is written over its product, the second one over nothing."""
    y = F.conv2d(x, w, padding=1)
    return F.conv2d((y * 2).sigmoid(), w, padding=1)


def twice(x, w):
    """The first product is read again after the second one, so the activation needs a buffer of its own."""
    y = F.conv2d(x, w, padding=1)
    return F.conv2d(y.sigmoid(), w, padding=1) + y


def joined(x, w):
    """The activation is written into the concatenation."""
    y = F.conv2d(x, w, padding=1)
    return torch.cat([y.sigmoid(), y], 1)


def summed(x, w):
    """A sum frees what it reads, and takes nothing."""
    y = F.conv2d(x, w, padding=1).sigmoid().sum((2, 3), keepdim=True)
    return F.conv2d(x * y, w, padding=1)


def unread(x, w):
    """A result that nobody reads, here the positions, is freed at once, and views are no buffers."""
    y = F.max_pool2d(F.conv2d(x, w, padding=1), 2)
    return F.conv2d(y.view(1, 8, 8, 8), w, padding=1)


def graph_of(function):
    with FakeTensorMode():
        return make_fx(function)(torch.empty(1, 8, 16, 16), torch.empty(8, 8, 3, 3)).graph


@pytest.mark.parametrize(
    ("function", "most"),
    [(chain, 2 * ONE), (twice, 3 * ONE), (joined, 3 * ONE), (summed, 2 * ONE), (unread, ONE + ONE // 4 * 3)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_peak(function, most):
    found = Buffers(graph_of(function), _torch.partitioner().op_list().is_fusible).peak()
    assert found == most


def test_inputs_that_are_counted_live_until_their_last_use():
    graph = graph_of(chain)
    x, w = (node for node in graph.nodes if node.op == "placeholder")
    buffers = Buffers(graph, _torch.partitioner().op_list().is_fusible)
    assert buffers.peak([w]) == 2 * ONE + 8 * 8 * 9 * 4
    # x is freed before the second product.
    assert buffers.peak([x]) == 2 * ONE
