"""Ops as pointwise chains (``fusedseg/compiler/rewrite/branches.py``)."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusedseg import _torch
from fusedseg.activation import TABLE
from fusedseg.compiler.rewrite.branches import write_pointwise_chain


@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if not (row.identity or row.learned)])
def test_inductor_has_code_for_each_op_of_a_chain(name):
    """With PyTorch 2.13 and ``bits``, Inductor refused the gradient of Mish, whose chain had a softplus."""
    from torch._inductor.lowering import lowerings

    row = TABLE[name]
    p = row.parameter and (0.5 if row.parameter.default is None else row.parameter.default)

    def step(y, dz):
        y.requires_grad_()
        z = row.function(y, p)
        return z, *torch.autograd.grad(z, y, dz)

    y, dz = torch.randn(2, 4, 8)
    traced = make_fx(step, tracing_mode="fake")(y, dz)
    before = list(traced.graph.nodes)
    written = [
        write_pointwise_chain(traced.graph, node) for node in before if isinstance(node.target, _torch.OpOverload)
    ]
    assert any(written)
    assert {node.target for node in set(traced.graph.nodes).difference(before)} <= lowerings.keys()
    traced.recompile()
    torch.testing.assert_close(traced(y, dz), step(y, dz))
