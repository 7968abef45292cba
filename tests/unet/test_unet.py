"""Compares U-Nets with twins of plain PyTorch modules."""

import pytest
import torch
from torch import nn

from fusedseg.memory.fake import fake_mode
from fusedseg.memory.meter import measure
from fusedseg.unet import Down, MultiEncoderUNet, UNet, Up


def twins(build):
    """Builds a network of our modules and of plain modules, with equal weights that are not all ones and zeros."""
    ours, eager = build(plain=False), build(plain=True)
    with torch.no_grad():
        for name, param in ours.named_parameters():
            if param.dim() == 1:
                param.uniform_(0.5, 1.5) if name.endswith("weight") else param.uniform_(-1, 1)
                param[::2].neg_()
    eager.load_state_dict(dict(zip(eager.state_dict(), ours.state_dict().values(), strict=True)))
    return ours, eager


# id: (spatial size, channels of the images, arguments of MultiEncoderUNet)
NETWORKS = {
    "2d": ((32, 48), (2,), {}),
    "odd size": ((37, 45), (2,), {}),
    "smallest size": ((4, 4), (2,), {}),
    "padded": ((37, 46), (2,), {"fit": "pad"}),
    "align_corners": ((19, 22), (2,), {"align_corners": True}),
    "not reduced": ((19, 22), (2,), {"reduce": False, "up_widths": (7, 3)}),
    "transposed": ((32, 48), (2,), {"mode": "transposed"}),
    "transposed, odd size": ((37, 45), (2,), {"mode": "transposed"}),
    "3d": ((8, 12, 16), (2,), {"dims": 3}),
    "3d, odd size": ((9, 7, 5), (2,), {"dims": 3}),
    "3d, not reduced": ((9, 7, 5), (1,), {"dims": 3, "reduce": False}),
    "3d, transposed, odd size": ((9, 7, 5), (2,), {"dims": 3, "mode": "transposed"}),
    "biased": ((16, 16), (2,), {"bias": True}),
    "two encoders": ((18, 21), (5, 3), {"bias": True}),
    "instance norms": ((16, 20), (2,), {"norm_act": "instance"}),
    "group norms, 3d": ((8, 12, 9), (2,), {"norm_act": "group", "dims": 3}),
    "three encoders, 3d": ((5, 4, 6), (1, 2, 1), {"dims": 3}),
    "two encoders, transposed": ((18, 21), (1, 1), {"mode": "transposed"}),
}


@pytest.mark.parametrize(("size", "channels", "options"), NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_values_and_gradients_equal_the_plain_network(size, channels, options, training):
    def build(plain):
        return MultiEncoderUNet(channels, 3, widths=(4, 6, 8), plain=plain, **options).double().train(training)

    images = [torch.randn(2, C, *size, dtype=torch.float64, requires_grad=True) for C in channels]
    results = []
    for net in twins(build):
        out = net(*images)
        assert out.shape == (2, 3, *size)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*images, *net.parameters()]), *net.buffers()])
    for got, expected in zip(*results, strict=True):
        # float64 values are rounded in about twenty layers; the gradient of a bias before a norm is only rounding.
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_norm_and_activation_can_be_chosen():
    """Every norm keeps fewer bytes with our joins and pools, and computes the function of plain modules."""

    def build(plain):
        return UNet(2, 3, widths=(4, 8), norm_act=lambda c: nn.Sequential(nn.GroupNorm(2, c), nn.SiLU()), plain=plain)

    ours, eager = twins(lambda plain: build(plain).double())
    x = torch.randn(2, 2, 9, 10, dtype=torch.float64)
    torch.testing.assert_close(ours(x), eager(x))


def test_a_3d_network_of_instance_norms_keeps_little_more_than_half(record_property):
    """The norms have parameters, as in nnU-Net; the bytes of a patch of 128 come from tensors without values."""

    def saved(plain):
        with fake_mode():
            net = UNet(1, 4, dims=3, widths=(32, 64, 128, 256), norm_act="instance", plain=plain)
            return measure(net, torch.empty(2, 1, 128, 128, 128)).saved

    ours, eager = saved(False), saved(True)
    record_property("saved / eager", ours / eager)
    print(f"saved / eager: {ours / eager:.3f}")
    assert ours <= 0.55 * eager


