"""Compares the meter with byte counts that were computed by hand."""

import weakref

import pytest
import torch
from torch import nn

import fusedseg
from fusedseg.memory import SavedBytes, allocator_peak
from fusedseg.memory.meter import LiveBytes, measure
from fusedseg.ops.conv import convolutions

CHANNELS = 8
SHAPE = (2, CHANNELS, 16, 16)
# Bytes of one activation tensor, and of the mean and rstd that one BatchNorm keeps.
ACTIVATION = 2 * CHANNELS * 16 * 16 * 4
STATS = 2 * CHANNELS * 4


def conv_bn_act(pairs: int) -> nn.Sequential:
    layers = []
    for _ in range(pairs):
        layers += [
            nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
            nn.BatchNorm2d(CHANNELS),
            nn.LeakyReLU(0.01, inplace=True),
        ]
    return nn.Sequential(*layers)


def test_eager_keeps_two_tensors_per_conv_and_the_input():
    footprint = measure(conv_bn_act(3), torch.randn(SHAPE))
    assert footprint.saved == ACTIVATION + 3 * (2 * ACTIVATION + STATS)


def test_a_question_about_shapes_takes_no_bytes():
    """The first gradient of a convolution asks it with tensors without values, whose bytes were counted."""
    x, dy, w = torch.randn(2, 4, 9, 7), torch.randn(2, 8, 9, 7), torch.randn(8, 4, 3, 3)
    convolutions._fits.cache_clear()
    with LiveBytes() as live:
        assert convolutions.shape_only(dy, x, w) is not None
    assert live.peak == 0


def test_peak_of_a_chain_is_two_tensors():
    footprint = measure(lambda x: x.add(1).add(1).add(1), torch.randn(SHAPE))
    assert footprint.peak == 2 * ACTIVATION
    assert footprint.held == ACTIVATION
    assert footprint.saved == 0


@pytest.mark.parametrize(
    "op", [lambda x: x.relu_(), lambda x: x.view(-1), lambda x: x.detach()], ids=["inplace", "view", "detach"]
)
def test_what_aliases_the_input_is_not_an_allocation(op):
    # The op returns the input's storage, and the mode must not count it as new.
    assert measure(op, torch.randn(SHAPE)).held == 0


class KeepsTwice(torch.autograd.Function):
    """Saves its output by ``save_for_backward`` and one more tensor, twice as large, as an attribute."""

    @staticmethod
    def forward(ctx, x):
        z = x.exp()
        ctx.save_for_backward(z)
        ctx.side = torch.cat([x, x])
        return z

    @staticmethod
    def backward(ctx, dz):
        (z,) = ctx.saved_tensors
        return dz * z


def test_custom_functions_are_seen_attributes_too():
    x = torch.randn(SHAPE, requires_grad=True)
    assert measure(KeepsTwice.apply, x).saved == 3 * ACTIVATION


def test_a_dropped_branch_no_longer_counts():
    x = torch.randn(SHAPE, requires_grad=True)
    with SavedBytes() as saved:
        kept = x.exp()
        dropped = x.sin().sin().exp()
        with_branch = saved.nbytes
        del dropped
    assert with_branch == 4 * ACTIVATION
    assert saved.nbytes == ACTIVATION
    del kept
    assert saved.nbytes == 0


def test_a_saved_output_is_freed_with_its_graph():
    # A hook that returns the output itself keeps the graph alive forever if backward never runs.
    with SavedBytes():
        z = torch.randn(SHAPE, requires_grad=True).exp()
    storage = weakref.ref(z.untyped_storage())
    del z
    assert storage() is None


def test_weights_of_a_function_are_excluded_when_owned():
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, requires_grad=True)
    x = torch.randn(SHAPE)
    conv = lambda x: nn.functional.conv2d(x, weight)  # noqa: E731 - a function without parameters of its own
    assert measure(conv, x).saved == ACTIVATION + weight.nbytes
    assert measure(conv, x, owned=[weight]).saved == ACTIVATION


def test_without_gradients_nothing_is_saved():
    with torch.no_grad():
        assert measure(conv_bn_act(1), torch.randn(SHAPE)).saved == 0


def test_hooks_do_not_change_the_gradient():
    net, x = conv_bn_act(2), torch.randn(SHAPE)
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    measure(net, x, loss=lambda out: out.square().mean())
    for param, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)


def test_allocator_peak_of_a_chain_is_two_tensors():
    # The tensors are much larger than the scalars that the profiler also counts.
    x = torch.randn(512, 512)
    peak = allocator_peak(lambda: x.add(1).add(1).add(1))
    assert 2 * x.nbytes <= peak < 2 * x.nbytes + 1024


def test_footprint_prints_its_units():
    assert str(measure(torch.neg, torch.randn(1 << 18))) == "saved 0.0 MiB, held 1.0 MiB, peak 1.0 MiB"


@pytest.mark.parametrize("act", [nn.ELU, nn.LeakyReLU])
def test_norms_of_samples_in_channels_last_need_no_address(act):
    """Tensors without values have no address; PyTorch warns if one is asked for."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), act(), nn.Conv2d(8, 8, 3))
    net, x = net.to(memory_format=torch.channels_last), torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    stock = measure(net, x)
    assert measure(fusedseg.convert(net), x).saved < stock.saved
