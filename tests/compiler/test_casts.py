"""Casts of many tensors in one call, and both gradients of a convolution in one call, where no peak becomes higher."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedseg import _torch
from fusedseg.compiler.codegen import aten, casts, convolution_backward
from fusedseg.compiler.plan.liveness import Liveness
from fusedseg.compiler.plan.peak import liveness_of
from fusedseg.ops import together
from fusedseg.ops.replay import Allocation
from tests.compiler.fake_step import fake_step
from tests.compiler.networks import calls, compiled, make, under_autocast
from tests.compiler.test_passes import traced
from tests.tools.called import Called

STEPS = 3
CPU = torch.device("cpu")


def one_by_one(monkeypatch):
    """Code as it was before: each tensor is cast where it is read, and each gradient where it is made."""
    monkeypatch.setattr(Liveness, "takes", lambda self, *changes: False)
    torch._dynamo.reset()


def train(net, run, inputs, frozen=()):
    """Losses, gradients, weights and an output in eval mode of some steps of two backward passes; hooks that fire."""
    torch.manual_seed(0)
    seen, found = [], []
    params = {name: param for name, param in net.named_parameters() if not name.startswith(frozen)}
    for name, param in net.named_parameters():
        param.requires_grad_(name in params)
    for name, param in params.items():
        param.register_post_accumulate_grad_hook(lambda param, name=name: seen.append((name, param.grad.dtype)))
    optimizer = torch.optim.SGD(params.values(), 0.005)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            loss = run(*inputs).float().square().mean()
            loss.backward()
        found += [loss.detach().clone(), *(param.grad.clone() for param in params.values())]
        optimizer.step()
        if step == 1:
            net.eval()
            with torch.no_grad():
                found.append(run(*inputs).clone())
            net.train()
    return [*found, *(t.clone() for t in net.state_dict().values())], seen


def test_bits(sources, monkeypatch):
    """Losses, gradients and weights are those of single casts, also in eval mode between steps.

    Gradients accumulate, and the first convolution is frozen.
    """
    net, inputs = make("mixed")
    twin = copy.deepcopy(net)
    found, mine = train(net, compiled(under_autocast(net)), inputs, frozen="0.")
    assert any("casts" in calls(source) for source in sources)
    one_by_one(monkeypatch)
    sources.clear()
    wanted, theirs = train(twin, compiled(under_autocast(twin)), inputs, frozen="0.")
    assert not any("casts" in calls(source) for source in sources)
    assert all(t.isfinite().all() for t in found)
    assert all(map(torch.equal, found, wanted))
    assert mine == theirs
    assert len(mine) == STEPS * 2 * len({name for name, _ in mine})


class Shared(nn.Module):
    """One convolution that runs twice, and whose weight is also the weight of another one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.second(self.first(self.first(x)).relu()))


def test_a_shared_weight_is_cast_once(sources, monkeypatch):
    net, x = Shared(), [torch.randn(2, 4, 16, 16)]
    twin = copy.deepcopy(net)
    found, _ = train(net, compiled(under_autocast(net)), x)
    one_by_one(monkeypatch)
    wanted, _ = train(twin, compiled(under_autocast(twin)), x)
    assert all(map(torch.equal, found, wanted))
    given = [name for args in re.findall(r"_of_casts_\d+\((.*)\)", sources[0]) for name in args.split(", ")]
    assert given
    assert len(given) == len(set(given))


def test_few_casts_are_left(sources, monkeypatch):
    """A step of a network of 28 convolutions made 101 casts, each of them a call."""
    net, _ = make("nnU-Net")
    counts = []
    for _ in range(2):
        compiled(under_autocast(net))(torch.randn(2, 1, 16, 16, 16)).float().square().mean().backward()
        counts.append(sum(name in ("casts", "to") for source in sources for name in calls(source)))
        one_by_one(monkeypatch)
        sources.clear()
    now, before = counts
    assert now < 0.4 * before, counts


def test_no_cast_is_moved_for_several_sizes(sources):
    """What fits beside one size may not fit beside another one."""
    net = under_autocast(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)))
    run = compiled(net, dynamic=True)
    for size in (10, 12):
        x = torch.randn(2, 3, size, size)
        run(x).float().square().mean().backward()
        torch.testing.assert_close(run(x), net(x), atol=1e-2, rtol=1e-2)
    assert sources
    assert not any("casts" in calls(source) for source in sources)


