"""Two processes through the backend: DistributedDataParallel, whole and split into buckets, and FSDP2."""

import pytest
import torch

from tests.compiler import jobs
from tests.compiler.networks import BOTH
from tests.tools.ranks import on_ranks


@BOTH
@pytest.mark.parametrize(
    ("job", "options"), [(jobs.ddp, (25,)), (jobs.ddp, (0.002,)), (jobs.fsdp, ())], ids=["DDP", "DDP, split", "FSDP2"]
)
def test_gradients_are_those_of_one_process(job, options, codegen):
    for found in on_ranks(2, job, codegen, *options):
        for ours, whole in zip(found, jobs.gradients_of_all(2), strict=True):
            torch.testing.assert_close(ours, whole, rtol=1e-9, atol=1e-12)
