"""Everything that training does, with both codegens: the bits of eager mode with aten, rounding with Inductor."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedseg.compiler import backend
from tests.compiler.networks import BOTH, compiled, in_both, kept, mixed, results, same
from tests.tools.threads import in_threads

# Inductor draws other random numbers than eager mode by itself.
OPTIONS = {"aten": {}, "inductor": {"inductor": {"fallback_random": True}}}


class Net(nn.Module):
    def __init__(self, broken=False):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3))
        self.b = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(True), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
        self.broken = broken

    def forward(self, x):
        x = self.a(x)
        if self.broken:
            torch._dynamo.graph_break()
        return self.b(x)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 3, 14, 14, dtype=torch.float64)


def pair(make=Net):
    torch.manual_seed(0)
    net = make().double()
    return net, copy.deepcopy(net)


def through(net, codegen, dynamic=None):
    return compiled(net, codegen, dynamic, **OPTIONS[codegen])


def alike(found, wanted):
    """Whether the results in float64 are the same up to rounding.

    The gradients of norms are sums in another order; ``test_aten.py`` looks at the bits of forward.
    """
    pairs = zip(found, wanted, strict=True)
    return all(
        torch.allclose(a, b, rtol=1e-7, atol=1e-9) if b.is_floating_point() else torch.equal(a, b) for a, b in pairs
    )


def gradients(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@BOTH
def test_break_of_the_graph(x, codegen):
    """Each part keeps what it needs; a tensor between the parts is an argument, and stays."""
    net, twin = pair(lambda: Net(broken=True))
    assert alike(results(net, through(net, codegen), [x]), results(twin, twin, [x]))


@pytest.mark.parametrize(("dtype", "codegen"), in_both([torch.bfloat16, torch.float16], torch.bfloat16))
def test_autocast_with_a_scaler(x, dtype, codegen):
    """A step of an optimizer under autocast, with the scale of a GradScaler."""
    net = pair(mixed)[0].float()
    twin, steps = copy.deepcopy(net), []
    for model, run in ((net, through(net, codegen)), (twin, twin)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype):
                loss = run(x.float()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps.append([p.detach().clone() for p in (*model.parameters(), *model.buffers())])
    for ours, eager in zip(*steps, strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


@pytest.mark.filterwarnings("ignore:.*inside of a checkpoint")
@pytest.mark.parametrize("options", [{}, {"budget": 0.9}, {"bits": 8}], ids=str)
def test_a_checkpoint_keeps_its_input_alone(options):
    """What a checkpoint has labelled stays as it is, also with the options that decide what is kept."""

    class Checkpointed(Net):
        def forward(self, x):
            return self.b[-1](checkpoint(self.a, x, use_reentrant=False))

    net, x = Checkpointed(), torch.randn(2, 3, 34, 34)
    assert kept(net, compiled(net, **options), [x]) == 0


@pytest.mark.parametrize(("inside", "codegen"), in_both([False, True], True))
def test_equal_calls_of_which_one_is_returned(x, inside, codegen):
    """The compiler made one norm of both: the sigmoid was written over the result, and a checkpoint's labels raised."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4).eval()

        def inner(self, y):
            return torch.sigmoid(self.norm(y))

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y), checkpoint(self.inner, y, use_reentrant=False) if inside else self.inner(y)

    net, twin = pair(Both)
    found = []
    for model, run in ((net, through(net, codegen)), (twin, twin)):
        first, second = run(x)
        (first * second).sum().backward()
        found.append([first.add_(second), second, *gradients(model)])
    assert alike(*found)


@BOTH
def test_accumulation_and_several_forwards(x, codegen):
    """Two forwards before a backward, whose gradients add up."""
    net, twin = pair()
    for run in (through(net, codegen), twin):
        first, second = run(x), run(x + 1)
        second.square().sum().backward()
        first.square().sum().backward()
    assert alike(gradients(net), gradients(twin))
    assert alike([*net.buffers()], [*twin.buffers()])


