"""The scope under ``torch.compile``, with ops that write to their arguments."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedseg import recompute

RAN = []


@torch.library.custom_op("fusedseg_tests::plus_one_into", mutates_args={"out"})
def plus_one_into(x: Tensor, out: Tensor) -> None:
    RAN.append(x.shape)
    torch.add(x, 1, out=out)


@plus_one_into.register_fake
def _(x: Tensor, out: Tensor) -> None:
    return None


@pytest.mark.parametrize("around", [False, True])
def test_an_op_that_writes_runs_once(around):
    """What it has written is kept, because it is not known what else such an op does."""
    torch._dynamo.reset()
    conv, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)

    def step(x):
        y = conv(x)
        out = torch.empty_like(y)
        plus_one_into(y.detach(), out)
        return (F.silu(y) * out).square().sum()

    expected = torch.autograd.grad(step(x), [*conv.parameters()])

    def inside(x):
        with recompute():
            return step(x)

    run = torch.compile(step if around else inside, backend="aot_eager", fullgraph=True)
    RAN.clear()
    loss = recompute()(run)(x) if around else run(x)
    for got, wanted in zip(torch.autograd.grad(loss, [*conv.parameters()]), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    assert len(RAN) == 1
    torch._dynamo.reset()
