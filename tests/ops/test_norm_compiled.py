"""Norms of this package in compiled code: their ops, and the kept tensors.

``tests/test_contract.py`` compares a compiled network of all modules with eager mode.
"""

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg.memory import SavedBytes
from tests.tools.tensors import channels_last

NORMS = {
    "in place": lambda: fusedseg.InPlaceABN(4),
    "in place, instance": lambda: fusedseg.InPlaceInstanceNormAct(4, affine=True, track_running_stats=True),
    "in place, group": lambda: fusedseg.InPlaceGroupNormAct(2, 4),
    "exact": lambda: fusedseg.BatchNormAct(4, activation="gelu"),
    "prelu": lambda: fusedseg.BatchNormAct(4, activation="prelu", num_slopes=4),
    "instance": lambda: fusedseg.InstanceNormAct(4, activation="relu"),
    "group": lambda: fusedseg.GroupNormAct(2, 4, activation="silu"),
}
IN_PLACE = [name for name in NORMS if name.startswith("in place")]
PAIR = {"fusedseg.norm.default", "fusedseg.norm_backward.default"}
compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
pytestmark = pytest.mark.usefixtures("compiled_afresh")


class Block(nn.Module):
    """Two convolutions with one norm that is used twice, the second time with a residual."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.norm = norm

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last(self.norm(self.second(h), h))


def graphs_of(seen, run):
    """Compiles ``run``, puts the ops of its graphs into the list ``seen``, and returns the compiled function."""

    def look(graph, example):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return torch.compile(run, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)


def after_convolutions(names):
    """A norm of each name, each after a convolution."""
    return nn.Sequential(*(layer for name in names for layer in (nn.Conv2d(4, 4, 3, padding=1), NORMS[name]())))


def test_ops():
    """A norm that keeps its output is a pair of ops; one that keeps its input is stock functions, which are fused."""
    ops: list[str] = []
    graphs_of(ops, after_convolutions(NORMS))(torch.randn(2, 4, 3, 5)).square().mean().backward()
    assert Counter(op for op in ops if "fusedseg" in op) == {op: len(IN_PLACE) for op in PAIR}


def test_conv_abn_is_a_stock_convolution_and_the_op_of_the_norm():
    """So is a concatenation before it; the bias of the convolution has a gradient in both."""
    net = fusedseg.ConvABN2d(4, 3, 3).double()
    ops: list[str] = []
    run, x = graphs_of(ops, net), torch.randn(2, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    for given in (x, [x[:, :1], x[:, 1:]]):
        grads = torch.autograd.grad(run(given).square().mean(), [x, *net.parameters()])
        y = F.batch_norm(net.conv(x), None, None, net.norm.weight, net.norm.bias, True)
        expected = torch.autograd.grad(F.leaky_relu(y).square().mean(), [x, *net.parameters()])
        torch.testing.assert_close(grads, expected)
    assert {op for op in ops if "fusedseg" in op} == PAIR


def test_keeps_one_tensor_for_each_norm():
    """On a backend that runs the graph of aten ops as it is."""
    net, x = nn.Sequential(after_convolutions(IN_PLACE), nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 32, 32)
    run = compiled(net)
    run(x)
    with SavedBytes([*net.parameters(), *net.buffers(), x]) as saved:
        out = run(x)
    assert out.requires_grad
    assert saved.nbytes <= len(IN_PLACE) * x.nbytes + 2048


def test_checkpoint_keeps_no_output():
    """Labels of a checkpoint stay: only its input is kept."""
    net, x = nn.Sequential(nn.Conv2d(4, 4, 1), fusedseg.InPlaceABN(4)), torch.randn(2, 4, 16, 16, requires_grad=True)
    head = nn.Conv2d(4, 4, 1)

    def run(x):
        return head(checkpoint(lambda x: net[1](net[0](net(x))), x, use_reentrant=False))

    call = compiled(run)
    with SavedBytes([*net.parameters(), *net.buffers(), *head.parameters(), x]) as saved:
        call(x)
    # The input of the last convolution is rebuilt, too.
    assert saved.nbytes <= 1024


# Kinds of statistics differ in the arguments of the op alone, and other norms are stock functions.
def test_autocast_and_sizes():
    """In channels_last, with one graph for all sizes."""
    net = Block(NORMS[IN_PLACE[0]]())
    twin = copy.deepcopy(net)
    run = compiled(net, dynamic=True)
    for size in (8, 11):
        x, found = channels_last(torch.randn(3, 2, size, size - 1)), []
        for model, call in ((net, run), (twin, twin)):
            with torch.autocast("cpu", torch.bfloat16), torch._dynamo.config.patch(error_on_recompile=size == 11):
                out = call(x)
            found.append((out, *torch.autograd.grad(out.float().square().mean(), [*model.parameters()])))
        assert found[0][0].dtype == torch.bfloat16
        assert found[0][0].stride() == found[1][0].stride()
        torch.testing.assert_close(*found, rtol=0.05, atol=0.02)
