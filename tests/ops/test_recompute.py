"""The scope around whole models: nesting, threads, checkpoint, compile, other hooks, and state after the scope."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedseg import recompute
from fusedseg.memory import SavedBytes
from fusedseg.memory.meter import measure
from fusedseg.scope import recipes
from tests.ops.scope_cases import assert_equal

SHAPE = (2, 3, 16, 16)
BYTES = 2 * 8 * 16 * 16 * 4


def block(act=nn.ReLU):
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), act(inplace=True))


class Net(nn.Module):
    """Four convolutions, a skip, a pool and a residual."""

    def __init__(self, wrap=lambda fn, x: fn(x)):
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3, padding=1), block(), block(nn.SiLU)
        self.last = nn.Conv2d(16, 2, 1)
        self.wrap = wrap

    def forward(self, x):
        x = self.first(x)
        skip = self.wrap(self.second, x)
        x = F.relu(self.wrap(self.third, F.max_pool2d(skip, 2)) + F.max_pool2d(x, 2))
        return self.last(torch.cat([skip, F.interpolate(x, scale_factor=2)], dim=1))


def gradients(fn, net, x, backward=torch.Tensor.backward):
    net.zero_grad()
    fn(x).square().mean().backward() if backward is torch.Tensor.backward else backward(fn(x).square().mean())
    return [param.grad.clone() for param in net.parameters()]


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def x():
    return torch.randn(SHAPE)


@pytest.fixture
def expected(net, x):
    return gradients(net, net, x)


def saved(fn, net, x):
    with SavedBytes([*net.parameters(), *net.buffers()]) as counted:
        out = fn(x)
        nbytes = counted.nbytes
    del out
    return nbytes


def test_context_manager_and_decorator(net, x, expected):
    @recompute()
    def decorated(x):
        assert recipes.active() is not None
        return net(x)

    def inside(x):
        with recompute():
            return net(x)

    assert_equal(gradients(decorated, net, x), expected)
    assert_equal(gradients(inside, net, x), expected)
    assert saved(decorated, net, x) == saved(inside, net, x) < 0.6 * saved(net, net, x)


def test_loss_and_backward_inside(net, x, expected):
    with recompute():
        assert_equal(gradients(net, net, x), expected)


def test_nested_scopes_are_one(net, x, expected):
    def nested(x):
        with recompute():
            registry = recipes.active()
            with recompute():
                assert recipes.active() is registry
                out = net(x)
            assert recipes.active() is registry
        assert recipes.active() is None
        return out

    assert_equal(gradients(nested, net, x), expected)
    assert saved(nested, net, x) == saved(recompute()(net), net, x)


def test_one_scope_entered_twice(net, x):
    scope = recompute()
    with scope, scope:
        assert recipes.active() is not None
    assert recipes.active() is None
    with scope:
        assert recipes.active() is not None


def test_an_exception_ends_the_scope(net, x, expected):
    with pytest.raises(RuntimeError, match="channels"), recompute():
        net(x[:, :2])
    assert recipes.active() is None
    assert torch._C._len_torch_function_stack() == 0
    assert_equal(gradients(recompute()(net), net, x), expected)


def test_only_the_thread_that_entered_it(net, x):
    with recompute(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(recipes.active).result() is None
        assert pool.submit(torch._C._len_torch_function_stack).result() == 0


def test_threads_each_with_a_scope_of_the_same_function():
    """nn.DataParallel calls a module whose forward has the scope in this way."""
    nets, x = [Net() for _ in range(4)], torch.randn(SHAPE)
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    expected = gradients(nets[0], nets[0], x)
    barrier = threading.Barrier(4)

    @recompute()
    def run(net, x):
        barrier.wait()
        return net(x)

    def step(net):
        return gradients(lambda x: run(net, x), net, x)

    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(step, nets):
            assert_equal(got, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_checkpoint_inside(net, x, expected, reentrant, inside):
    net.wrap = lambda fn, x: checkpoint(fn, x, use_reentrant=reentrant)

    def forward(x):
        with recompute():
            return net(x)

    if not inside:
        assert_equal(gradients(forward, net, x), expected)
    else:
        with recompute():
            assert_equal(gradients(net, net, x), expected)
    if not reentrant:
        assert saved(forward, net, x) < saved(recompute()(Net()), net, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around(net, x, expected, reentrant):
    x.requires_grad_()

    def around(x):
        return checkpoint(recompute()(net), x, use_reentrant=reentrant)

    assert_equal(gradients(around, net, x), expected)
    # Only the input is kept.
    assert saved(around, net, x) <= x.nbytes


@pytest.mark.parametrize("hooks_first", [True, False], ids=["hooks around", "hooks inside"])
def test_other_hooks(net, x, expected, hooks_first):
    """Hooks around the scope get what it keeps, and hooks inside get everything."""
    contexts = (save_on_cpu, recompute) if hooks_first else (recompute, save_on_cpu)

    def run(x):
        with contexts[0](), contexts[1]():
            return net(x)

    assert_equal(gradients(run, net, x), expected)


def test_retained_graph_and_part_of_it(net, x, expected):
    out = recompute()(net)(x).square().mean()
    for _ in range(3):
        net.zero_grad()
        out.backward(retain_graph=True)
        assert_equal([param.grad for param in net.parameters()], expected)
    (only,) = torch.autograd.grad(out, net.last.weight, retain_graph=True)
    assert_equal([only, *torch.autograd.grad(out, net.first.weight)], [expected[-2], expected[0]])


def test_double_backward_is_that_of_eager(x):
    torch.manual_seed(0)
    net, x = Net().double(), x.double().requires_grad_()

    def penalty(fn):
        (dx,) = torch.autograd.grad(fn(x).square().mean(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), list(net.parameters()), allow_unused=True)

    expected, got = penalty(net), penalty(recompute()(net))
    for a, b in zip(got, expected, strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_no_grad_and_eval(net, x):
    with recompute(), torch.no_grad():
        out = net(x)
        assert recipes.active() is None
    assert torch.equal(out, net(x))
    net.eval()
    assert_equal(gradients(recompute()(net), net, x), gradients(net, net, x))


def test_random_numbers_are_those_of_eager(x):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.4), nn.Conv2d(8, 8, 3))
    states = []
    for fn in (net, recompute()(net)):
        torch.manual_seed(3)
        states.append([*gradients(fn, net, x), torch.get_rng_state()])
    assert_equal(*states)


def residual_stream(convs, norms, x):
    for conv, norm in zip(convs, norms, strict=True):
        x = F.relu(norm(conv(x)) + x)
    return x


def test_a_long_residual_stream_keeps_a_tensor_now_and_then():
    depth = 40
    convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth))
    norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(depth))
    both, x = nn.ModuleList([convs, norms]), torch.randn(2, 8, 16, 16)
    calls = []
    for conv in convs:
        conv.register_forward_hook(lambda *_: calls.append(1))
    fn = lambda x: residual_stream(convs, norms, x)  # noqa: E731
    assert_equal(gradients(recompute()(fn), both, x), gradients(fn, both, x))
    # No convolution is computed again in backward.
    assert len(calls) == 2 * depth
    # The scope keeps the output of each convolution, and every fifth tensor of the residual stream.
    assert depth * BYTES <= saved(recompute()(fn), both, x) <= 1.35 * depth * BYTES


def test_memory_is_freed(net, x):
    gc.collect()
    gc.disable()
    try:
        held = []
        for backward in (True, False):
            with recompute():
                y = net.first(x)
                z = F.relu(net.second[1](y))
                out = net.second[0](z)
            held += [weakref.ref(t.untyped_storage()) for t in (y, z, out)]
            if backward:
                out.sum().backward()
            del y, z, out
        assert [ref() for ref in held] == [None] * 6
        # The graph is still alive, but no rebuilt tensor is.
        out = recompute()(net)(x).sum()
        before = len([o for o in gc.get_objects() if type(o) is torch.Tensor])
        out.backward(retain_graph=True)
        torch.autograd.grad(out, net.last.weight, retain_graph=True)
        net.zero_grad()
        assert len([o for o in gc.get_objects() if type(o) is torch.Tensor]) <= before
    finally:
        gc.enable()


def test_fake_tensors(x):
    real_net = Net()
    real = measure(recompute()(real_net), x, owned=[*real_net.parameters(), *real_net.buffers()])
    with FakeTensorMode():
        net = Net()
        fake = measure(recompute()(net), torch.empty(SHAPE), owned=[*net.parameters(), *net.buffers()])
    assert (fake.saved, fake.held) == (real.saved, real.held)


@pytest.mark.parametrize("around", [True, False], ids=["scope around", "scope inside"])
def test_compiled(net, x, expected, around):
    torch._dynamo.reset()
    compiler = torch.compile(backend="aot_eager", fullgraph=True)

    def scoped(x):
        with recompute():
            return net(x)

    run = recompute()(compiler(net)) if around else compiler(scoped)
    for _ in range(2):
        for a, b in zip(gradients(run, net, x), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_function_transforms_refuse_the_scope(x):
    """torch.func refuses the scope as it refuses all saved-tensor hooks; without gradients the scope has no effect."""
    with pytest.raises(RuntimeError, match="saved tensor hooks"), recompute():
        torch.func.grad(lambda x: x.relu().sum())(x)
    with recompute():
        assert torch.equal(torch.func.vmap(torch.relu)(x), torch.relu(x))
