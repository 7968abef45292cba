"""The option ``memory_format``: no copy from channels_last to contiguous planes, or back, in a training step."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg._torch import FakeTensorMode
from fusedseg.compiler.capture import memory_format, norms, passes
from fusedseg.compiler.settings import Settings
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


class Mixed(nn.Module):
    """Convolutions of each kind, a residual norm, pools, an attention over channels, and three kinds of results."""

    def __init__(self, dims):
        super().__init__()
        conv, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        self.first, self.second, self.last = conv(3, 8, 3), conv(8, 8, 3, padding=1, groups=4), conv(8, 4, 1)
        self.up = getattr(nn, f"ConvTranspose{dims}d")(8, 8, 2, 2)
        self.norms = nn.ModuleList([norm(8), getattr(nn, f"InstanceNorm{dims}d")(8, affine=True), nn.GroupNorm(2, 8)])
        self.pool, self.gate = getattr(nn, f"AvgPool{dims}d")(2), nn.Linear(8, 8)
        self.dims = dims

    def forward(self, x):
        x = F.relu(self.norms[0](self.first(x)), inplace=True)
        x = F.leaky_relu(self.norms[1](self.second(x)) + x)
        small = self.norms[2](self.pool(x))
        x = self.up(small) + x[(..., *[slice(0, 2 * n) for n in small.shape[2:]])]
        gate = torch.sigmoid(self.gate(x.view(*x.shape[:2], -1).mean(-1)))
        x = x * gate.view(*gate.shape, *[1] * self.dims)
        return self.last(x), x.transpose(1, 2), x.flatten(2).sum(1)


def steps_of(t):
    """The strides of the dimensions that have several elements."""
    return [step for n, step in zip(t.shape, t.stride(), strict=True) if n > 1]


def everywhere(monkeypatch):
    """A CPU in any precision stands for a GPU in half precision."""
    monkeypatch.setattr(memory_format, "is_faster_in_rows", lambda value: True)


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"budget": 0.4}], ids=["exact", "8 bits", "budget"])
@pytest.mark.parametrize(("dims", "batch"), [(2, 2), (3, 2), (3, 1)])
def test_channels_last_by_itself(dims, batch, options, codegen, monkeypatch, two_threads):
    """Values and gradients are those of planes, results have eager mode's strides, and convolutions read rows."""
    everywhere(monkeypatch)
    seen, original = [], passes.norms.rewrite
    monkeypatch.setattr(passes.norms, "rewrite", lambda graph, how: seen.append(how) or original(graph, how))
    torch.manual_seed(0)
    net, x = Mixed(dims), torch.randn(batch, 3, *(13, 11, 9)[:dims])
    twin = copy.deepcopy(net)
    run = compiled(net, codegen, **options)
    found, wanted = run(x), twin(x)
    assert seen[0].keeps_rows
    for ours, eager in zip(found, wanted, strict=True):
        assert steps_of(ours) == steps_of(eager)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)
    for outputs in (found, wanted):
        mean_of(outputs).backward()
    mine, own = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (net, twin))
    assert (mine - own).norm() <= (0.05 if "bits" in options else 1e-4) * own.norm()
    assert all(steps_of(p.grad) == steps_of(p) for p in net.parameters())


def laid_out(function, *inputs, **options):
    """Whether a captured graph computes in channels_last, and its nodes."""
    found = []

    def backend(module, given):
        found.append(memory_format.rewrite(module, Settings(codegen="aten", **options)))
        found.extend(module.graph.nodes)
        return module

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found[0], found[1:]


def test_which_graphs_are_laid_out(monkeypatch):
    net, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 8)
    # A CPU, and another precision than half.
    assert not laid_out(net, x)[0]
    assert not laid_out(net.bfloat16(), x.bfloat16())[0]
    everywhere(monkeypatch)
    assert laid_out(net, x.bfloat16())[0]
    assert not laid_out(net, x.bfloat16(), memory_format="keep")[0]
    grouped = nn.Conv2d(4, 8, 3, groups=2)
    assert not laid_out(grouped, torch.randn(2, 4, 9, 8))[0]


def test_on_a_gpu_half_precision_alone():
    """Tensors without values stand for those of a GPU."""
    with FakeTensorMode():
        for dtype, wanted in ((torch.float16, True), (torch.bfloat16, True), (torch.float32, False)):
            assert memory_format.is_faster_in_rows(torch.empty(2, 3, 4, 4, dtype=dtype, device="cuda")) == wanted
            assert not memory_format.is_faster_in_rows(torch.empty(2, 3, 4, 4, dtype=dtype))


def test_a_weight_is_converted_once(monkeypatch):
    """Two convolutions share a weight; autocast's cast and the copy are one call."""
    everywhere(monkeypatch)
    conv, x = nn.Conv2d(3, 3, 3, padding=1), torch.randn(2, 3, 9, 8)

    def twice(x):
        with torch.autocast("cpu", torch.bfloat16):
            return conv(conv(x))

    found, nodes = laid_out(twice, x)
    assert found
    weights = [node for node in nodes if node.target == "to" and node.args[0].op == "placeholder"]
    casts = [node for node in weights if node.args[0].meta["example_value"].shape == conv.weight.shape]
    assert len(casts) == 1
    assert casts[0].kwargs == {"dtype": torch.bfloat16, "memory_format": torch.channels_last}


@pytest.mark.parametrize("how", ["view", "flatten", "reshape"])
def test_a_view_that_is_written_to_stays_one(how, monkeypatch):
    """In channels_last it would be a copy, and the image would not change."""
    everywhere(monkeypatch)
    conv = nn.Conv2d(3, 4, 3)

    def write(x):
        y = conv(x)
        flat = y.flatten(1) if how == "flatten" else getattr(y, how)(y.shape[0], -1)
        flat[:, 0] = 1.0
        return y

    x = torch.randn(2, 3, 9, 8)
    assert not laid_out(write, x)[0]
    torch._dynamo.reset()
    assert torch.equal(compiled(write)(x), write(x))
