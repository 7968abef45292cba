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


def seeing_backend():
    """A backend that rewrites interpolations as for Inductor, and the names in each graph that it compiles."""
    graphs = []

    def seen(module, inputs):
        graphs.append(names(module.graph))
        return emit(module, inputs)

    def backend(module, inputs):
        pools_and_upsampling.rewrite_for_inductor(module)
        parts = _torch.compiler_parts()
        return parts.aot_autograd(fw_compiler=seen, bw_compiler=seen)(module, inputs)

    return backend, graphs


@pytest.mark.parametrize(("mode", "dims"), [*MODES, ("trilinear", 3)])
def test_gradient_of_an_interpolation_is_one_call(mode, dims):
    """The compiler's own gradient is an ``index_put`` for each corner, which adds value by value.

    For several sizes Inductor's code raised an error of PyTorch's, because its kernels take no symbols.  The pass does
    not read the mode for it.
    """

    def net(x):
        return F.interpolate(x, scale_factor=2.0, mode=mode).sin()

    for sizes in ((5,), *([(5, 7)] if (mode, dims) in (("nearest", 2), ("trilinear", 3)) else [])):
        torch._dynamo.reset()
        backend, graphs = seeing_backend()
        run = torch.compile(net, backend=backend, dynamic=len(sizes) > 1)
        for size in sizes:
            x = torch.randn(2, 3, *(size,) * dims, dtype=torch.float64, requires_grad=True)
            (found,) = torch.autograd.grad(run(x).sum(), x)
            (wanted,) = torch.autograd.grad(net(x).sum(), x)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        if len(sizes) == 1:
            assert not [name for name in graphs[-1] if "index_put" in name]
            assert sum("upsample" in name for name in graphs[-1]) == 1


@pytest.mark.parametrize("of_each_axis", [False, True])
def test_a_factor_that_follows_sizes(of_each_axis):
    """It is a node of the graph, and the op takes numbers, so PyTorch's interpolation stays."""

    def net(x):
        factor = x.shape[-1] / 5
        return F.interpolate(x, scale_factor=(factor, 2.0) if of_each_axis else factor).sin()

    backend, _ = seeing_backend()
    x = torch.randn(1, 2, 7, 7, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(torch.compile(net, backend=backend, dynamic=True)(x).sum(), x)
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_kernels_serve_both_directions(monkeypatch, needs_interpreter):
    """Where Triton serves a tensor, a linear interpolation is the op of this package, in forward too."""
    monkeypatch.setattr(fusedseg, "backend", "triton")
    backend, graphs = seeing_backend()

    def net(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear").sin()

    x = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(torch.compile(net, backend=backend)(x).sum(), x)
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert [name for graph in graphs for name in graph if "interpolate" in name] == [
        "fusedseg.interpolate.default",
        "fusedseg.interpolate_backward.default",
    ]
