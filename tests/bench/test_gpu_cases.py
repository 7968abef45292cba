"""Each network of the goals on a GPU can be built and takes its input, at full size on fake tensors."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import test_convert, test_unet


@pytest.mark.parametrize("name", ["eager", "ours"])
@pytest.mark.parametrize("case", test_unet.CASES["cuda"], ids=str)
def test_unets(case, name):
    with FakeTensorMode():
        x = torch.empty(case.batch, sum(case.channels), *case.size).to(memory_format=case.memory_format())
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == "amp"):
            out = case.network(name)(x)
    assert out.shape == (case.batch, test_unet.CLASSES, *case.size)


@pytest.mark.parametrize("case", test_convert.CASES["cuda"], ids=str)
def test_stock_networks(case):
    with FakeTensorMode():
        out = case.make()(torch.empty(case.shape))
    assert out.shape == (case.shape[0], test_convert.CLASSES, *(case.shape[2:] if case.dense else ()))
