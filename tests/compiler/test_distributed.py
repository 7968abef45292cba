"""Two processes through the backend: DistributedDataParallel, whole and split into buckets, and FSDP2."""

import pytest
import torch

from tests.compiler import jobs
from tests.compiler.networks import BOTH
from tests.tools.ranks import on_ranks

CASES = {
    "DDP": (jobs.ddp, (25,)),
    "DDP, split": (jobs.ddp, (0.002,)),
    "FSDP2, blocks": (jobs.fsdp, ("blocks", False)),
    "FSDP2, blocks, compiled first": (jobs.fsdp, ("blocks", True)),
    "FSDP2, root": (jobs.fsdp, ("root", False)),
    "FSDP2, root, compiled first": (jobs.fsdp, ("root", True)),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(name, codegen):
    """With ``fully_shard`` on blocks nothing was compiled, and gradients had eager mode's bits."""
    job, options = CASES[name]
    for found, is_less in on_ranks(2, job, codegen, *options):
        assert is_less
        for ours, whole in zip(found, jobs.gradients_of_all(2), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
