"""Which channels are kept, and when a module updates its list of kept channels."""

import weakref
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.activation import Activation
from fusedseg.ops.check import wide_dtype
from fusedseg.ops.norm import kept
from fusedseg.ops.norm.kept import Kept, KeptChannels, find
from tests.tools.called import Called

LEAKY = Activation("leaky_relu", 0.01)


ELU, SMALL_ELU, SELU = Activation("elu", 1.0), Activation("elu", 0.01), Activation("selu", 0.0)


@pytest.mark.parametrize(
    ("dtype", "act", "weight", "bias", "is_kept"),
    [
        (torch.float32, LEAKY, 1.0, 64.0, False),
        (torch.float32, LEAKY, 1.0, 65.0, True),
        (torch.float32, LEAKY, -1.0, 64.0, False),
        (torch.float32, LEAKY, 0.0, 0.0, True),
        (torch.float32, LEAKY, 1e-30, 0.0, False),
        (torch.bfloat16, LEAKY, 0.1, 0.7, False),
        (torch.bfloat16, LEAKY, 0.1, 0.9, True),
        (torch.bfloat16, LEAKY, 1e-30, 0.0, False),
        # The slope moves this value below fp16's normal range.
        (torch.float16, LEAKY, 1e-3, 0.0, False),
        (torch.float16, LEAKY, 1e-4, 0.0, True),
        (torch.float64, LEAKY, 1.0, 4096.0, False),
        (torch.float64, LEAKY, 1.0, 4097.0, True),
        # Near 0, elu multiplies negative values by alpha.  The choice of kept channels assumed an alpha of 1.
        (torch.float16, ELU, 2e-5, 0.0, False),
        (torch.float16, SMALL_ELU, 2e-5, 0.0, True),
        # The others saturate.
        (torch.bfloat16, LEAKY, 2.0, 0.0, False),
        (torch.bfloat16, LEAKY, 0.2, -1.5, False),
        *((*case[:1], act, *case[1:]) for act in (ELU, SELU) for case in (
            (torch.float32, 2.2, 0.0, False),
            (torch.float32, -2.3, 0.0, True),
            (torch.float32, 1.0, -3.1, False),
            (torch.float32, 1.0, -3.3, True),
            (torch.float32, 3.0, 6.0, False),
            (torch.bfloat16, 1.0, 0.0, False),
            (torch.bfloat16, 2.0, 0.0, True),
            # exp(1.5) - 1 is above 8 * 0.2, though the bias is not.
            (torch.bfloat16, 0.2, -1.5, True),
            (torch.float64, 3.0, 0.0, False),
            (torch.float64, 6.0, 0.0, True),
        )),
    ],
)  # fmt: skip
def test_threshold(dtype, act, weight, bias, is_kept):
    given = (torch.tensor(of, dtype=wide_dtype(dtype)) for of in ([1.0, weight], [0.0, bias]))
    found = find(*given, act, dtype)
    assert (found is not None) == is_kept
    if found is not None:
        assert found.slots.tolist() == [-1, 0]
        assert found.count == 1


def test_the_residual_decides_what_is_kept():
    weight, bias = torch.tensor([1.0, 0.1, 0.01, 0.0]), torch.zeros(4)
    assert find(weight, bias, LEAKY, torch.bfloat16).index.tolist() == [3]
    assert find(weight, bias, LEAKY, torch.bfloat16, residual=True).index.tolist() == [1, 2, 3]
    assert find(weight, bias, LEAKY, torch.float32, residual=True).index.tolist() == [2, 3]


def test_half_precision_parameters_and_missing_ones():
    zeros = torch.zeros(2, dtype=torch.bfloat16)
    assert find(zeros, zeros, LEAKY, torch.bfloat16).count == 2
    assert find(None, None, LEAKY, torch.float32) is None
    assert find(torch.zeros(2), None, LEAKY, torch.float32).count == 2
    assert find(None, torch.tensor([0.0, 100.0]), LEAKY, torch.float32).slots.tolist() == [-1, 0]


def test_channels_of_a_range():
    mask = torch.tensor([False, True, True, False, True])
    of = Kept(torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32), 3, mask)
    for c, into, slots in (
        (slice(2, 5), [0, 2], slice(1, 3)),
        (slice(None), [1, 2, 4], slice(0, 3)),
        (slice(3, 4), [], slice(2, 2)),
    ):
        found = of.within(c)
        assert found[0].tolist() == into
        assert found[1] == slots


