"""Everything that training does, through the backend with aten kernels."""

import copy
import functools
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedseg.compiler import backend
from tests.compiler.networks import compiled, kept, mixed, results, same


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
    return torch.randn(2, 3, 14, 14)


def pair(make=Net):
    torch.manual_seed(0)
    net = make()
    return net, copy.deepcopy(net)


def gradients(net):
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def test_break_of_the_graph(x):
    """Each part keeps what it needs; a tensor between the parts is an argument, and stays."""
    net, twin = pair(lambda: Net(broken=True))
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))


def test_without_gradients(x):
    net, twin = pair(mixed)
    run = compiled(net)
    for training in (True, False):
        net.train(training)
        twin.train(training)
        torch.manual_seed(1)
        with torch.no_grad():
            out = run(x)
        torch.manual_seed(1)
        assert torch.equal(out, twin(x).detach())
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_eval_with_gradients(x):
    net, twin = pair()
    assert same(results(net.eval(), compiled(net), [x]), results(twin.eval(), twin, [x]))


def test_frozen_parts(x):
    net, twin = pair()
    for model, run in ((net, compiled(net)), (twin, twin)):
        model.a[1].eval()
        for parameter in model.a.parameters():
            parameter.requires_grad_(False)
        run(x).square().sum().backward()
    assert [g is None for g in gradients(net)] == [g is None for g in gradients(twin)]
    assert same([g for g in gradients(net) if g is not None], [g for g in gradients(twin) if g is not None])


def test_gradient_of_the_input(x):
    net, twin = pair()
    found = []
    for run in (compiled(net), twin):
        image = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(image).square().sum(), image)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_a_scaler(x, dtype):
    """A step of an optimizer under autocast, with the scale of a GradScaler."""
    net, twin = pair(mixed)
    other = copy.deepcopy(net)
    steps = []
    for model, run in ((net, compiled(net)), (twin, torch.compile(twin, backend="aot_eager")), (other, other)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", dtype):
                loss = run(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        steps.append([p.detach().clone() for p in (*model.parameters(), *model.buffers())])
    if same(steps[1], steps[2]):
        assert same(steps[0], steps[2])
    for ours, eager in zip(steps[0], steps[2], strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=2e-2)


def test_checkpoint_in_the_model(x):
    """What a checkpoint has labelled stays as it is."""

    class Checkpointed(Net):
        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False))

    net, twin = pair(Checkpointed)
    other = torch.compile(twin, backend="aot_eager")
    assert same(results(net, compiled(net), [x]), results(twin, other, [x]))


def test_accumulation_and_several_forwards(x):
    """Two forwards before a backward, whose gradients add up."""
    net, twin = pair()
    for run in (compiled(net), twin):
        first, second = run(x), run(x + 1)
        second.square().sum().backward()
        first.square().sum().backward()
    assert same(gradients(net), gradients(twin))
    assert all(map(torch.equal, net.buffers(), twin.buffers()))


def test_double_use_of_a_module(x):
    class Twice(Net):
        def forward(self, x):
            return self.b(self.a(x)) + self.b(self.a(x.flip(2)))

    net, twin = pair(Twice)
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))


def test_a_second_backward(x):
    """Nothing of what is kept is written over."""
    net, twin = pair()
    for run in (compiled(net), twin):
        loss = run(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert same(gradients(net), gradients(twin))


def test_a_buffer_that_forward_writes_to(x):
    """What is computed from the buffer is kept: backward would compute it again from the new values."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
            self.b = nn.Conv2d(4, 2, 1)
            self.register_buffer("shift", torch.full((4,), 0.5))

        def forward(self, x):
            y = torch.relu(self.a(x) + self.shift.view(1, 4, 1, 1))
            self.shift.lerp_(y.detach().mean((0, 2, 3)), 0.5)
            return self.b(y * 2)

    net, twin = pair(Moving)
    assert same(results(net, compiled(net), [x]), results(twin, twin, [x]))


def test_an_argument_that_forward_writes_to_unseen_by_autograd():
    """AOTAutograd writes the new value after the graph has run; what follows from the old one is not computed again."""

    def run(p):
        y = torch.relu(p)
        y = y * y
        p.data.mul_(2)
        return y

    found = []
    for function in (torch.compile(run, backend=backend, options={"codegen": "aten"}), run):
        p = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
        function(p).sum().backward()
        found.append([p.detach(), p.grad])
    assert same(*found)


def test_a_second_backward_of_a_dynamic_graph(x):
    """PyTorch refuses it unless a setting of its own is changed, which its error names."""
    net, twin = pair()
    for run in (torch.compile(net, backend=backend, options={"codegen": "aten"}, dynamic=True), twin):
        with torch._functorch.config.patch(donated_buffer=False):
            loss = run(x).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert same(gradients(net), gradients(twin))


def test_a_kept_value_that_changes_raises(x):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid())
    out = compiled(net)(x)
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [True, None])
def test_dynamic_shapes(dynamic):
    """As many graphs serve all sizes as with aot_eager; no size is read as a number."""
    from torch._dynamo.backends.debugging import aot_eager

    counts = []
    for compile_graph in (functools.partial(backend, options={"codegen": "aten"}), aot_eager):
        graphs = []

        def counting(graph, inputs, compile_graph=compile_graph, graphs=graphs):
            graphs.append(graph)
            return compile_graph(graph, inputs)

        torch._dynamo.reset()
        net, twin = pair()
        run = torch.compile(net, backend=counting, dynamic=dynamic)
        for batch, size in ((2, 14), (3, 18), (4, 22)):
            image = torch.randn(batch, 3, size, size)
            assert same(results(net, run, [image], 1), results(twin, twin, [image], 1))
        counts.append(len(graphs))
        if compile_graph is not aot_eager:
            assert kept(net, run, [image]) < 0.7 * kept(twin, twin, [image])
    assert counts[0] == counts[1]


def test_an_instance_norm_of_any_batch():
    """It is traced as a batch norm of batch × channels, a symbolic number, and rebuilt from as many statistics."""
    net, twin = pair(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)))
    run = compiled(net, dynamic=True)
    for batch in (2, 3):
        image = torch.randn(batch, 3, 9, 9)
        assert same(results(net, run, [image], 1), results(twin, twin, [image], 1))


def test_several_threads(x):
    """Two threads compile and train a network each."""
    nets = [pair() for _ in range(2)]
    found = [None, None]

    def work(i):
        net, _ = nets[i]
        found[i] = results(net, compiled(net), [x])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (_, twin) in enumerate(nets):
        assert same(found[i], results(twin, twin, [x]))


def test_export_is_untouched(x):
    net = mixed().eval()
    assert torch.allclose(torch.export.export(net, (x,)).module()(x), net(x))
