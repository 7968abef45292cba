"""Convolutions in channels_last: values, strides, bytes and copies of a step, by themselves and with the option."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg._torch import FakeTensorMode
from fusedseg.compiler.graph import is_tensor, name_of, nbytes_of, twin_of, value_of
from fusedseg.compiler.rewrite import channels_last
from fusedseg.ops import avg_pool
from fusedseg.ops.layout import FORMATS, suggests_channels_last
from tests.compiler.fake_step import _bare, _Graphs, fake_step
from tests.compiler.networks import compiled, in_both, loss_of, under_autocast
from tests.compiler.programs import LAID_OUT, Net, conv, convolve, residual, step, unet
from tests.nnunet import PlainConvUNet
from tests.tools.copies import ROWS, Copies
from tests.tools.spy import spied
from tests.tools.traffic import traffic


def test_a_step_makes_no_layout_copy(strides_of_a_gpu, norms_of_a_gpu):
    """Stock instance norm copies to planes and back, in forward and in backward."""
    widths = 8, 16
    with FakeTensorMode(), Copies() as of_stock:
        model = PlainConvUNet(widths=widths)
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if p.dim() == 5:
                    # A fake module's ``to`` cannot exchange its parameters.
                    module._parameters[name] = nn.Parameter(p.detach().contiguous(memory_format=ROWS))
        del of_stock.found[:]
        loss_of(model(torch.randn(2, 1, 16, 16, 16))).backward()
    assert len(of_stock.found) == 31

    model = PlainConvUNet(widths=widths).to(memory_format=ROWS)
    graphs = _Graphs(model, (torch.randn(2, 1, 16, 16, 16),), memory_format=ROWS)
    # With a CUDA build PyTorch says how a GPU's convolutions lay their results out.
    for device in ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",):
        with FakeTensorMode(), torch.no_grad(), Copies() as ours:
            (given, forward), (read, backward) = graphs.made
            kept = forward([_bare(node).to(device) for node in given])[graphs.outputs :]
            backward([*kept, *(_bare(node).to(device) for node in read if "tangents" in node.name)])
        assert ours.found == [], device


def test_passes_of_instance_norm_and_leaky_relu(monkeypatch, needs_interpreter):
    """Two passes for a sample that fits on chip; gradients read x and dz twice and write dx."""
    monkeypatch.setattr(fusedseg, "backend", "triton")
    torch.manual_seed(0)
    convs = [nn.Conv3d(4, 4, 3, padding=1, bias=False) for _ in range(2)]
    act = nn.InstanceNorm3d(4, affine=True), nn.LeakyReLU(0.01, inplace=True)
    net = nn.Sequential(convs[0], *act, convs[1]).to(memory_format=ROWS)
    run = compiled(net, memory_format=ROWS)
    x = torch.randn(2, 4, 8, 8, 8).contiguous(memory_format=ROWS).requires_grad_()
    with traffic() as moved:
        y = run(x)
        forward = moved.total / x.nbytes
        y.backward(torch.randn_like(y))
    assert y.is_contiguous(memory_format=ROWS)
    assert x.grad.is_contiguous(memory_format=ROWS)
    assert forward < 2.1
    assert moved.total / x.nbytes < 7.1


@pytest.mark.parametrize("kernel", [(2, 2, 2), (2, 1, 3)], ids=str)
def test_average_pools_of_volumes(kernel):
    x = torch.randn(2, 4, 5, 4, 6, dtype=torch.float64).contiguous(memory_format=ROWS).requires_grad_()
    window = (list(kernel), [], [0] * 3, False, True, None)
    y, wanted = avg_pool.avg_pool3d_op(x.detach(), *window), F.avg_pool3d(x, kernel)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(wanted)
    dx = avg_pool.avg_pool3d_backward_op(dy, x.detach(), *window)
    torch.testing.assert_close(dx, torch.autograd.grad(wanted, x, dy)[0])
    assert y.is_contiguous(memory_format=ROWS)
    assert dx.is_contiguous(memory_format=ROWS)


def order_of(found):
    """The strides of the dimensions that have several elements, which are all that Inductor cares for in gradients."""
    pairs = {name: zip(t.shape, t.stride(), strict=True) for name, t in found.items()}
    return {name: [step for n, step in each if n > 1] for name, each in pairs.items()}


# Inductor takes ten seconds for each program.
EACH = in_both(LAID_OUT, "U-Net 3D", "returned")


def flat(found):
    return torch.cat([t.detach().double().flatten() for t in found.values()])


@pytest.fixture
def laid_out(request, monkeypatch):
    """The numbers of ops in channels_last of the graphs that are compiled; none comes from a cache of Inductor."""
    numbers = spied(monkeypatch, channels_last, "lay_out")
    if "inductor" not in request.node.name:
        yield numbers
        return
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield numbers


@pytest.fixture
def everywhere(monkeypatch):
    """A CPU in any precision stands for a GPU in half precision."""
    monkeypatch.setattr(channels_last, "is_faster", lambda x: True)


# Dynamo looks at an autograd.Function through an object of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "codegen"), EACH)
def test_steps_give_the_same_in_the_same_strides(name, codegen, laid_out, strides_of_a_gpu):
    """Values are those of float64; a caller sees eager mode's strides."""
    program = LAID_OUT[name]
    torch.manual_seed(0)
    net, x = program.build(), torch.randn(program.shape)
    twin, exact = copy.deepcopy(net), copy.deepcopy(net).double()
    # The mask of a dropout is another one in float64.
    wanted = step(twin, twin, x) if name == "dropout" else step(exact, exact, x.double())
    found = step(net, compiled(net, codegen, memory_format=FORMATS[x.dim()]), x)
    assert any(laid_out)
    assert found.keys() == wanted.keys()
    assert (flat(found) - flat(wanted)).norm() <= 1e-5 * flat(wanted).norm()
    assert order_of(found) == order_of(step(twin, twin, x))