@pytest.mark.parametrize(
    "norm", [fusedseg.InPlaceABN, fusedseg.InPlaceInstanceNormAct, partial(fusedseg.InPlaceGroupNormAct, 2)]
)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_list_older_than_the_parameters_gives_finite_gradients(backend, norm, rows, dtype, monkeypatch):
    """Weights that were set to 0 through ``.data``, as masks for pruning do, had NaN gradients on aten."""
    monkeypatch.setattr(KeptChannels, "refresh", lambda *args: None)
    torch.manual_seed(0)
    for value in (0.0, 1e-38, 1e-20):
        net = norm(4, affine=True)
        net.weight.data[:3] = value
        net.bias.data[:3] = torch.tensor([0.0, 0.3, -50.0])
        x = torch.randn(2, 4, 5, 5, dtype=dtype).requires_grad_()
        given = x.to(memory_format=torch.channels_last) if rows else x
        net(given * 1).square().mean().backward()
        for found in (x.grad, net.weight.grad, net.bias.grad):
            assert found.isfinite().all()
        assert net.weight.grad[3].abs() > 1e-3


def test_on_a_cpu_a_change_through_data_is_seen_at_once():
    net = fusedseg.InPlaceABN(3)
    x = torch.randn(2, 3, 4, 4)
    net(x.clone())
    net.weight.data[1] = 0
    net(x.clone())
    assert net._kept.kept.index.tolist() == [1]


class Arrival(kept.Arriving):
    """A copy to the host that ends when the test says so."""

    made: ClassVar[list["Arrival"]] = []

    def __init__(self, mask):
        self.mask = mask.clone()
        self.arrived = self.waited = False
        self.made.append(self)

    def here(self):
        return self.arrived

    def wait(self):
        self.arrived = self.waited = True


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The rule for GPUs, with copies that end when the test says so; returns the list of the copies."""
    kept._watch_optimizers()
    monkeypatch.setattr(KeptChannels, "_may_lag", staticmethod(lambda weight, bias: bias is not None))
    monkeypatch.setattr(kept, "Arriving", Arrival)
    monkeypatch.setattr(kept, "_trackers", weakref.WeakSet())
    # A test that compiled a module before has made every step refresh all modules.
    monkeypatch.setattr(kept, "_compiled", False)
    monkeypatch.setattr(Arrival, "made", [])
    return Arrival.made


def step_to(weight, values):
    """An optimizer's step."""
    weight.grad = weight.detach() - torch.tensor(values)
    torch.optim.SGD([weight], lr=1.0).step()


def test_list_lags_behind_an_optimizer_only(as_on_a_gpu):
    arrivals = as_on_a_gpu
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    tracker = KeptChannels()

    def count():
        found = tracker.refresh(weight, bias, LEAKY, torch.float32)
        return found.count if found else 0

    assert count() == 0
    step_to(weight, [0.0, 1.0, 1.0])
    assert count() == 0
    assert count() == 0
    arrivals[0].arrived = True
    assert count() == 1
    assert len(arrivals) == 1
    # A change of the parameters without an optimizer is seen at once.
    nn.init.zeros_(weight)
    assert count() == 3
    step_to(weight, [1.0, 0.0, 0.0])
    nn.init.zeros_(weight)
    tracker.forget()
    assert count() == 3
    assert [of.waited for of in arrivals] == [False, True]
    # Some optimizers step on ``.data``.
    weight.data.fill_(1)
    step_to(weight, [1.0, 1.0, 1.0])
    assert (count(), len(arrivals)) == (3, 3)
    arrivals[2].arrived = True
    assert count() == 0


def test_a_replica_of_data_parallel_has_a_list_of_its_own(as_on_a_gpu):
    """It shared the list of its module, whose tensor is on another GPU."""
    net, x = fusedseg.InPlaceABN(3), torch.randn(2, 3, 4, 4)
    net(x.clone())
    step_to(net.weight, [0.0, 1.0, 1.0])
    replica = net._replicate_for_data_parallel()
    replica.weight, replica.bias = (p.detach().clone().requires_grad_() for p in (net.weight, net.bias))
    replica(x.clone())
    assert replica._kept.kept.count == 1
    assert net._kept.kept is None
    assert as_on_a_gpu == []


