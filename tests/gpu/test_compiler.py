"""The compiler backend with both codegens: exact, with a budget, and with 8 bits; against float64 on the CPU.

The network has four convolutions, because Inductor takes a minute and more for a real one.
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedseg.compiler.plan import choose
from tests.compiler.networks import HAS_CXX, compiled, kept
from tests.reference import relative_error
from tests.tools.marks import slow

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiled_afresh")]
SHAPE = (2, 3, 48, 40)


class Net(nn.Module):
    """Batch, instance and group norms, activations in place, a pool, an enlarged map and a residual.

    On a GPU the kernels of this package enlarge the map, so that two steps give the same bits.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.down = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )  # fmt: skip
        self.last = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 1))

    def forward(self, x):
        x = self.first(x)
        return self.last(x + F.interpolate(self.down(x), scale_factor=2.0, mode="bilinear"))


class Way(NamedTuple):
    """Options of the backend, the share of eager mode's bytes that are kept at most, and the largest error."""

    options: dict[str, Any]
    most: float
    error: float
    half: bool = False
    # Whether the model is given in channels_last.
    rows: bool = False


# In fp32 gradients are off by 2e-6 on a CPU, which adds in another order than a GPU.  A value with 8 bits is off by
# 1 %, the roundings average to 0.3 % of the gradient, and bf16 rounds each value by up to 0.4 %.
EXACT = 2e-5
WAYS = {
    "exact": Way({}, 0.35, EXACT),
    "budget": Way({"budget": 0.2}, 0.2, EXACT),
    # The ranges of groups that do not mix what a norm scales differently take .004.  The input of the group norm takes
    # .012: a norm may not read the sum of an activation and an interpolation of packed values, so it is packed itself.
    "bits": Way({"bits": 8}, 0.12, 0.01),
    "autocast": Way({}, 0.35, 0.03, half=True, rows=True),
    # On a GPU its convolutions compute in channels_last all the same.
    "autocast, contiguous": Way({}, 0.35, 0.03, half=True),
    "norms in convolutions": Way({"fused_convolutions": True}, 0.35, 0.03, half=True, rows=True),
}


class Step(NamedTuple):
    out: Tensor
    gradient: Tensor
    buffers: Tensor


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten().double().cpu() for t in tensors])


def two_steps(net: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, half: bool = False) -> list[Step]:
    optimizer, steps = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
            out = run(x)
        weights = torch.linspace(-1, 1, out.numel(), device=x.device).view_as(out)
        (out * (weights + out)).mean().backward()
        steps.append(Step(flat([out]), flat(p.grad for p in net.parameters()), flat(net.buffers())))
        optimizer.step()
    return steps


# The markers leave them out of a run on a CPU that does not ask for `gpu`; ``test_ways.py`` has such graphs.
@pytest.mark.parametrize("codegen", ["aten", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow(WAYS, "budget", "autocast", "autocast, contiguous"))
def test_two_steps(device, name, codegen, monkeypatch):
    """Outputs, gradients and statistics of two optimizer steps, the format of the output, kept bytes, equal bits."""
    if codegen == "inductor" and device.type == "cpu" and not HAS_CXX:
        pytest.skip("Inductor needs a C++ compiler")
    way = WAYS[name]
    if "fused_convolutions" in way.options and device.type == "cuda":
        pytest.importorskip("cudnn")
    if "bits" in way.options:
        # By Inductor's count, the step of so small a network peaks lower without bits.
        monkeypatch.setattr(choose.StepBytes, "is_within", lambda cost, most: True)
    torch.manual_seed(0)
    net, x = Net(), torch.randn(SHAPE)
    exact = copy.deepcopy(net).double()
    wanted = two_steps(exact, exact, x.double())

    fmt = torch.channels_last if way.rows else torch.contiguous_format
    # For Inductor on a CPU, PyTorch takes the interpolation apart.  Its sums have terms of one layer, so these and what
    # comes before them are exact.
    most = 0.2 if name == "bits" and codegen == "inductor" and device.type == "cpu" else way.most
    # On a GPU, Inductor copies an image to channels_last, and keeps the copy for the gradient of the first weight.
    copied = x.nbytes if codegen == "inductor" and device.type == "cuda" and not way.rows else 0
    net, x = net.to(device, memory_format=fmt), x.to(device, memory_format=fmt)
    begin = copy.deepcopy(net.state_dict())
    run = compiled(net, codegen, **way.options)
    found = two_steps(net, run, x, way.half)
    for i, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        # Bits round nothing in forward.
        forward = EXACT if "bits" in way.options and i == 0 else way.error
        assert relative_error(mine.out, theirs.out) <= forward, i
        assert relative_error(mine.gradient, theirs.gradient) <= way.error, i
        assert relative_error(mine.buffers, theirs.buffers) <= forward, i
    # cuDNN's plans may add in any order, and the first step measures them.
    if not way.options.keys() & {"bits", "fused_convolutions"}:
        # Launches are noted in the third step at the earliest, and made again without the ops from then on.
        for _ in range(3):
            net.load_state_dict(begin)
            again = two_steps(net, run, x, way.half)
            assert all(
                torch.equal(a, b) for one, two in zip(found, again, strict=True) for a, b in zip(one, two, strict=True)
            )
    with torch.autocast(device.type, torch.bfloat16, enabled=way.half):
        assert run(x).stride() == net(x).stride()
        assert kept(net, run, [x]) <= most * kept(net, net, [x]) + copied
