"""Backward of a convolution of one channel: its image has the strides of channels_last where the gradient has them."""

import copy

import pytest
import torch
from torch import nn

from fusedseg._torch import TorchDispatchMode
from fusedseg.ops.layout import FORMATS, is_rows, suggests_channels_last
from tests.compiler.networks import compiled, in_both


class Seen(TorchDispatchMode):
    """Whether gradients are in channels_last, and whether the images say so, of convolutions."""

    def __init__(self):
        super().__init__()
        self.gradients, self.images = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.gradients.append(is_rows(args[0]))
            self.images.append(suggests_channels_last(args[1]))
        return func(*args, **(kwargs or {}))


def network(dims, channels=1, transposed=False):
    """The first convolution reads the image that a caller gives, which no copy has changed."""
    norm, conv, transposing = (getattr(nn, f"{name}{dims}d") for name in ("BatchNorm", "Conv", "ConvTranspose"))
    first = transposing if transposed else conv
    return nn.Sequential(first(channels, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 2, 3))


def step(net, x, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = net(x)
    return out.float().square().mean()


CASES = [(2, 1, False, False), (2, 1, False, True), (1, 1, False, False), (2, 1, True, False), (2, 3, False, False)]


@pytest.mark.usefixtures("strides_of_a_gpu")
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(("case", "codegen"), in_both(CASES, CASES[1]), ids=str)
def test_the_image_has_the_strides_of_its_gradient(codegen, dims, case):
    batch, channels, transposed, autocast = case
    torch.manual_seed(0)
    fmt = FORMATS[dims + 2]
    net = network(dims, channels, transposed).to(memory_format=fmt)
    # The method copies nothing here, and leaves the strides of the image.
    x = torch.randn(batch, channels, *[9] * dims).contiguous(memory_format=fmt)
    assert suggests_channels_last(x) == (channels > 1)
    twin = copy.deepcopy(net)
    step(twin, x, autocast).backward()
    run = compiled(net, codegen)
    step(run, x, autocast).backward()
    for got, expected in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, expected.grad, rtol=0.02 if autocast else 1e-4, atol=1e-3 if autocast else 1e-6
        )
        got.grad = None
    loss = step(run, x, autocast)
    with Seen() as seen:
        loss.backward()
    if codegen == "aten":
        # Inductor may lay a gradient out in a third way, which PyTorch copies to the format of the image.
        assert seen.images == seen.gradients
    assert any(seen.images)


def test_a_contiguous_network_has_no_view():
    net, x = network(2), torch.randn(2, 1, 9, 9)
    run = compiled(net)
    step(run, x, False).backward()
    loss = step(run, x, False)
    with Seen() as seen:
        loss.backward()
    assert not any(seen.images)
