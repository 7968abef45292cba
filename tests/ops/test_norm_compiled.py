"""Norms of this package in compiled code: their ops, the values of the stock modules, and the kept tensors."""

import copy
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

INSTANCE = {"affine": True, "track_running_stats": True}
# For each case our norm, its stock norm, and the activation after it.
NORMS = {
    "in place": (lambda: fusedseg.InPlaceABN(4), lambda: nn.BatchNorm2d(4), nn.LeakyReLU(0.01)),
    "in place, elu": (lambda: fusedseg.InPlaceABN(4, activation="elu", activation_param=1.0),
                      lambda: nn.BatchNorm2d(4), nn.ELU()),
    "in place, instance": (lambda: fusedseg.InPlaceInstanceNormAct(4, **INSTANCE),
                           lambda: nn.InstanceNorm2d(4, **INSTANCE), nn.LeakyReLU(0.01)),
    "in place, group": (lambda: fusedseg.InPlaceGroupNormAct(2, 4), lambda: nn.GroupNorm(2, 4), nn.LeakyReLU(0.01)),
    "exact": (lambda: fusedseg.BatchNormAct(4, activation="gelu"), lambda: nn.BatchNorm2d(4), nn.GELU()),
    "prelu": (lambda: fusedseg.BatchNormAct(4, activation="prelu", num_slopes=4), lambda: nn.BatchNorm2d(4),
              nn.PReLU(4)),
    "instance": (lambda: fusedseg.InstanceNormAct(4, activation="relu"), lambda: nn.InstanceNorm2d(4), nn.ReLU()),
    "group": (lambda: fusedseg.GroupNormAct(2, 4, activation="silu"), lambda: nn.GroupNorm(2, 4), nn.SiLU()),
}  # fmt: skip
compiled = partial(torch.compile, backend="aot_eager", fullgraph=True)
IN_PLACE = [name for name in NORMS if name.startswith("in place")]


class Block(nn.Module):
    """Two convolutions with one norm that is used twice, the second time with a residual."""

    def __init__(self, norm, act=None):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.norm, self.act = norm, act

    def forward(self, x):
        if self.act is None:
            h = self.norm(self.first(x))
            return self.last(self.norm(self.second(h), h))
        h = self.act(self.norm(self.first(x)))
        return self.last(self.act(self.norm(self.second(h)) + h))


@pytest.fixture(autouse=True)
def afresh():
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=False):
        yield
    torch._dynamo.reset()


def pair(name, dtype=torch.float64):
    """Our block and its stock twin, with the same random parameters."""
    ours, stock, act = NORMS[name]
    mine, theirs = Block(ours()).to(dtype), Block(stock(), copy.deepcopy(act)).to(dtype)
    for p in mine.parameters():
        nn.init.uniform_(p.data, 0.3, 1.0)
    state = mine.state_dict()
    if "norm.slope" in state:
        state["act.weight"] = state.pop("norm.slope")
    theirs.load_state_dict(state)
    return mine, theirs


def results(net, run, x):
    x = x.clone().requires_grad_()
    out = run(x)
    named = {name.replace("act.weight", "norm.slope"): p for name, p in net.named_parameters()}
    grads = torch.autograd.grad(out.square().mean(), [x, *named.values()])
    return out.detach(), dict(zip(["x", *named], grads, strict=True)), dict(net.named_buffers())


def graphs_of(seen, run):
    """Compiles ``run``, puts the ops of its graphs into ``seen``, and returns the compiled function."""

    def look(graph, example):
        seen.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    return torch.compile(run, backend=aot_autograd(fw_compiler=look, bw_compiler=look), fullgraph=True)


@pytest.mark.parametrize("name", NORMS)
def test_values_of_stock_modules(name):
    """Two steps and eval mode: outputs, gradients and running statistics, which move once for each call.

    A norm that keeps its output is a pair of ops; one that keeps its input is stock functions, which a compiler fuses.
    """
    mine, theirs = pair(name)
    ops: set[str] = set()
    run, x = graphs_of(ops, mine), torch.randn(2, 2, 8, 7, dtype=torch.float64)
    for training in (True, True, False):
        torch.testing.assert_close(results(mine.train(training), run, x), results(theirs.train(training), theirs, x))
    assert ops
    pair_of_ops = {"fusedseg.norm.default", "fusedseg.norm_backward.default"}
    assert {op for op in ops if "fusedseg" in op} == (pair_of_ops if name in IN_PLACE else set())


@pytest.mark.parametrize(
    ("name", "weight"), [*((name, 0.0) for name in IN_PLACE), ("in place", 1e-9), ("in place", -1.0)]
)
def test_any_weight_trains_right(name, weight):
    """Channels that cannot be inverted are computed from the input of the norm."""
    mine, theirs = pair(name)
    for net in (mine, theirs):
        net.norm.weight.data[1] = weight
    x = torch.randn(2, 2, 8, 7, dtype=torch.float64)
    run = compiled(mine)
    torch.testing.assert_close(results(mine, run, x), results(theirs, theirs, x))


@pytest.mark.parametrize("name", ["in place", "in place, instance", "in place, group"])
def test_keeps_one_tensor_for_each_norm(name):
    """On a backend that runs the graph of aten ops as it is."""
    ours, _, _ = NORMS[name]
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), ours())]
    net, x = nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), torch.randn(2, 4, 32, 32)
    run = compiled(net)
    run(x)
    with SavedBytes([*net.parameters(), *net.buffers(), x]) as saved:
        out = run(x)
    assert out.requires_grad
    assert saved.nbytes <= 3 * x.nbytes + 2048


@pytest.mark.parametrize("name", ["in place", "in place, instance", "in place, group", "group"])
def test_autocast_and_channels_last(name):
    mine, _ = pair(name, torch.float32)
    twin = copy.deepcopy(mine)
    run = compiled(mine)
    x = channels_last(torch.randn(2, 2, 8, 7))
    found = []
    for net, call in ((mine, run), (twin, twin)):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        found.append((out, *torch.autograd.grad(out.float().square().mean(), [*net.parameters()])))
    assert found[0][0].dtype == torch.bfloat16
    assert found[0][0].stride() == found[1][0].stride()
    torch.testing.assert_close(*found, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["in place", "in place, group", "instance"])
def test_one_graph_for_all_sizes(name):
    mine, theirs = pair(name)
    run = compiled(mine, dynamic=True)
    for size in (8, 11):
        x = torch.randn(3, 2, size, size - 1, dtype=torch.float64)
        torch.testing.assert_close(results(mine, run, x), results(theirs, theirs, x))
        torch._dynamo.config.error_on_recompile = True


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


def test_conv_abn_is_a_stock_convolution_and_the_op_of_the_norm():
    """So is a concatenation before it; the bias of the convolution has a gradient in both."""
    net = fusedseg.ConvABN2d(4, 3, 3).double()
    ops: set[str] = set()
    run, x = graphs_of(ops, net), torch.randn(2, 4, 6, 5, dtype=torch.float64, requires_grad=True)
    for given in (x, [x[:, :1], x[:, 1:]]):
        grads = torch.autograd.grad(run(given).square().mean(), [x, *net.parameters()])
        y = F.batch_norm(net.conv(x), None, None, net.norm.weight, net.norm.bias, True)
        expected = torch.autograd.grad(F.leaky_relu(y).square().mean(), [x, *net.parameters()])
        torch.testing.assert_close(grads, expected)
    assert {op for op in ops if "fusedseg" in op} == {"fusedseg.norm.default", "fusedseg.norm_backward.default"}
