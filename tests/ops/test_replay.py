"""Launches that are made again without the op.  On a CPU Triton's interpreter runs them from their addresses."""

import copy
import ctypes
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg import _backend
from fusedseg.activation import Activation
from fusedseg.ops import replay
from fusedseg.ops.concat import concat
from fusedseg.ops.layout import FORMATS
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import Forward
from fusedseg.ops.self_test import first_use
from tests.compiler.networks import compiled, make, results, same
from tests.resnet import LEAST_WIDTH_IN_ROWS, ResNet18
from tests.tools.marks import slow
from tests.tools.spy import spied
from tests.tools.stand_in import stand_in as stand_in

# The first step compiles, the second one launches directly and is noted, and the others replay.
STEPS = 4
CPU = torch.device("cpu")


def tensor_at(address, dtype):
    """The value at an address.  The interpreter reads around it by its address alone."""
    return torch.frombuffer((ctypes.c_byte * dtype.itemsize).from_address(address), dtype=dtype)


class Interpreted:
    """Stands for a compiled kernel, whose launch gets addresses."""

    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
    packed_metadata = function = 0

    def __init__(self, launch, dtypes, floats):
        self.launch, self.dtypes, self.floats = launch, dtypes, floats

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        from torch.utils._python_dispatch import _disable_current_modes

        addresses, rest = arguments[: len(self.dtypes)], arguments[len(self.dtypes) :]
        given = zip(addresses, self.dtypes, strict=True)
        # The interpreter calls ops of PyTorch, which a GPU does not.
        with _disable_current_modes():
            self.launch([None if a is None else tensor_at(a, dtype) for a, dtype in given], rest[: self.floats])


@pytest.fixture
def direct(needs_interpreter, monkeypatch):
    """Direct launches, as on a GPU; kernels run in the interpreter.  Counts the calls of ops that launch."""
    from fusedseg.kernels import launcher

    launch = launcher.Launcher._launch

    def launched(self, tensors, floats):
        self._kernel.pre_run_hooks = []
        launch(self, tensors, floats)
        dtypes = [None if t is None else t.dtype for t in tensors]
        return Interpreted(lambda *given: launch(self, *given), dtypes, len(floats))

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(fusedseg, "backend", "triton")
    for name, value in {"KNOWN": True, "IN_PYTHON": False, "_agrees": True, "is_watched": lambda: False,
                        "CompiledKernel": Interpreted, "driver": SimpleNamespace(active=active)}.items():  # fmt: skip
        monkeypatch.setattr(launcher, name, value)
    monkeypatch.setattr(launcher.Launcher, "_launch", launched)
    launcher.forget_plans()
    made, make_one = [], replay.Replay.__init__

    def noted(self, function, *given):
        self_calls = SimpleNamespace(count=0)

        def counted(*tensors):
            self_calls.count += 1
            return function(*tensors)

        counted.__name__ = function.__name__
        make_one(self, counted, *given)
        made.append(SimpleNamespace(replay=self, calls=self_calls))

    monkeypatch.setattr(replay.Replay, "__init__", noted)
    yield made
    launcher.forget_plans()


# Each layout in two and in three dimensions; the interpreter takes ten seconds for a network of volumes, whose launches
# are those of images.
LAYOUTS = {"3D U-Net": "rows", "nnU-Net": "planes", "ResNet": "rows", "mixed": "planes"}


@pytest.mark.parametrize(("name", "layout"), slow(LAYOUTS.items(), ("3D U-Net", "rows"), ("nnU-Net", "planes")))
def test_replays_have_the_bits_of_the_ops(name, layout, direct, compiled_afresh, monkeypatch):
    """Outputs, gradients and buffers of steps whose ops are called, and of steps that launch without them."""
    net, inputs = make(name)
    if name == "ResNet":
        net = ResNet18(10, width=LEAST_WIDTH_IN_ROWS, stages=1)
    if layout == "rows":
        net = net.to(memory_format=FORMATS[inputs[0].dim()])
        inputs = [x.to(memory_format=FORMATS[x.dim()]) for x in inputs]
    twin = copy.deepcopy(net)
    found = results(net, compiled(net), inputs, steps=STEPS)
    replays = len(direct)
    calls = [row.calls.count for row in direct]
    assert replays > 0
    # Some ops copy by a kernel of PyTorch, because convolutions of a CPU return other strides; most are replayed.
    assert sum(count < STEPS for count in calls) >= 0.6 * replays, calls
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "replays")
    torch._dynamo.reset()
    wanted = results(twin, compiled(twin), inputs, steps=STEPS)
    assert len(direct) == replays
    assert same(found, wanted)