def test_channels_last_stays_channels_last():
    net = UNet(1, 2, widths=(4, 8)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    out = net(x.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    # The fp32 sums have another order.
    torch.testing.assert_close(out, net(x), rtol=1e-4, atol=1e-4)


def test_a_skip_is_kept_once():
    # x is the pool's input and a part of the concatenation: the pool must not keep a copy of its own.
    x = torch.randn(1, 4, 16, 16, requires_grad=True)
    pooled = x.nbytes // 4
    down = measure(Down(4, 4), x).saved
    # Kept are the pool's output, a byte for each of its elements, one tensor for each convolution, and vectors.
    assert down < pooled + pooled // 4 + 2 * pooled + 1024


def test_up_keeps_neither_the_concatenation_nor_the_enlarged_map():
    x, skip = torch.randn(1, 8, 16, 16, requires_grad=True), torch.randn(1, 4, 32, 32, requires_grad=True)
    kept = measure(Up(8, 4, 4), x, skip).saved
    # Kept are x, the reduced x, the skip, one tensor for each convolution, and vectors.
    assert kept < x.nbytes + x.nbytes // 2 + 3 * skip.nbytes + 1024


def test_a_stock_networks_weights_load_by_order():
    ours, stock = UNet(1, 2, widths=(4, 8)), UNet(1, 2, widths=(4, 8), plain=True).state_dict()
    ours.load_stock_state_dict({f"another {name}": value for name, value in stock.items()})
    assert all(map(torch.equal, ours.state_dict().values(), stock.values()))


def test_weights_of_another_structure_are_refused_and_nothing_is_loaded():
    net = UNet(1, 2, widths=(4, 8))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(ValueError, match=r"UNet.load_stock_state_dict: expected \d+ tensors, got \d+"):
        net.load_stock_state_dict(UNet(1, 2, widths=(4, 8, 8)).state_dict())
    with pytest.raises(ValueError, match=r"must have shape \(2, 4, 1, 1\), got \(3, 4, 1, 1\)"):
        net.load_stock_state_dict(UNet(1, 3, widths=(4, 8)).state_dict())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("plain", [False, True], ids=["ours", "plain"])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_a_single_value_at_the_lowest_level_is_refused_with_the_sizes_that_work(norm, plain):
    """The error came from a norm deep in the network, and named neither the network nor a size."""
    net = UNet(1, 2, widths=(4, 8, 8), norm_act=norm, plain=plain)
    samples = "" if norm == "instance" else ", or two samples or more"
    message = (
        rf"^fusedseg\.unet\.UNet: {norm} norms need more than one value for their statistics, and images of shape "
        rf"\(1, 1, 7, 4\) have one left after 2 halvings; pass images with a spatial size of at least 8{samples}$"
    )
    with pytest.raises(ValueError, match=message):
        net(torch.randn(1, 1, 7, 4))
    # The sizes that the message names must work.
    assert net(torch.randn(1, 1, 8, 4)).shape == (1, 2, 8, 4)
    if norm == "batch":
        assert net(torch.randn(2, 1, 7, 4)).shape == (2, 2, 7, 4)
        assert net.eval()(torch.randn(1, 1, 7, 4)).shape == (1, 2, 7, 4)
    else:
        # These norms take statistics of each sample, in eval mode too.
        for one_value in (net, net.eval()):
            with pytest.raises(ValueError, match=r"images of shape \(2, 1, 7, 4\) have one left"):
                one_value(torch.randn(2, 1, 7, 4))


def test_a_single_value_is_enough_for_norms_that_take_no_statistics():
    net = UNet(1, 2, widths=(4, 8, 8))
    for module in net.modules():
        if hasattr(module, "running_mean"):
            module.eval()
    assert net(torch.randn(1, 1, 4, 4)).shape == (1, 2, 4, 4)
    assert UNet(1, 2, widths=(16, 16, 16), norm_act="group")(torch.randn(1, 1, 4, 4)).shape == (1, 2, 4, 4)
