"""A 1x1 convolution of an interpolated tensor: the graph before and after the pass, and its gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

from fusedseg import _torch
from fusedseg.compiler import enlarged
from fusedseg.compiler.emit import emit
from tests.compiler.test_passes import names, traced


class Up(nn.Module):
    def __init__(self, dims=2, mode="bilinear", channels=2, kernel=1):
        super().__init__()
        self.mode, self.dims = mode, dims
        self.weight = nn.Parameter(torch.randn(channels, 3, *(kernel,) * dims))
        self.bias = nn.Parameter(torch.randn(channels))

    def forward(self, x):
        up = F.interpolate(x, scale_factor=2, mode=self.mode)
        return (torch.conv1d, torch.conv2d, torch.conv3d)[self.dims - 1](up, self.weight, self.bias)


def rewritten(net):
    module = symbolic_trace(copy.deepcopy(net))
    return module, enlarged.rewrite(module)


def gradients(net, x):
    x = x.clone().requires_grad_()
    out = net(x)
    return out, *torch.autograd.grad(out.square().sum(), [x, *net.parameters()])


MODES = [("nearest", 1), ("linear", 1), ("nearest", 2), ("bilinear", 2), ("bicubic", 2), ("nearest", 3)]


@pytest.mark.parametrize(("mode", "dims"), [*MODES, ("trilinear", 3)])
def test_gradients_are_those_of_float64(mode, dims):
    """The formula holds to the last digits in float64, and in float32 as exactly as the stock way."""
    torch.manual_seed(0)
    net, x = Up(dims, mode).double(), torch.randn(2, 3, *(5,) * dims, dtype=torch.float64)
    module, count = rewritten(net)
    assert count == 1
    for found, wanted in zip(gradients(module, x), gradients(net, x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    for found, wanted in zip(gradients(module.float(), x.float()), gradients(net, x), strict=True):
        # Sums of a few hundred products.
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


def test_graph_before_and_after():
    """Backward interpolates the gradient, and convolves at the small size."""
    net, x = Up(), torch.randn(2, 3, 5, 5)

    def step(model):
        def run(x, *parameters):
            out = torch.func.functional_call(model, dict(zip(("weight", "bias"), parameters, strict=True)), x)
            return torch.autograd.grad(out.sum(), [x, *parameters])

        return traced(run, x.requires_grad_(), *(p.detach().requires_grad_() for p in net.parameters())).graph

    def sizes(graph):
        """The sizes of the input and the gradient that the backward of the convolution reads."""
        (node,) = (node for node in graph.nodes if "convolution_backward" in str(node.target))
        return [tuple(source.meta["val"].shape[2:]) for source in node.args[:2]]

    before, after = step(symbolic_trace(net)), step(rewritten(net)[0])
    assert sizes(before) == [(10, 10), (10, 10)]
    assert sizes(after) == [(5, 5), (5, 5)]
    assert "upsample_bilinear2d_backward" in names(after)


@pytest.mark.parametrize(("mode", "dims"), [*MODES, ("trilinear", 3)])
def test_gradient_of_an_interpolation_is_one_call(mode, dims):
    """The compiler's own gradient is an ``index_put`` for each corner, which adds value by value."""

    class Net(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=2, mode=mode).sin()

    graphs = []

    def seen(module, inputs):
        graphs.append(module)
        return emit(module, inputs)

    def backend(module, inputs):
        assert enlarged.rewrite(module) == 0
        parts = _torch.compiler_parts()
        compiler = parts.aot_autograd(fw_compiler=seen, bw_compiler=seen)
        return compiler(module, inputs)

    net = Net()
    x = torch.randn(2, 3, *(5,) * dims, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(torch.compile(net, backend=backend)(x).sum(), x)
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    called = names(graphs[-1].graph)
    assert not [name for name in called if "index_put" in name]
    assert sum("upsample" in name for name in called) == 1


@pytest.mark.parametrize("net", [Up(channels=4), Up(kernel=3)], ids=["more channels", "3x3"])
def test_others_stay(net):
    """With more channels the interpolated gradient would be larger than the input, and 3x3 does not commute."""
    x = torch.randn(2, 3, 5, 5)
    for found, wanted in zip(gradients(rewritten(net)[0], x), gradients(net, x), strict=True):
        assert torch.equal(found, wanted)


def test_a_small_tensor_that_is_written_over():
    class Net(Up):
        def forward(self, x):
            x = torch.sin(x)
            up = F.interpolate(x, scale_factor=2)
            x.mul_(2)
            return torch.conv2d(up, self.weight)

    assert rewritten(Net())[1] == 0
