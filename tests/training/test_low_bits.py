"""Networks that keep 4 bits a value, in several processes, with a scaler, and under ``torch.compile``."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusedseg
from fusedseg import _torch
from tests.tools.ranks import on_ranks
from tests.training import jobs


def exact_gradient():
    net = jobs.packed_net(bits=None)
    jobs.packed_loss(net).backward()
    return jobs.gradient_of(net)


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_ranks_round_differently_and_get_one_gradient(sharded):
    """All ranks have the same images, so their own gradients would be equal without rounding."""
    results, expected = on_ranks(2, jobs.packed, sharded), exact_gradient()
    first, second = results
    assert first["loss"] == second["loss"]
    assert torch.equal(first["gradient"], second["gradient"])
    error = (first["gradient"] - expected).norm() / expected.norm()
    # 4 bits have an error of about .03 here, and two ranks have independent ones.
    assert 1e-4 < error < 0.1
    assert first["generator moved"] is second["generator moved"] is False
    if not sharded:
        assert not torch.equal(first["own gradient"], second["own gradient"])


def test_a_step_that_overflows_is_skipped():
    net = jobs.packed_net(bits=4)
    before, scaler = jobs.parameters_of(net), torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-36)
    optimizer, moved = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = jobs.packed_loss(net)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved.append(not torch.equal(jobs.parameters_of(net), before))
        assert jobs.parameters_of(net).isfinite().all()
    assert moved == [False, True]


def test_a_value_that_is_not_finite_reaches_the_gradient():
    conv, x = nn.Conv2d(8, 4, 3), torch.randn(2, 8, 32, 32, requires_grad=True)
    with torch.no_grad():
        x[0, 0, 0, 0] = torch.inf
    with fusedseg.recompute(bits=4):
        loss = conv(x * 1).nan_to_num(0.0, 0.0, 0.0).sum()
    loss.backward()
    assert not conv.weight.grad[:, 0].isfinite().any()


@pytest.mark.skipif(not _torch.COMPILES_SCOPES, reason="the scope does nothing in compiled code, and says so")
def test_compiled_code_warns_once():
    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    x = torch.randn(1, 3, 16, 16)
    report = fusedseg.convert(net, example_inputs=x, bits=4)
    assert report.bits == 4
    compiled = torch.compile(net, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            F.relu(compiled(x)).sum().backward()
    told = [str(warning.message) for warning in caught if "bits has no effect in compiled code" in str(warning.message)]
    assert len(told) == 1


@pytest.mark.skipif(not _torch.COMPILES_SCOPES, reason="the scope does nothing in compiled code, and says so")
def test_compiled_code_says_that_it_rounds_nothing():
    torch._dynamo.reset()
    conv, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 16, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def inside(x):
        with fusedseg.recompute(bits=4):
            return conv(x)

    with pytest.warns(UserWarning, match="bits has no effect in compiled code"):
        inside(x).sum().backward()
    around = torch.compile(conv, backend="aot_eager")
    with pytest.warns(UserWarning, match="bits has no effect in compiled code"), fusedseg.recompute(bits=4):
        around(x).sum().backward()