def graphs_of(net, x, monkeypatch, **options):
    """The joint graph of a step as the pass leaves it."""
    with monkeypatch.context() as patched:
        # The pass goes on with the graph, so a copy is noted.
        found = spied(patched, channels_last, "lay_out", lambda count, graph, settings: twin_of(graph)[0])
        torch._dynamo.reset()
        loss_of(compiled(net, **options)(x)).backward()
    return found[0]


def test_weights_are_cast_and_laid_out_by_one_call(monkeypatch):
    net, x = unet(2), torch.randn(2, 3, 12, 8)
    graph = graphs_of(under_autocast(net), x, monkeypatch, memory_format=torch.channels_last)
    weights = {p.shape for p in net.parameters() if p.dim() == 4}
    nodes = [node for node in graph.nodes if is_tensor(node) and value_of(node).shape in weights]
    copies = [node for node in nodes if name_of(node) in ("clone", "_to_copy")]
    casts = [node for node in copies if node.kwargs.get("dtype") is not None]
    assert casts == copies
    # One for each weight, and one for its gradient.
    assert len(casts) == 2 * len([p for p in net.parameters() if p.dim() == 4])


def copies_of(graph, shapes):
    """The bytes of images that copies change in their layout; ``shapes`` are those of weights."""
    nodes = [
        node for node in graph.nodes if name_of(node) in ("clone", "_to_copy") and value_of(node).shape not in shapes
    ]
    return sum(nbytes_of(node) for node in nodes if value_of(node).dim() in FORMATS)


def mobile():
    """An inverted residual with a gate, as in MobileNet and EfficientNet."""

    def run(x, first, wide, deep, gate, narrow):
        y = first(x)
        z = F.silu(deep(F.silu(wide(y))))
        return narrow(z * gate(z.mean((2, 3), keepdim=True)).sigmoid()) + y

    layers = {"first": conv(3, 8), "wide": conv(8, 32, 1), "deep": conv(32, 32, groups=32), "narrow": conv(32, 8, 1)}
    return Net(run, **layers, gate=conv(32, 32, 1))


def grouped():
    return Net(residual, first=conv(3, 8), second=conv(8, 8, groups=2), third=conv(8, 8, groups=4))


@pytest.mark.parametrize(
    ("build", "laid"),
    [
        (lambda: unet(2), True),
        (lambda: LAID_OUT["odd sizes"].build(), True),
        (mobile, True),
        # Copies around views, layer norms and grouped convolutions would cost more than the convolutions gain.
        (lambda: LAID_OUT["ConvNeXt"].build(), False),
        (lambda: LAID_OUT["attention"].build(), False),
        (grouped, False),
        (lambda: Net(convolve, first=conv(8, 8)), False),
    ],
    ids=["U-Net", "residual", "MobileNet", "ConvNeXt", "attention", "grouped", "one convolution"],
)  # fmt: skip
def test_copies_cost_less_than_the_convolutions_gain(build, laid, monkeypatch, everywhere, laid_out, norms_of_a_gpu):
    net = build()
    cin = next(p for p in net.parameters() if p.dim() == 4).shape[1]
    x = torch.randn(2, cin, 32, 24)
    shapes = {p.shape for p in net.parameters()}
    before = copies_of(graphs_of(net, x, monkeypatch, memory_format="keep"), shapes)
    assert not any(laid_out)
    graph = graphs_of(net, x, monkeypatch)
    gain = sum(channels_last._price(node) for node in graph.nodes if _computes_in_channels_last(node))
    assert 2 * (copies_of(graph, shapes) - before) <= gain
    assert bool(gain) == laid


def _computes_in_channels_last(node):
    if name_of(node) not in ("convolution", "convolution_backward"):
        return False
    return suggests_channels_last(channels_last.value_of_x(node))


def test_on_a_gpu_in_half_precision_alone():
    """Tensors without values stand for those of a GPU."""
    with FakeTensorMode():
        for dtype, wanted in ((torch.float16, True), (torch.bfloat16, True), (torch.float32, False)):
            assert channels_last.is_faster(torch.empty(2, 3, 4, 4, dtype=dtype, device="cuda")) == wanted
            assert not channels_last.is_faster(torch.empty(2, 3, 4, 4, dtype=dtype))


@pytest.mark.parametrize("options", [{}, {"memory_format": torch.channels_last_3d}], ids=str)
def test_a_cpu_keeps_the_format(options, laid_out):
    net, x = unet(2), torch.randn(2, 3, 12, 8)
    step(net, compiled(net, **options), x)
    assert laid_out == [0]


def test_symbolic_sizes_stay_as_they_are(laid_out):
    """No guard is added: one graph serves two sizes."""
    net = LAID_OUT["odd sizes"].build()
    run = compiled(net, dynamic=True, memory_format=torch.channels_last)
    for shape in ((2, 3, 12, 8), (3, 3, 16, 12)):
        x = torch.randn(shape)
        torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-5)
    assert laid_out == [0]


def test_no_byte_more_is_kept():
    """Against the same graph in planes: what forward keeps, and the peaks of both passes."""
    with FakeTensorMode():
        net, x = unet(3), torch.randn(2, 3, 32, 24, 16)
        keep = fake_step(net, (x,), memory_format="keep")
        ours = fake_step(net, (x,), memory_format=FORMATS[x.dim()])
    # Weights and their gradients, which are small in networks that fill a memory, are copied here.
    weights = sum(p.nbytes for p in net.parameters())
    assert ours.kept <= keep.kept
    assert ours.forward <= keep.forward + weights
    assert ours.backward <= keep.backward + weights
