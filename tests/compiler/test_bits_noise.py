"""The noise of the option "bits" in whole networks; ``test_bits_property.py`` has norms, activations and the rest."""

import pytest
import torch
from torch import nn

from fusedseg import _torch
from tests.compiler.bits_cases import IMAGE, MOST
from tests.compiler.networks import compiled, kept, make
from tests.compiler.test_bits import error_of
from tests.tools.marks import slow

# These networks judge the rounding, and are so small that some are exact without this; test_bits_peak.py has the bytes.
pytestmark = pytest.mark.usefixtures("packed")

LARGE = {"two encoders": 0.09, "nnU-Net": 0.1, "ResNet": 0.16}
SIDES = {"ResNet": 128, "nnU-Net": 16}


# ``test_bits.py`` has a U-Net, and ``test_budget.py`` nnU-Net's.
@pytest.mark.parametrize("name", slow(LARGE, "two encoders", "nnU-Net"))
def test_networks(name):
    net, inputs = make(name)
    inputs = [torch.randn(2, x.shape[1], *(SIDES.get(name, 32),) * (x.dim() - 2)) for x in inputs]
    stock = kept(net, net, inputs)
    torch._dynamo.reset()
    assert kept(net, compiled(net, bits=4), inputs) < LARGE[name] * stock
    torch._dynamo.reset()
    # The error needs fewer values than the bytes.
    # Few weights have most of the noise, so 16 roundings leave a bias of up to 0.08 of it, and 64 of about 0.01.
    found = error_of(net, [x[..., :64, :64].clone() for x in inputs], 4, 64)
    assert 0 < found.size < 0.12
    assert found.bias < MOST


@pytest.mark.skipif(bool(_torch.inductor_problem()), reason="Inductor needs a C++ compiler")
def test_inductor():
    """Inductor lays 2D tensors out as channels_last, which the graph's strides do not say."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.LeakyReLU(0.1), nn.Conv2d(8, 2, 1)
    )
    found = error_of(net, [IMAGE], 4, 64, codegen="inductor")
    assert 0 < found.size < 0.05
    assert found.bias < MOST
