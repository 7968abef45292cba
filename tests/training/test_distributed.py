"""Training in several processes, with DistributedDataParallel, FSDP2 or a resumed run, follows one process."""

import functools
import time

import pytest
import torch

from tests.tools.ranks import COLLECTIVE, RankFailed, on_ranks
from tests.training import jobs

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def one_process(steps, accumulate=1, converted=False):
    """Returns the losses and the state dict of a run in one process."""
    net = jobs.small_net(converted=converted)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    return jobs.train(net, optimizer, *jobs.images(8), steps, accumulate), net.state_dict()


def check_follows(results, expected):
    losses, state = expected
    # All processes have seen equal shares of the batch.
    mean = torch.tensor([of for of, _ in results], dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), **CLOSE)
    for _, of in results:
        if of:
            torch.testing.assert_close(dict(of), dict(state), **CLOSE)


@functools.cache
def results(job, *calls):
    """What both processes return for each call."""
    return [*zip(*on_ranks(2, jobs.each, job, calls), strict=True)]


@pytest.mark.parametrize("name", jobs.PARALLEL)
def test_distributed_data_parallel(name):
    found = results(jobs.ddp, *((4, of) for of in jobs.PARALLEL))[[*jobs.PARALLEL].index(name)]
    check_follows(found, one_process(4, jobs.PARALLEL[name][0]))


@pytest.mark.parametrize("converted", [False, True], ids=["fused blocks", "converted"])
def test_fully_sharded(converted):
    """With FSDP2, rank 0 gets the whole state dict, from which any number of processes can continue."""
    found = results(jobs.fsdp, (4, False), (4, True))[converted]
    check_follows(found, one_process(4, converted=converted))
    net = jobs.small_net(converted=converted)
    net.load_state_dict(found[0][1])


def test_killed_and_resumed(tmp_path):
    """A killed process ends the job with PyTorch's error, and a different number of processes resumes the job."""
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"Connection closed|Connection reset|Timed out") as failed:
        on_ranks(2, jobs.resumable, str(tmp_path), 6, 3)
    assert time.monotonic() - start < COLLECTIVE + 30
    # The surviving process failed in our all-gather.
    assert "exit codes [1, -9], 0 ranks killed" in str(failed.value)
    assert "ops/norm/sync.py" in str(failed.value)
    results = on_ranks(4, jobs.resumable, str(tmp_path), 6)
    losses, _ = one_process(6)
    # Earlier losses are only rank 0's share of the loss.
    mean = torch.tensor(results, dtype=torch.float64).mean(0)[3:]
    torch.testing.assert_close(mean, torch.tensor(losses[3:], dtype=torch.float64), **CLOSE)