def test_a_step_asks_once_for_all_modules(as_on_a_gpu):
    """Each of 18 modules made eleven device ops, a pinned allocation and an event after every step."""
    layers = [fusedseg.InPlaceABN(4, activation=act) for act in ("leaky_relu", "elu") * 9]

    def refresh():
        return [layer._kept.refresh(layer.weight, layer.bias, layer._act, torch.float16) for layer in layers]

    assert refresh() == [None] * 18
    step_to(layers[3].weight, [1.0, 0.0, 1.0, 1.0])
    with Called() as first:
        refresh()
    # The first request also writes the limits of all channels to the device.
    assert len(as_on_a_gpu) == 1
    step_to(layers[5].weight, [0.0, 1.0, 1.0, 0.0])
    with Called() as counted:
        assert refresh() == [None] * 18
    # The clone stands for the copy to the host.
    saturating = ["pow", "sub_", "add_", "expm1_", "maximum"]
    assert counted.names == ["cat", "abs", "clamp_", *saturating, "abs", "mul_", "gt", "clone"]
    assert len(first.names) <= len(counted.names) + 6
    as_on_a_gpu[-1].arrived = True
    found = refresh()
    assert {k: of.slots.tolist() for k, of in enumerate(found) if of} == {3: [-1, 0, -1, -1], 5: [0, -1, -1, 1]}
    # An equal list is not copied to the device again.
    step_to(layers[0].weight, [1.0, 1.0, 1.0, 1.0])
    refresh()
    as_on_a_gpu[-1].arrived = True
    assert refresh() == found


def test_an_optimizer_without_hooks_makes_the_host_wait_once(as_on_a_gpu):
    """Every module waited two or three times."""
    weights, bias = [nn.Parameter(torch.ones(3)) for _ in range(18)], nn.Parameter(torch.zeros(3))
    trackers = [KeptChannels() for _ in weights]

    def refresh():
        pairs = zip(trackers, weights, strict=True)
        return [of.refresh(weight, bias, LEAKY, torch.float32) is not None for of, weight in pairs]

    assert not any(refresh())
    with torch.no_grad():
        for weight in weights:
            weight[1] = 0
    assert all(refresh())
    assert [of.waited for of in as_on_a_gpu] == [True]


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_list_must_be_known_before_a_capture(as_on_a_gpu, monkeypatch):
    """The list of a module that had not run before the capture of a graph was taken as empty, or as that of fp32."""
    weight, bias = (torch.tensor([0.0, of, 9.0]).as_subclass(OnGPU) for of in (1.0, 0.0))
    tracker = KeptChannels()
    monkeypatch.setattr(tracker, "_wait_for_slots", lambda slots: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run one forward pass of the same dtype before the capture"):
        tracker.refresh(weight, bias, LEAKY, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    found = tracker.refresh(weight, bias, LEAKY, torch.float32)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tracker.refresh(weight, bias, LEAKY, torch.float32) is found
    assert found.count == 1
    with pytest.raises(RuntimeError, match="same dtype"):
        tracker.refresh(weight, bias, LEAKY, torch.float16)


class Stream:
    """A stream that notes its calls."""

    def __init__(self):
        self.calls = []

    def record_event(self):
        self.calls.append("record")
        return self

    def wait_event(self, event):
        self.calls.append(("wait", event))


def test_another_stream_waits_for_slots(monkeypatch):
    """The event stood before the slots' copy, and the allocator could give the slots' memory away."""
    used = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda slots, stream: used.append((slots, stream)))
    tracker, first, second = KeptChannels(), Stream(), Stream()
    for stream in (first, first, second, second):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        slots = tracker.kept.slots if tracker.kept else None
        if slots is None:
            tracker._use(torch.tensor([False, True]), torch.device("cpu"))
            assert not first.calls
            slots = tracker.kept.slots
        tracker._wait_for_slots(slots)
    assert first.calls == ["record"]
    assert second.calls == [("wait", first)] * 2
    assert used == [(slots, second)] * 2


def test_a_step_on_fake_tensors_refreshes_real_modules(monkeypatch):
    """An optimizer's step under a fake mode failed at real modules, whose values the mode hides.

    Once anything was compiled, an optimizer's step looks at all modules.
    """
    monkeypatch.setattr(kept, "_compiled", False)
    kept.serve_compiled_code()
    layer = fusedseg.InPlaceABN(3)
    with torch.no_grad():
        layer.weight[1] = 0
    with FakeTensorMode():
        p = nn.Parameter(torch.ones(2))
        p.grad = torch.ones(2)
        torch.optim.SGD([p], 0.1).step()
    assert layer._kept_slots.tolist() == [-1, 0, -1]
