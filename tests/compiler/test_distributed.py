"""Two processes through the backend: DistributedDataParallel, whole and split into buckets, and FSDP2."""

import pytest
import torch

from tests.compiler import jobs
from tests.compiler.networks import BOTH
from tests.tools.ranks import on_ranks

# The most that a step keeps of eager mode's bytes.
MOST = {"DDP, split": 0.9, "DDP of the compiled model": 0.6, "FSDP2": 0.6}


@BOTH
@pytest.mark.parametrize("way", jobs.WAYS)
def test_gradients_are_those_of_one_process_and_less_is_kept(way, codegen):
    """With a network that is an ``nn.Sequential`` itself, this test compiled nothing, and compared eager mode."""
    of_all, eager = jobs.gradients_of_all(2), on_ranks(2, jobs.step, way, None)
    for (found, kept), (_, kept_in_eager_mode) in zip(on_ranks(2, jobs.step, way, codegen), eager, strict=True):
        print(way, codegen, kept_in_eager_mode, kept)
        assert kept < MOST[way] * kept_in_eager_mode
        for ours, whole in zip(found, of_all, strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
