"""The scope under ``torch.compile``: what a compiled network keeps, its bits, and the ways to write it."""

import copy
import functools
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from fusedseg import recompute
from fusedseg.memory import SavedBytes
from fusedseg.unet import UNet
from tests.compiler.networks import instance, relu
from tests.resnet import ResNet18

pytestmark = pytest.mark.usefixtures("compiled_afresh")
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


class Residual(nn.Module):
    """A block of nnU-Net's residual encoder."""

    def __init__(self, channels):
        super().__init__()
        conv = partial(nn.Conv3d, channels, channels, 3, padding=1)
        self.branch = nn.Sequential(conv(), *instance(channels), conv(), nn.InstanceNorm3d(channels, affine=True))
        self.act = nn.LeakyReLU(0.01, inplace=True)

    def forward(self, x):
        return self.act(self.branch(x) + x)


def small():
    """A network with most kinds of values: norms, activations, an addition, a pool, dropout and interpolation."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 4, 3),
    )


NETWORKS = {
    "U-Net": (lambda: UNet(3, 4, widths=(8, 16), plain=True, norm_act=relu), (2, 3, 32, 32)),
    "nnU-Net, plain": (
        lambda: UNet(1, 3, dims=3, widths=(8, 16), mode="transposed", plain=True, norm_act=instance),
        (1, 1, 16, 16, 8),
    ),
    "nnU-Net, residual": (
        lambda: nn.Sequential(nn.Conv3d(1, 8, 3), *instance(8), *(Residual(8) for _ in range(3)), nn.Conv3d(8, 2, 1)),
        (1, 1, 10, 10, 8),
    ),
    "ResNet": (lambda: ResNet18(10, width=8), (2, 3, 48, 48)),
}


def compiled(run, backend="aot_eager", fullgraph=True, **options):
    torch._dynamo.reset()
    if backend == "inductor":
        # Inductor would keep copies of small weights in another layout, with and without a scope.
        options["options"] = {"layout_optimization": False}
    return torch.compile(run, backend=backend, fullgraph=fullgraph, **options)


def inside(net):
    """The scope inside the compiled function."""

    def run(x):
        with recompute():
            return net(x)

    return run


def kept(net, run, x):
    """Bytes that autograd keeps.  The second call is counted, because a first call of compiled code also compiles."""
    run(x)
    with SavedBytes([*net.parameters(), *net.buffers(), x]) as saved:
        out = run(x)
    assert out.requires_grad
    return saved.nbytes


def step(net, run, x, steps=2):
    """Outputs, gradients and buffers of a few training steps."""
    found = []
    for _ in range(steps):
        out = run(x)
        found += [out.detach(), *torch.autograd.grad(out.square().mean(), [*net.parameters()])]
    return [*found, *(buffer.clone() for buffer in net.buffers())]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


@pytest.fixture
def x():
    return torch.randn(2, 3, 24, 24)


@functools.cache
def lean():
    """What ``small`` keeps where the scope is inside the compiled function."""
    net = small()
    return kept(net, compiled(inside(net)), torch.randn(2, 3, 24, 24))


def cases():
    """Each network with each backend; most are slow, because the compiler takes seconds for each.

    ``test_same_bits`` counts the bytes of the U-Net.  ``test_a_converted_network_follows_its_budget`` converts it and
    the plain nnU-Net; a converted model runs in a scope.
    """
    for name in NETWORKS:
        for backend in ("aot_eager", "aot_eager_decomp_partition", "inductor"):
            often = (name, backend) == ("nnU-Net, residual", "aot_eager")
            yield pytest.param(name, backend, id=f"{name}-{backend}", marks=[] if often else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "backend"), [*cases()])
def test_keeps_what_eager_keeps(name, backend):
    """A stock network in the scope, and the converted network, keep at most 2 % more than in eager mode."""
    make, shape = NETWORKS[name]
    net, x = make(), torch.randn(shape)
    # Before PyTorch 2.12, a compiled scope keeps what follows a stock instance norm (docs/start.md).
    if not (OLD and name.startswith("nnU-Net")):
        assert kept(net, compiled(inside(net), backend), x) <= 1.02 * kept(net, recompute()(net), x)
    fusedseg.convert(net, example_inputs=x)
    assert kept(net, compiled(net, backend), x) <= 1.02 * kept(net, net, x)


@pytest.mark.parametrize(
    "name", [name if name == "U-Net" else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_same_bits(name):
    """Outputs, gradients and running statistics are those of compiled code without the scope, to the last bit.

    The bytes are those of eager mode in the scope, and about half of the bytes without it.
    """
    make, shape = NETWORKS[name]
    net, x = make(), torch.randn(shape)
    twin = copy.deepcopy(net)
    run = compiled(twin)
    expected = step(twin, run, x)
    scoped = copy.deepcopy(net)
    most = 1.02 * kept(scoped, recompute()(scoped), x)
    assert kept(twin, run, x) > 1.9 * most
    ways = [lambda net: compiled(inside(net)), lambda net: recompute()(compiled(net))]
    for way in ways if name == "U-Net" else ways[:1]:
        twin = copy.deepcopy(net)
        run = way(twin)
        assert same(step(twin, run, x), expected)
        assert kept(twin, run, x) <= most


@pytest.mark.slow
def test_inductor_rounds_the_same():
    """Inductor fuses the rebuilt values with others, so that the last bits may differ."""
    make, shape = NETWORKS["U-Net"]
    net, x = make(), torch.randn(shape)
    other = copy.deepcopy(net)
    found = step(other, compiled(inside(other), "inductor"), x, steps=1)
    for a, b in zip(found, step(net, net, x, steps=1), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_scope_as_a_decorator(x):
    net = small()

    @recompute()
    def run(x):
        return net(x)

    assert kept(net, compiled(run), x) == lean() <= 1.02 * kept(net, run, x)


def test_scope_inside_a_scope(x):
    net = small()

    def run(x):
        with recompute():
            return inside(net)(x)

    assert kept(net, compiled(run), x) == lean()


def test_one_function_inside_and_outside_of_scopes(x):
    """A scope around the call has a graph of its own; neither graph is compiled again."""
    net, graphs = small(), []

    def backend(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = compiled(net, backend)
    plain, lean = kept(net, run, x), kept(net, recompute()(run), x)
    assert lean < 0.5 * plain
    for _ in range(2):
        assert (kept(net, run, x), kept(net, recompute()(run), x)) == (plain, lean)
    assert len(graphs) == 2


def test_break_of_the_graph_inside_the_scope(x):
    """The scope of eager mode takes over, around the parts that are compiled."""
    net = small()

    def run(x):
        with recompute():
            y = net[:4](x)
            torch._dynamo.graph_break()
            return net[4:](y)

    eager = kept(net, run, x)
    broken = compiled(run, fullgraph=False)
    assert kept(net, broken, x) <= 1.02 * eager
    torch.testing.assert_close(broken(x), net(x))


def test_without_gradients(x):
    net = small()
    run = compiled(inside(net))
    for training in (True, False):
        net.train(training)
        with torch.no_grad():
            torch.testing.assert_close(run(x), net(x))
        torch.testing.assert_close(run(x), net(x))


def test_region_without_gradients(x):
    """A part of the forward runs without grad mode."""
    net = small()

    def run(x):
        with recompute():
            with torch.no_grad():
                y = net[0](x)
            return net[3:](net[1:3](y))

    def plain(x):
        return net[3:](net[1:3](net[0](x).detach()))

    parameters = [*net[1:].parameters()]
    found, expected = (torch.autograd.grad(f(x).sum(), parameters) for f in (compiled(run), compiled(plain)))
    assert same(found, expected)


def test_sizes_may_change(x):
    """One graph serves every size, in training and in eval mode."""
    net = small()
    run = compiled(inside(net), dynamic=True)
    for size in (24, 32):
        image = torch.randn(3, 3, size, size)
        twin = copy.deepcopy(net)
        for a, b in zip(step(net, run, image, 1), step(twin, twin, image, 1), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert kept(net, run, image) <= 1.02 * kept(net, recompute()(net), image)


def test_autocast(x):
    net = small()
    twin = copy.deepcopy(net)

    def cast(run):
        def call(x):
            with torch.autocast("cpu", torch.bfloat16):
                return run(x)

        return call

    expected = step(twin, compiled(cast(twin)), x)
    run = compiled(cast(inside(net)))
    assert same(step(net, run, x), expected)
    assert kept(net, run, x) <= 1.02 * kept(net, cast(recompute()(net)), x)


def test_dropout_draws_once(x):
    """The mask is drawn once, and backward uses the mask of forward."""
    net = nn.Sequential(*small()[:3], nn.Dropout(0.5), nn.Conv2d(8, 4, 1, bias=False))
    net[4].weight.data.fill_(1.0)
    run = compiled(inside(net))
    torch.manual_seed(1)
    out = run(x)
    found = torch.autograd.grad(out.sum(), net[4].weight)[0]
    torch.manual_seed(1)
    out = compiled(net)(x)
    assert torch.equal(found, torch.autograd.grad(out.sum(), net[4].weight)[0])


def test_checkpoint_in_the_scope(x):
    """What a checkpoint has labelled stays as it is."""
    net = small()

    def run(x):
        with recompute():
            return net[4:](checkpoint(net[:4], x, use_reentrant=False))

    twin = copy.deepcopy(net)
    assert same(step(net, compiled(run), x), step(twin, compiled(twin), x))


def test_a_backend_without_autograd_warns(x):
    run = compiled(inside(small()), "eager")
    with pytest.warns(UserWarning, match=r"no effect with this backend.*around the call of the compiled function"):
        run(x)


def test_export_sees_no_scope(x):
    class Scoped(nn.Sequential):
        def forward(self, x):
            with recompute():
                return super().forward(x)

    net = small().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for strict in (False, True):
            program = torch.export.export(Scoped(*net), (x,), strict=strict)
            assert torch.allclose(program.module()(x), net(x))


RAN = []


@torch.library.custom_op("fusedseg_tests::plus_one_into", mutates_args={"out"})
def plus_one_into(x: Tensor, out: Tensor) -> None:
    RAN.append(x.shape)
    torch.add(x, 1, out=out)


@plus_one_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@pytest.mark.parametrize("around", [False, True])
def test_an_op_that_writes_runs_once(around):
    """What it has written is kept, because it is not known what else such an op does."""
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)

    def step(x):
        y = conv(x)
        out = torch.empty_like(y)
        plus_one_into(y.detach(), out)
        return (F.silu(y) * out).square().sum()

    expected = torch.autograd.grad(step(x), [*conv.parameters()])

    def inside(x):
        with recompute():
            return step(x)

    run = torch.compile(step if around else inside, backend="aot_eager", fullgraph=True)
    RAN.clear()
    loss = recompute()(run)(x) if around else run(x)
    for got, wanted in zip(torch.autograd.grad(loss, [*conv.parameters()]), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert len(RAN) == 1
