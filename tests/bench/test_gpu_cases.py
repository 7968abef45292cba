"""Each network of the goals on a GPU can be built and takes its input, at full size on fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import test_unet


@pytest.mark.parametrize("name", ["eager", "ours"])
@pytest.mark.parametrize("case", test_unet.CASES["cuda"], ids=str)
def test_unets(case, name):
    with FakeTensorMode():
        x = torch.empty(case.batch, sum(case.channels), *case.size).to(memory_format=case.memory_format())
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "amp"):
            out = case.network(name)(x)
    assert out.shape == (case.batch, test_unet.CLASSES, *case.size)
