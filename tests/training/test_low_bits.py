"""Networks that the backend lets keep 4 bits a value, in several processes and with a scaler."""

import pytest
import torch

from tests.tools.ranks import on_ranks
from tests.training import jobs


def exact_gradient():
    net = jobs.packed_net(bits=None)
    jobs.packed_loss(net).backward()
    return jobs.gradient_of(net)


@pytest.mark.parametrize(
    "sharded", [pytest.param(False, id="DDP"), pytest.param(True, id="FSDP2", marks=pytest.mark.slow)]
)
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
    moved, _ = jobs.overflowing_steps(jobs.packed_net(bits=4), jobs.packed_loss)
    assert moved == [False, True]