@pytest.mark.parametrize(("dynamic", "codegen"), in_both([False, True], False))
def test_a_second_backward(x, dynamic, codegen):
    """Nothing of what is kept is written over, also where an ordinary step has run before.

    The bug: AOTAutograd refused the second pass after an ordinary step, and always with symbolic sizes.  With Inductor
    PyTorch refuses it unless a setting of its own is changed; its error says so.
    """
    net, twin = pair()
    for run in (through(net, codegen, dynamic), twin):
        with torch._functorch.config.patch(donated_buffer=codegen == "aten"):
            run(x).square().sum().backward()
            loss = run(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert alike(gradients(net), gradients(twin))


@BOTH
def test_an_argument_that_forward_writes_to_unseen_by_autograd(codegen):
    """AOTAutograd writes the new value after the graph has run; what follows from the old one is not computed again."""

    def run(p):
        y = torch.relu(p)
        y = y * y
        p.data.mul_(2)
        return y

    found = []
    for function in (through(run, codegen), run):
        p = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = function(p).sum()
        out.backward()
        found.append([p.detach(), p.grad])
    assert same(*found)


@BOTH
def test_a_kept_value_that_changes_raises(x, codegen):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()).double()
    out = through(net, codegen)(x)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# A compiler that finds out which sizes change makes a graph of one size first, and then those of all sizes.
@pytest.mark.parametrize(("dynamic", "codegen"), in_both([None], True))
def test_dynamic_shapes(dynamic, codegen):
    """As many graphs serve all sizes as with PyTorch's own backend; no size is read as a number."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor.compile_fx import compile_fx

    counts, stock = [], {"aten": aot_eager, "inductor": compile_fx}[codegen]
    for compile_graph in (functools.partial(backend, options={"codegen": codegen, **OPTIONS[codegen]}), stock):
        graphs = []

        def counting(graph, inputs, compile_graph=compile_graph, graphs=graphs):
            graphs.append(graph)
            return compile_graph(graph, inputs)

        torch._dynamo.reset()
        net, twin = pair(lambda: nn.Sequential(*Net().a, nn.Conv2d(8, 4, 1)))
        run = torch.compile(net, backend=counting, dynamic=dynamic)
        for batch, size in ((2, 14), (3, 18), (4, 22)):
            image = torch.randn(batch, 3, size, size, dtype=torch.float64)
            assert alike(results(net, run, [image], 1), results(twin, twin, [image], 1))
        counts.append(len(graphs))
        if compile_graph is not stock:
            assert kept(net, run, [image]) < 0.7 * kept(twin, twin, [image])
    assert counts[0] == counts[1]


@BOTH
def test_several_threads(x, codegen):
    """Two threads compile and train a network each."""
    nets = [pair() for _ in range(2)]

    def train(net):
        return results(net, through(net, codegen), [x])

    found = in_threads(*[functools.partial(train, net) for net, _ in nets])
    for of_net, (_, twin) in zip(found, nets, strict=True):
        assert alike(of_net, results(twin, twin, [x]))


def test_export_is_untouched(x):
    net = mixed().double().eval()
    assert torch.allclose(torch.export.export(net, (x,)).module()(x), net(x))


@BOTH
def test_hooks_that_are_registered_after_compilation(x, codegen):
    """They follow PyTorch's own rule: they run as often as with its own compiler, and change the same results."""
    found = []
    for make in (functools.partial(through, codegen=codegen), functools.partial(torch.compile, backend="aot_eager")):
        torch._dynamo.reset()
        net, _ = pair()
        run = make(net)
        run(x)
        net.a[0].register_forward_hook(lambda module, args, out: out * 0.5)
        found.append(results(net, run, [x], 1))
    assert alike(*found)


class OfFunc(nn.Module):
    """A norm and a sum after it, an interpolation, and a pool: all that is looked for in a captured graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.conv(x)
        x = torch.relu(self.norm(x) + x.sin())
        large = nn.functional.interpolate(nn.functional.max_pool2d(x, 2), scale_factor=2.0, mode="bilinear")
        return self.last(large)


@pytest.mark.parametrize("samples", [False, True], ids=["", "of each sample"])
def test_transforms_of_torch_func(x, samples):
    """Tensors inside of a transform have no memory to look at, and PyTorch's error for them came out of the backend."""
    net, _ = pair(OfFunc)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, (x.view(-1, 3, 14, 14),)).square().mean()

    transform = torch.func.grad(loss)
    if samples:
        transform = torch.func.vmap(transform, (None, 0))
    run = torch.compile(transform, backend="fusedseg", options={"codegen": "aten"})
    torch.testing.assert_close(run(parameters, x), transform(parameters, x))
