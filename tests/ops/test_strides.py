"""Strided parameters, saved tensors and convolutions; ``tests/test_contract.py`` has strided arguments of every op."""

import pytest
import torch

import fusedseg
from fusedseg.activation import Activation
from fusedseg.ops.conv import conv_abn
from fusedseg.ops.conv.geometry import Geometry
from fusedseg.ops.conv.sources import Convolution
from fusedseg.ops.norm import eager as norm
from fusedseg.ops.norm.call import Norm, Operands
from tests.contract import MODULES
from tests.tools.tensors import WAYS, with_strides

SHAPE, DTYPE = (2, 4, 5, 6), torch.float64
ACT = Activation("leaky_relu", 0.01)


@pytest.mark.parametrize("rows", [False, True], ids=["planes", "rows"])
@pytest.mark.parametrize("keep", ["output", "input"])
def test_vectors_of_a_norm_in_eager_mode(backend, device, keep, rows):
    """Parameters and statistics may be strided, as columns of a matrix are.  The statistics are written there, too.

    aten's batch norm of channels_last reads strided vectors as if their elements were adjacent.
    """
    x = torch.randn(SHAPE, dtype=DTYPE, device=device)
    x = x.contiguous(memory_format=torch.channels_last) if rows else x
    values = [torch.rand(SHAPE[1], dtype=DTYPE, device=device) + 0.5 for _ in range(4)]
    results = []
    for way in ("sliced", None):
        weight, bias, mean, var = (v.clone() if way is None else with_strides(v, way) for v in values)
        leaves = [t.clone().requires_grad_() if t is x else t.requires_grad_() for t in (x, weight, bias)]
        passed = Operands(leaves[0] * 1, *leaves[1:], running_mean=mean, running_var=var)
        z = norm.normalise(passed, Norm(keep, ACT, momentum=0.1))
        results.append([z, *torch.autograd.grad(z.square().sum(), leaves), mean, var])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", [name for name in MODULES if name == "InPlaceABN" or "Norm" in name])
def test_saved_tensors_whose_strides_hooks_change(backend, device, name, residual):
    """``save_on_cpu(pin_memory=True)`` makes channels_last tensors contiguous.

    The output of in-place modules was then read in the order of its old strides, which gave wrong gradients.
    """
    module = MODULES[name]().to(device, DTYPE)
    x, r, dz = (torch.randn(SHAPE, dtype=DTYPE, device=device).to(memory_format=torch.channels_last) for _ in range(3))
    found = []
    for pack in (lambda t: t, lambda t: t.clone(memory_format=torch.contiguous_format)):
        leaves = [x.clone().requires_grad_(), *module.parameters()]
        added = [r.clone().requires_grad_()] if residual else []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            z = module(leaves[0] * 1, *added)
        found.append(torch.autograd.grad(z, leaves + added, dz))
    for plain, hooked in zip(*found, strict=True):
        torch.testing.assert_close(hooked, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_conv(backend, device, way):
    x = with_strides(torch.randn(SHAPE, dtype=torch.float32, device=device), way)
    w = torch.randn(3, SHAPE[1], 3, 3, device=device)
    w = w if way == "expanded" else with_strides(w, way)
    weight, bias = (with_strides(torch.rand(3, device=device) + 0.5, "sliced") for _ in range(2))
    call = Convolution((x,), w, None, Geometry((1, 1), (1, 1), (1, 1), 1), backend)
    passed, spec = Operands(w, weight, bias), Norm("output", ACT)
    plain = Convolution((x.contiguous(),), w.contiguous(), None, call.geometry, backend)
    plain_norm = Operands(w, weight.contiguous(), bias.contiguous())
    found = conv_abn._forward(call, passed, spec, None)
    expected = conv_abn._forward(plain, plain_norm, spec, None)
    for mine, theirs in ((found[0], expected[0]), (found[1].rstd, expected[1].rstd)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_compiler_keeps_the_strides_of_every_op():
    """Inductor must hand over the strides that it has traced, because fakes announce strides of results by them."""
    from torch._library.utils import get_layout_constraint_tag

    for name in ("max_pool", "max_pool_backward", "max_pool_pick"):
        op = getattr(torch.ops.fusedseg, name).default
        assert get_layout_constraint_tag(op) == torch.Tag.needs_exact_strides, name


def test_an_empty_tensor_has_a_layout_whatever_its_strides():
    """PyTorch calls it contiguous; a max-pool of an empty batch raised an AssertionError in the scope."""
    x = torch.empty(0, 4, 8, 8).permute(0, 1, 3, 2)
    assert x.is_contiguous()
    assert fusedseg.functional.max_pool(x.requires_grad_(), 2).shape == (0, 4, 4, 4)