def wide(channels, layers):
    """Images so small that the weights are most of the memory."""
    convs = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(layers)]
    return nn.Sequential(*(layer for conv in convs for layer in (conv, nn.BatchNorm2d(channels), nn.ReLU())))


PEAKS = {
    "weights": (lambda: wide(256, 3), (2, 256, 4, 4)),
    "images": (lambda: wide(16, 3), (2, 16, 128, 128)),
}


@pytest.mark.parametrize("name", PEAKS)
def test_no_peak_becomes_higher(name, monkeypatch):
    """Bytes of the allocations of a step, of any size, beside those of single casts."""
    net, shape = PEAKS[name]

    def bytes_of_a_step():
        return fake_step(under_autocast(net()), [torch.empty(shape)])

    with FakeTensorMode(allow_non_fake_inputs=True):
        found = bytes_of_a_step()
        with monkeypatch.context() as patch:
            one_by_one(patch)
            wanted = bytes_of_a_step()
        assert found.kept == wanted.kept
        assert found.forward <= wanted.forward
        assert found.backward <= wanted.backward
        if name == "weights":
            # Without the count, all weights and all gradients would be there twice.
            monkeypatch.setattr(Liveness, "takes", lambda self, *changes: True)
            torch._dynamo.reset()
            higher = bytes_of_a_step()
            assert max(higher.forward, higher.backward) > max(found.forward, found.backward)


def test_both_gradients_in_one_call_where_there_is_room(sources):
    """Each convolution took two calls for its gradients, where two were needed at the peak alone."""
    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4),
              nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]  # fmt: skip
    net = nn.Sequential(*layers)
    compiled(net)(torch.randn(2, 8, 32, 32)).square().mean().backward()
    *_, backward = sources
    assert calls(backward).count(convolution_backward.convolution_backward.__name__) < 3
    # Without autocast there is no cast.
    assert not any("casts" in calls(source) for source in sources)


@pytest.mark.parametrize("rows", [4, 1], ids=["whole", "a part"])
def test_no_cast_waits_that_would_keep_a_larger_tensor(rows, monkeypatch):
    """What a graph returns as a part of a tensor is cast where it is, so that the tensor is let go."""

    def run(x):
        parts = [aten.aten.slice.Tensor(aten.aten.mul.Tensor(x, n), 0, 0, rows) for n in (2, 3)]
        return [aten.aten._to_copy.default(part, dtype=torch.float32) for part in parts]

    monkeypatch.setattr(Liveness, "takes", lambda self, *changes: True)
    module = traced(run, torch.ones(4, 3, dtype=torch.bfloat16))
    assert casts.batch_casts(module.graph, liveness_of(module.graph)) == (rows == 4)
    module.graph.lint()


def test_seen_tensors_are_cast_one_by_one():
    """A mode that counts allocations does not see the short allocation."""
    x = torch.randn(2, 3).to(torch.bfloat16)
    call = together.Casts((Allocation((2, 3), (3, 1), torch.float32),) * 2, CPU)
    with Called() as called:
        found = call(x, 2 * x)
    assert called.names.count("_to_copy") == 2
    assert all(map(torch.equal, found, call(x, 2 * x)))


def test_the_trees_of_cuda_graphs_record_one_call(monkeypatch):
    """Their modes look at branches and loops alone.  They were taken for observers: casts were recorded one by one."""
    from torch._inductor import cudagraph_trees as trees

    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    made: list[int] = []
    copy, zero = _torch.foreach_copy, _torch.foreach_zero
    monkeypatch.setattr(_torch, "foreach_copy", lambda to, tensors: made.append(len(to)) or copy(to, tensors))
    monkeypatch.setattr(_torch, "foreach_zero", lambda to: made.append(len(to)) or zero(to))
    forms, x = (Allocation((2, 3), (3, 1), torch.float32),) * 2, torch.randn(2, 3, dtype=torch.bfloat16)
    modes = [make for name, make in vars(trees).items() if name.endswith("DispatchMode")]
    for mode in modes:
        with mode():
            assert all(torch.equal(y, x.float()) for y in together.Casts(forms, CPU)(x, x))
            assert not any(map(torch.any, together.Zeros(forms, CPU)()))
    assert made == [2, 2] * len(modes)
    assert len(modes) == 2 or torch.__version__ < "2.13"
