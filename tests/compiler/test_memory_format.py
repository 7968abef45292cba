"""The option ``memory_format``: no copy from channels_last to contiguous planes, or back, in a training step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg._torch import FakeTensorMode
from fusedseg.compiler.capture import norms
from fusedseg.ops.avg_pool import avg_pool3d
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import flat, norm_act
from tests.compiler.fake_step import _bare, _Graphs
from tests.compiler.networks import compiled
from tests.nnunet import PlainConvUNet
from tests.tools.copies import ROWS, Copies, Deep
from tests.tools.traffic import traffic


def inputs_of(net):
    torch.manual_seed(0)
    return net().to(memory_format=ROWS), torch.randn(2, 1, 16, 16, 16)


def narrow():
    return PlainConvUNet(widths=(8, 16, 32))


@pytest.mark.parametrize(("net", "stock"), [(narrow, 43), (Deep, 25)])
def test_a_step_makes_no_layout_copy(monkeypatch, two_threads, net, stock):
    """Stock instance norm copies to planes and back, in forward and in backward."""
    with FakeTensorMode(), Copies() as of_stock:
        model = net()
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if p.dim() == 5:
                    # A fake module's ``to`` cannot exchange its parameters.
                    module._parameters[name] = nn.Parameter(p.detach().contiguous(memory_format=ROWS))
        del of_stock.found[:]
        mean_of(model(torch.randn(2, 1, 16, 16, 16))).backward()
    assert len(of_stock.found) == stock

    model, x = inputs_of(net)
    graphs = _Graphs(model, (x,), memory_format=ROWS)
    # With a CUDA build PyTorch says how a GPU's convolutions lay their results out.
    for device in ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",):
        with FakeTensorMode(), torch.no_grad(), Copies() as ours:
            (given, forward), (read, backward) = graphs.made
            kept = forward([_bare(node).to(device) for node in given])[graphs.outputs :]
            backward([*kept, *(_bare(node).to(device) for node in read if "tangents" in node.name)])
        assert ours.found == [], device


def mean_of(outputs):
    return sum(y.square().mean() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_norms_equal_those_of_planes(groups, affine):
    torch.manual_seed(0)
    x, g = torch.randn(2, 2, 4, 3, 4, 5, dtype=torch.float64)
    parameters = tuple(torch.randn(2, 4, dtype=torch.float64)) if affine else (None, None)
    stock = [x.clone().requires_grad_(), *(p if p is None else p.clone().requires_grad_() for p in parameters)]
    y = F.instance_norm(stock[0], None, None, *stock[1:]) if groups == 4 else F.group_norm(stock[0], 2, *stock[1:])
    y.backward(g)
    given = [x.contiguous(memory_format=ROWS).requires_grad_()]
    given += [p if p is None else p.clone().requires_grad_() for p in parameters]
    spec = Norm("input", norms.IDENTITY, kind="instance" if groups == 4 else "group", groups=groups)
    z, *_ = norm_act(*given, None, None, None, None, None, *flat(spec))
    z.backward(g.contiguous(memory_format=ROWS))
    assert z.is_contiguous(memory_format=ROWS)
    torch.testing.assert_close(z, y)
    for mine, own in zip(given, stock, strict=True):
        if own is not None:
            torch.testing.assert_close(mine.grad, own.grad)
    assert given[0].grad.is_contiguous(memory_format=ROWS)


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"budget": 0.3}], ids=["exact", "8 bits", "budget"])
def test_gradients_of_a_network(two_threads, codegen, options):
    net, x = inputs_of(Deep)
    exact = copy.deepcopy(net).double().to(memory_format=torch.contiguous_format)

    def run_on(model, run, x):
        outputs = run(x)
        return [*outputs, *torch.autograd.grad(mean_of(outputs), [*model.parameters()])]

    wanted = run_on(exact, exact, x.double())
    found = run_on(net, compiled(net, codegen, memory_format=ROWS, **options), x)
    # All gradients together, because the bias of a convolution before a norm has none but for rounding.
    mine, own = (torch.cat([t.flatten() for t in tensors[2:]]) for tensors in (found, wanted))
    assert (mine - own).norm() <= (0.05 if "bits" in options else 1e-5) * own.norm()
    torch.testing.assert_close(found[:2], wanted[:2], check_dtype=False, rtol=1e-4, atol=1e-4)
    assert all(y.is_contiguous(memory_format=ROWS) for y in found[:2])


def test_passes_of_instance_norm_and_leaky_relu(monkeypatch, needs_interpreter):
    """Two passes for a sample that fits on chip; gradients read x and dz twice and write dx."""
    monkeypatch.setattr(fusedseg, "backend", "triton")
    torch.manual_seed(0)
    act = nn.Sequential(nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(0.01, inplace=True))
    run = compiled(act, memory_format=ROWS)
    x = torch.randn(2, 4, 8, 8, 8).contiguous(memory_format=ROWS).requires_grad_()
    with traffic() as moved:
        y = run(x)
        forward = moved.total / x.nbytes
        y.backward(torch.randn_like(y))
    assert y.is_contiguous(memory_format=ROWS)
    assert x.grad.is_contiguous(memory_format=ROWS)
    assert forward < 2.1
    assert moved.total / x.nbytes < 7.1


@pytest.mark.parametrize("kernel", [2, (2,), (2, 1, 3)], ids=str)
def test_average_pools_of_volumes(kernel):
    """A tuple of one number raised."""
    x = torch.randn(2, 4, 4, 4, 6).contiguous(memory_format=ROWS)
    torch.testing.assert_close(avg_pool3d(x, kernel), F.avg_pool3d(x, kernel))