def norm_net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def trained(net, run, x, steps=STEPS):
    for _ in range(steps):
        run(x).sum().backward()


def calls_in(direct, action):
    """The numbers of calls of each op during an action."""
    before = [row.calls.count for row in direct]
    action()
    return [row.calls.count - count for row, count in zip(direct, before, strict=True)]


def replay_of_a_norm():
    """The op, its replay, and what both are called with."""
    forward = Forward(Norm("input", Activation("relu", 0.0), momentum=0.1))
    return forward, replay.Replay(forward, CPU), torch.randn(2, 8, 6, 6), (torch.rand(8), torch.rand(8), *[None] * 5)


def test_the_op_is_called_for_other_tensors(direct, compiled_afresh):
    """A replay would read an address that is no multiple of 16 by vectors of 16 bytes, and other strides wrongly."""
    forward, again, x, given = replay_of_a_norm()
    (row,) = direct
    for _ in range(STEPS):
        again(0, x, *given)
    assert row.calls.count == 2
    odd = torch.randn(2 * 8 * 36 + 1)[1:].view(2, 8, 6, 6)
    for other in (x.to(memory_format=torch.channels_last), odd, x.double()):
        before = row.calls.count
        z, *_ = again(0, other, *given)
        assert row.calls.count == before + 1
        assert torch.equal(z, forward(other, *given)[0])
        assert z.stride() == other.stride()
    before = row.calls.count
    assert torch.equal(again(0, x, *given)[0], forward(x, *given)[0])
    assert row.calls.count == before


def test_a_change_of_the_backend_is_seen(direct, compiled_afresh, monkeypatch):
    """A compiled graph asks ``fusedseg.backend`` in every call; launches that were noted did not."""
    net, x = norm_net(), torch.randn(2, 3, 10, 10)
    run = compiled(net)
    trained(net, run, x)
    assert not any(calls_in(direct, lambda: trained(net, run, x, steps=1)))
    fusedseg.backend = "aten"
    assert all(calls_in(direct, lambda: trained(net, run, x, steps=1)))
    fusedseg.backend = "triton"
    assert all(calls_in(direct, lambda: trained(net, run, x, steps=1)))
    trained(net, run, x)
    assert not any(calls_in(direct, lambda: trained(net, run, x, steps=1)))


