"""UNet against its twin of plain PyTorch modules."""

import pytest
import torch
from torch import nn

from fusedseg import InPlaceABN
from fusedseg.memory import measure
from fusedseg.unet import ConvNormAct, DoubleConv, Down, UNet, Up


def plain(dims: int):
    """The norm and activation that InPlaceABN replaces."""
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
    return lambda channels: nn.Sequential(norm(channels), nn.LeakyReLU(0.01, inplace=True))


def twins(build, dims: int):
    """The same network with InPlaceABN and with plain modules, of equal weights that are not all ones and zeros."""
    ours, eager = build(norm_act=InPlaceABN), build(norm_act=plain(dims))
    with torch.no_grad():
        for name, param in ours.named_parameters():
            if param.dim() == 1:
                param.uniform_(0.5, 1.5) if name.endswith("weight") else param.uniform_(-1, 1)
                param[::2].neg_()
    eager.load_state_dict(dict(zip(eager.state_dict(), ours.state_dict().values(), strict=True)))
    return ours, eager


# id: (spatial size, arguments of UNet)
NETWORKS = {
    "2d": ((32, 48), {}),
    "odd size": ((37, 45), {}),
    "smallest size": ((4, 4), {}),
    "transposed": ((32, 48), {"mode": "transposed"}),
    "transposed, odd size": ((37, 45), {"mode": "transposed"}),
    "3d": ((8, 12, 16), {"dims": 3}),
    "3d, odd size": ((9, 7, 5), {"dims": 3}),
    "3d, transposed, odd size": ((9, 7, 5), {"dims": 3, "mode": "transposed"}),
    "biased": ((16, 16), {"bias": True}),
}


@pytest.mark.parametrize(("size", "options"), NETWORKS.values(), ids=NETWORKS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_values_and_gradients_equal_the_plain_network(size, options, training):
    torch.manual_seed(0)
    dims = options.get("dims", 2)
    ours, eager = twins(
        lambda norm_act: UNet(2, 3, widths=(4, 6, 8), norm_act=norm_act, **options).double().train(training), dims
    )
    x = torch.randn(2, 2, *size, dtype=torch.float64, requires_grad=True)
    results = []
    for net in (ours, eager):
        out = net(x)
        assert out.shape == (2, 3, *size)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *net.parameters()]), *net.buffers()])
    for got, expected in zip(*results, strict=True):
        # float64 rounding through some twenty layers; a bias in front of a norm has a gradient of zero but for rounding
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_channels_last_stays_channels_last():
    net = UNet(1, 2, widths=(4, 8)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 1, 8, 8)
    out = net(x.to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)
    # fp32 sums in another order
    torch.testing.assert_close(out, net(x), rtol=1e-4, atol=1e-4)


def test_every_parameter_gets_a_gradient():
    net = UNet(1, 2, widths=(4, 8, 8))
    net(torch.randn(1, 1, 16, 16)).square().sum().backward()
    assert [name for name, param in net.named_parameters() if param.grad is None or not param.grad.any()] == []


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_one_tensor_is_kept_for_each_conv_and_norm_where_eager_keeps_two(dtype, memory_format):
    ours, eager = twins(lambda norm_act: DoubleConv(8, 8, norm_act=norm_act).to(dtype), 2)
    x = torch.randn(2, 8, 32, 32, dtype=dtype).to(memory_format=memory_format)
    activation = x.nbytes
    # a few vectors of one fp32 value per channel for each norm
    vectors = 2 * 8 * 8 * 4
    kept = measure(ours, x).saved - activation
    assert 2 * activation <= kept <= 2 * activation + vectors
    kept = measure(eager, x).saved - activation
    assert 4 * activation <= kept <= 4 * activation + vectors


def test_a_skip_is_kept_once():
    # x is the pool's input as well as a part of the concatenation: the pool must not keep a copy of its own
    x = torch.randn(1, 4, 16, 16, requires_grad=True)
    pooled, indices = x.nbytes // 4, x.nbytes // 4 * 2
    down = measure(Down(4, 4), x).saved
    # the input, the pool's output and int64 indices, one tensor for each convolution, and vectors
    assert x.nbytes + pooled + indices + 2 * pooled <= down < x.nbytes + pooled + indices + 2 * pooled + 1024


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: UNet(1, 2, dims=1), r"fusedseg\.unet\.UNet: dims must be 2 or 3, got 1"),
        (lambda: UNet(1, 2, widths=(8,)), r"fusedseg\.unet\.UNet: widths must be two or more positive .*, got \(8,\)"),
        (lambda: UNet(1, 2, widths=(8, 0)), r"fusedseg\.unet\.UNet: widths must be .*, got \(8, 0\)"),
        (lambda: UNet(0, 2), r"fusedseg\.unet\.UNet: in_channels must be a positive integer, got 0"),
        (lambda: UNet(1, 2.0), r"fusedseg\.unet\.UNet: num_classes must be a positive integer, got 2\.0"),
        (lambda: UNet(1, 2, mode="cubic"), r"fusedseg\.unet\.Up: mode must be 'linear' or 'transposed', got 'cubic'"),
        (lambda: ConvNormAct(1, 2, dims=4), r"fusedseg\.unet\.ConvNormAct: dims must be 2 or 3, got 4"),
        (lambda: DoubleConv(1, 2, dims=4), r"fusedseg\.unet\.DoubleConv: dims must be 2 or 3, got 4"),
        (lambda: Down(1, 2, dims=4), r"fusedseg\.unet\.Down: dims must be 2 or 3, got 4"),
        (lambda: Up(2, 1, 2, dims=4), r"fusedseg\.unet\.Up: dims must be 2 or 3, got 4"),
    ],
    ids=["dims", "one width", "zero width", "in_channels", "num_classes", "mode", "conv", "double", "down", "up"],
)
def test_wrong_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 8, 8), r"fusedseg\.unet\.UNet: input must have shape \(N, 1\) with 2 spatial .*, got \(1, 2, 8, 8\)"),
        ((1, 1, 8, 8, 8), r"fusedseg\.unet\.UNet: input must have shape .*, got \(1, 1, 8, 8, 8\)"),
        ((1, 1, 8, 3), r"every spatial size must be at least 4 to be halved 2 times, got \(1, 1, 8, 3\)"),
    ],
    ids=["channels", "dimensions", "too small"],
)
def test_wrong_inputs_are_refused(shape, message):
    net = UNet(1, 2, widths=(4, 8, 8))
    with pytest.raises(ValueError, match=message):
        net(torch.randn(shape))


def test_a_transposed_convolution_that_cannot_reach_the_skip_is_refused():
    up = Up(4, 4, 4, mode="transposed")
    with pytest.raises(ValueError, match=r"x \(1, 4, 4, 4\) cannot reach the skip \(1, 4, 8, 10\)"):
        up(torch.randn(1, 4, 4, 4), torch.randn(1, 4, 8, 10))
