"""Training in several processes, with DistributedDataParallel, FSDP2 or a resumed run, follows one process."""

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


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (1, {}),
        (1, {"broadcast_buffers": False, "find_unused_parameters": True}),
        (1, {"gradient_as_bucket_view": True, "static_graph": True}),
        (2, {}),
    ],
    ids=["plain", "no broadcast, unused sought", "static graph", "no_sync"],
)
def test_distributed_data_parallel(accumulate, options):
    check_follows(on_ranks(2, jobs.ddp, 6, accumulate, options), one_process(6, accumulate))


@pytest.mark.parametrize("converted", [False, True], ids=["fused blocks", "converted"])
def test_fully_sharded(converted):
    """With FSDP2, rank 0 gets the whole state dict, from which any number of processes can continue."""
    results = on_ranks(2, jobs.fsdp, 5, converted)
    check_follows(results, one_process(5, converted=converted))
    net = jobs.small_net(converted=converted)
    net.load_state_dict(results[0][1])


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