def test_modes_and_hooks_see_the_ops(direct, compiled_afresh, monkeypatch):
    """A mode that counts allocations saw none of a replay, and a profiler's hook no launch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from fusedseg.kernels import launcher

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    net, x = norm_net(), torch.randn(2, 3, 10, 10)
    run = compiled(net)
    trained(net, run, x)
    assert replay.direct_stream(None, x) == 0
    with Mode():
        assert replay.direct_stream(None, x) is None
    # Fake tensors launch nothing.
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert replay.direct_stream(None, fake) is None
    assert not any(calls_in(direct, lambda: trained(net, run, x, steps=1)))
    monkeypatch.setattr(launcher, "is_watched", lambda: True)
    assert all(calls_in(direct, lambda: trained(net, run, x, steps=1)))


def test_a_profilers_hooks_use_up_no_tries(direct, compiled_afresh, monkeypatch):
    """After eight calls that a hook had to see, an op was never replayed again."""
    from fusedseg.kernels import launcher

    kernels = spied(monkeypatch, launcher.Launcher, "_launch", lambda result, launch, *given: launch._kernel)
    _, again, x, given = replay_of_a_norm()
    wanted = again(0, x, *given)[0]
    (row,) = direct
    for _ in range(2 * replay.MOST_TRIES):
        for kernel in kernels:
            kernel.pre_run_hooks = [print]
        assert torch.equal(again(0, x, *given)[0], wanted)
    for kernel in kernels:
        kernel.pre_run_hooks = []
    calls = row.calls.count
    for _ in range(STEPS):
        assert torch.equal(again(0, x, *given)[0], wanted)
    assert row.calls.count == calls + 1


def test_a_number_on_another_device_may_come_first(direct, compiled_afresh, monkeypatch):
    """Such a graph was never replayed: its device was taken to be that of its first argument."""
    from fusedseg.compiler.codegen import replays

    net, x = norm_net(), torch.randn(2, 3, 10, 10)
    wanted = replays.replay_launches
    found = []

    def rewritten(graph):
        # The first argument stands on a device that Triton does not serve.
        first = next(node for node in graph.nodes if node.op == "placeholder")
        takes, device = _backend.takes_triton, torch.device("meta")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(first.meta, "val", torch.empty((), device=device))
            patch.setattr(_backend, "takes_triton", lambda of: of != device and takes(of))
            found.append(wanted(graph))
        return found[-1]

    monkeypatch.setattr(replays, "replay_launches", rewritten)
    compiled(net)(x).sum().backward()
    assert len(found) == 2
    assert all(found)


def test_several_sizes_are_not_noted(direct, compiled_afresh):
    net = norm_net()
    run = compiled(net, dynamic=True)
    for size in (10, 12, 10, 10):
        twin = copy.deepcopy(net)
        x = torch.randn(2, 3, size, size)
        torch.testing.assert_close(run(x), twin(x))
    assert not direct


def test_two_arguments_that_are_one_tensor_at_first(direct):
    """Two outputs that are added have one gradient.  A launch with it was noted as if the outputs always had."""

    def joined(*tensors):
        return concat(tensors, 1)

    again = replay.Replay(joined, CPU)
    x, y = (torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last) for _ in range(2))
    for _ in range(STEPS):
        assert torch.equal(again(0, x, x), torch.cat([x, x], 1))
    assert torch.equal(again(0, x, y), torch.cat([x, y], 1))


def test_norms_of_running_statistics_are_replayed(direct, compiled_afresh):
    """In eval mode each call of a norm copied the running mean for nobody, and so it was called in every step."""
    net, x = norm_net().eval(), torch.randn(2, 3, 10, 10)
    twin, run = copy.deepcopy(net), compiled(net)
    with torch.no_grad():
        for _ in range(STEPS):
            torch.testing.assert_close(run(x), twin(x))
    assert direct
    assert all(row.calls.count < STEPS for row in direct)


def test_the_self_test_replays(direct):
    assert first_use.compare("replays", torch.float32, CPU) == 0.0
    (row,) = direct
    assert row.calls.count < replay.COMPARED - 2


def stale(program, x):
    """A program whose first launch reads its first tensor where that was when the launch was noted."""
    first, address = program.launches[0], x.data_ptr()
    changed = first._replace(choose=lambda addresses: first.choose([address, *addresses[1:]]))
    return program._replace(launches=(changed, *program.launches[1:]))


def test_a_replay_that_reads_where_a_tensor_was_is_not_used(direct, stand_in, compiled_afresh, monkeypatch):
    """The self-test finds it before the first replay of a graph."""
    made = replay.program_of
    monkeypatch.setattr(replay, "program_of", lambda tensors, *given: stale(made(tensors, *given), tensors[0]))
    net, x = norm_net(), torch.randn(2, 3, 10, 10)
    twin, run = copy.deepcopy(net), compiled(net)
    with pytest.warns(RuntimeWarning, match="the calls of 'replays' in float32 failed .* Every op makes its launches"):
        found = results(net, run, [x], steps=STEPS)
    assert _backend.proven["replays", CPU] is False
    monkeypatch.setenv("FUSEDSEG_WITHOUT", "replays")
    torch._dynamo.reset()
    assert same(found, results(twin, compiled(twin), [x], steps=STEPS))
