"""Which channels are kept, and when a module updates its list of kept channels."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedseg
from fusedseg.activation import Activation
from fusedseg.ops.norm import kept
from fusedseg.ops.norm.kept import Kept, KeptChannels, find

LEAKY = Activation("leaky_relu", 0.01)


@pytest.mark.parametrize(
    ("dtype", "weight", "bias", "is_kept"),
    [
        (torch.float32, 1.0, 64.0, False),
        (torch.float32, 1.0, 65.0, True),
        (torch.float32, -1.0, 64.0, False),
        (torch.float32, 0.0, 0.0, True),
        (torch.float32, 1e-30, 0.0, False),
        (torch.bfloat16, 0.1, 0.7, False),
        (torch.bfloat16, 0.1, 0.9, True),
        (torch.bfloat16, 1e-30, 0.0, False),
        # The slope moves this value below fp16's normal range.
        (torch.float16, 1e-3, 0.0, False),
        (torch.float16, 1e-4, 0.0, True),
        (torch.float64, 1.0, 4096.0, False),
        (torch.float64, 1.0, 4097.0, True),
    ],
)
def test_threshold(dtype, weight, bias, is_kept):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = find(torch.tensor([1.0, weight], dtype=wide), torch.tensor([0.0, bias], dtype=wide), LEAKY, dtype)
    assert (found is not None) == is_kept
    if found is not None:
        assert found.slots.tolist() == [-1, 0]
        assert found.count == 1


def test_threshold_of_an_elu_that_makes_small_values_smaller():
    """Near 0, elu multiplies negative values by alpha.  The choice of kept channels assumed an alpha of 1."""
    weight, bias = torch.tensor([1.0, 2e-5]), torch.zeros(2)
    assert find(weight, bias, Activation("elu", 1.0), torch.float16) is None
    assert find(weight, bias, Activation("elu", 0.01), torch.float16).slots.tolist() == [-1, 0]


def test_gradients_of_an_elu_that_makes_small_values_smaller():
    torch.manual_seed(0)
    x = torch.randn(4, 2, 8, 8).half()
    # This gradient is similar to xhat, so dx subtracts most of it.  It is so large that dx is not a subnormal number.
    dz = 256 * (x + 0.5)
    exact, half = (dx_of_elu(x, dz, dtype).transpose(0, 1).flatten(1) for dtype in (torch.float64, torch.float16))
    # This is fp16's bound in docs/design.md; the error of the second channel was 0.12.
    assert ((half - exact).norm(dim=1) < 2e-3 * exact.norm(dim=1)).all()


def dx_of_elu(x, dz, dtype):
    net = fusedseg.InPlaceABN(2, activation="elu", activation_param=0.01)
    net = net.double() if dtype == torch.float64 else net
    with torch.no_grad():
        net.weight.copy_(torch.tensor([1.0, 2e-5]))
    leaf = x.to(dtype).requires_grad_()
    net(leaf * 1).backward(dz.to(dtype))
    return leaf.grad.double()


def test_half_precision_parameters_and_missing_ones():
    assert (
        find(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), LEAKY, torch.bfloat16).count
        == 2
    )
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


class Arrival:
    """Replaces the event that marks the end of an asynchronous copy."""

    def __init__(self):
        self.here = False

    def query(self):
        return self.here


def test_list_lags_behind_an_optimizer_only(monkeypatch):
    """The rule for GPUs, with a copy that ends when the test says so."""
    arrivals = []

    def request(self, weight, bias, act, dtype, residual):
        mask = torch.from_numpy((weight == 0).numpy().copy())
        arrivals.append(Arrival())
        self._pending = (kept.slots_of(mask), mask, arrivals[-1])

    kept._watch_optimizers()
    monkeypatch.setattr(KeptChannels, "_may_lag", staticmethod(lambda weight, bias: True))
    monkeypatch.setattr(KeptChannels, "_request", request)
    weight, bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
    tracker = KeptChannels()

    def count():
        found = tracker.refresh(weight, bias, LEAKY, torch.float32)
        return found.count if found else 0

    def optimizer_step():
        weight.grad = torch.tensor([1.0, 0.0, 0.0])
        torch.optim.SGD([weight], lr=1.0).step()

    assert count() == 0
    optimizer_step()
    assert weight.tolist() == [0.0, 1.0, 1.0]
    assert count() == 0
    assert count() == 0
    arrivals[0].here = True
    assert count() == 1
    assert len(arrivals) == 1
    # A change of the parameters without an optimizer is seen at once.
    nn.init.zeros_(weight)
    assert count() == 3
    optimizer_step()
    nn.init.zeros_(weight)
    tracker.forget()
    assert count() == 3
    assert len(arrivals) == 1
    # Some optimizers step on ``.data``.
    weight.data.fill_(1)
    optimizer_step()
    assert (count(), len(arrivals)) == (3, 2)


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
