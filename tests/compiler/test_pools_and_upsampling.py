"""The interpolations of a graph for Inductor."""

import pytest
import torch
from torch.nn import functional as F

import fusedseg
from fusedseg import _torch
from fusedseg.compiler.capture import pools_and_upsampling
from fusedseg.compiler.codegen.aten import emit
from tests.compiler.test_passes import names

MODES = [("nearest", 1), ("linear", 1), ("nearest", 2), ("bilinear", 2), ("bicubic", 2), ("nearest", 3)]


def graphs_of(net, *inputs, dynamic=False):
    """The names in each graph of a network, whose interpolations are rewritten as for Inductor.

    The gradients of its inputs are those of eager mode.
    """
    graphs = []

    def seen(module, inputs):
        graphs.append(names(module.graph))
        return emit(module, inputs)

    def backend(module, inputs):
        pools_and_upsampling.rewrite_for_inductor(module)
        parts = _torch.compiler_parts()
        return parts.aot_autograd(fw_compiler=seen, bw_compiler=seen)(module, inputs)

    torch._dynamo.reset()
    run = torch.compile(net, backend=backend, dynamic=dynamic)
    for x in inputs:
        found, wanted = (torch.autograd.grad(call(x).sum(), x)[0] for call in (run, net))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    return graphs


def image(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("mode", "dims"), [*MODES, ("trilinear", 3)])
def test_gradient_of_an_interpolation_is_one_call(mode, dims):
    """The compiler's own gradient is an ``index_put`` for each corner, which adds value by value.

    For several sizes Inductor's code raised an error of PyTorch's, because its kernels take no symbols.  The pass does
    not read the mode for it.
    """

    def net(x):
        return F.interpolate(x, scale_factor=2.0, mode=mode).sin()

    small, large = (image(2, 3, *[size] * dims) for size in (5, 7))
    *_, backward = graphs_of(net, small)
    assert not [name for name in backward if "index_put" in name]
    assert sum("upsample" in name for name in backward) == 1
    if (mode, dims) in (("nearest", 2), ("trilinear", 3)):
        graphs_of(net, small, large, dynamic=True)


@pytest.mark.parametrize("of_each_axis", [False, True])
def test_a_factor_that_follows_sizes(of_each_axis):
    """It is a node of the graph, and the op takes numbers, so PyTorch's interpolation stays."""

    def net(x):
        factor = x.shape[-1] / 5
        return F.interpolate(x, scale_factor=(factor, 2.0) if of_each_axis else factor).sin()

    graphs_of(net, image(1, 2, 7, 7), dynamic=True)


def test_kernels_serve_both_directions(monkeypatch, needs_interpreter):
    """Where Triton serves a tensor, a linear interpolation is the op of this package, in forward too."""
    monkeypatch.setattr(fusedseg, "backend", "triton")

    def net(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear").sin()

    assert [name for graph in graphs_of(net, image(1, 2, 3, 2)) for name in graph if "interpolate" in name] == [
        "fusedseg.interpolate.default",
        "fusedseg.interpolate_backward.default",
    ]
