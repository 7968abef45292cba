"""Networks under ``torch.compile``: compiled autograd, and no more bytes kept.

``tests/test_contract.py`` compares a compiled network of all modules with eager mode, and traces each op with symbolic
sizes; ``tests/ops/test_norm_compiled.py`` has one graph for all sizes.
"""

import copy

import pytest
import torch
from torch import nn

import fusedseg
from tests.compiler.networks import kept

pytestmark = pytest.mark.usefixtures("compiled_afresh")


def pair():
    """The same network twice in float64, and its inputs."""
    net = nn.Sequential(
        fusedseg.ConvABN2d(2, 4, 3, padding=1), fusedseg.MaxPool2d(2), nn.Conv2d(4, 3, 1), fusedseg.InPlaceABN(3)
    ).double()
    return net, copy.deepcopy(net), [torch.randn(2, 2, 8, 12, dtype=torch.float64)]


def results(net, run, images):
    """Returns the output, gradients and buffers."""
    images = [image.clone().requires_grad_() for image in images]
    z = run(*images)
    gradients = torch.autograd.grad(z.square().sum(), [*images, *net.parameters()])
    return z.detach(), gradients, dict(net.named_buffers())


def test_keeps_no_more_than_eager():
    """The compiler's default partition, which decides what a graph keeps, keeps no more bytes than eager mode."""
    eager, net, images = pair()
    images = [image.requires_grad_() for image in images]
    run = torch.compile(net, fullgraph=True, backend="aot_eager_decomp_partition")
    assert kept(net, run, images) <= 1.02 * kept(eager, eager, images)


# This warning is PyTorch's: compiled autograd instantiates an autograd function that calls another one in backward.
@pytest.mark.filterwarnings("ignore:.class .torch.autograd.function.Function.. should not be instantiated")
def test_compiled_autograd():
    """The gradients equal eager mode's."""
    eager, net, images = pair()
    expected = results(eager, eager, images)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        torch.testing.assert_close(results(net, net, images), expected)
