"""Compares the 3x3x3 convolution of few channels with float64, in the interpreter or on a GPU (``--device cuda``)."""

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")

from tests.tools.interpreter import only_programs, reordered
from tests.tools.marks import sanitized
from tests.tools.tensors import empty
from tests.tools.traffic import checked

# Input and output channels, the size of the volume, and the dtype.  Tiles are 4 x 32 or 8 x 32 positions.
CASES = {
    "32-to-32": (32, 32, (3, 5, 33), torch.float16),
    "16-to-16": (16, 16, (2, 4, 9), torch.bfloat16),
    "48-to-16": (48, 16, (2, 9, 3), torch.float16),
    "16-to-64": (16, 64, (2, 3, 34), torch.bfloat16),
    "64-to-48": (64, 48, (2, 5, 4), torch.float16),
    "one-plane": (32, 48, (1, 7, 5), torch.float16),
    "one-row": (64, 32, (5, 1, 1), torch.float16),
}
# The allowed error, of the largest value: the result is rounded once, after a sum in fp32.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.fixture(autouse=True)
def on_hopper(device):
    from fusedseg.ops.conv.conv3d import runs_on

    if not runs_on(device):
        pytest.skip("the kernel is made for sm_90")


def inputs(C, K, size, device, dtype=torch.float16):
    x = torch.randn(2, C, *size, device=device).to(dtype, memory_format=torch.channels_last_3d)
    weight = torch.randn(K, C, 3, 3, 3, device=device) / (27 * C) ** 0.5
    return x, weight.to(dtype), torch.randn(K, device=device).to(dtype)


def launch(x, weight, bias, backward=False):
    """The convolution or, with ``backward``, the gradient of an input from ``x``, the gradient of the output."""
    from fusedseg.kernels.conv3d import conv3d, ordered_weight

    channels = weight.shape[1 if backward else 0]
    y = empty((x.shape[0], channels, *x.shape[2:]), x.dtype, True).to(x.device).fill_(7)
    with checked(x.device) as counted:
        conv3d(x, ordered_weight(weight, backward), bias, y)
    return y, counted


def assert_close(found, expected):
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= TOLERANCE[found.dtype]


def check(C, K, size, dtype, device, memory_format=torch.contiguous_format):
    x, weight, bias = inputs(C, K, size, device, dtype)
    weight = weight.to(memory_format=memory_format)
    # Without a bias the gradient of the input is computed.
    y, _ = launch(x, weight, bias)
    assert_close(y, F.conv3d(x.double(), weight.double(), bias.double(), padding=1))
    dx, _ = launch(y, weight, None, backward=True)
    assert_close(dx, torch.nn.grad.conv3d_input(x.shape, weight.double(), y.double(), padding=1))


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", sanitized(CASES, "48-to-16", "16-to-64", "one-row"))
def test_values(case, device):
    check(*case, device)


@pytest.mark.usefixtures("poison")
def test_weights_in_channels_last(device):
    check(*CASES["16-to-16"], device, memory_format=torch.channels_last_3d)


def test_zeros_stay_zeros_and_one_tap_is_a_shift(device):
    """Each tap reads the right neighbour: a weight of a single 1 moves the volume, and zeros come in from outside."""
    C = K = 16
    x, weight, _ = inputs(C, K, (3, 5, 6), device)
    padded = F.pad(x, (1,) * 6)
    for kd, kh, kw in ((0, 0, 0), (1, 1, 1), (1, 2, 0), (2, 0, 1)):
        weight.zero_()
        weight[:, :, kd, kh, kw] = torch.eye(C, device=device)
        y, _ = launch(x, weight, None)
        assert torch.equal(y, padded[:, :, kd : kd + 3, kh : kh + 5, kw : kw + 6])


def chunks(monkeypatch, planes):
    from fusedseg.kernels import conv3d

    monkeypatch.setattr(conv3d, "MOST_PLANES", planes)
    monkeypatch.setattr(conv3d, "LEAST_PLANES", planes)


@pytest.mark.gpu
@pytest.mark.parametrize("planes", [1, 2])
def test_chunks_of_planes_do_not_change_a_bit(planes, device, monkeypatch, replanned):
    x, weight, bias = inputs(16, 32, (5, 5, 6), device)
    whole, _ = launch(x, weight, bias)
    chunks(monkeypatch, planes)
    replanned()
    y, _ = launch(x, weight, bias)
    assert torch.equal(y, whole)


def test_the_order_of_programs_does_not_matter(device, monkeypatch, replanned):
    chunks(monkeypatch, 2)
    x, weight, bias = inputs(16, 48, (3, 5, 3), device)
    expected, _ = launch(x, weight, bias)
    with reordered(device):
        y, _ = launch(x, weight, bias)
    assert torch.equal(y, expected)


@pytest.mark.usefixtures("only_in_the_interpreter")
def test_traffic(device):
    """A chunk reads each tap of each plane once, and writes each value of y once."""
    x, weight, _ = inputs(32, 32, (3, 4, 32), device)
    y, moved = launch(x, weight, None)
    assert moved.launches == ["conv3d_weight_kernel", "conv3d_kernel"]
    assert moved.stored("conv3d_kernel") == y.nbytes
    inside = 4 * 32 + 2 * (4 * 31 + 3 * 32) + 4 * 3 * 31
    assert moved.loaded("conv3d_kernel", "x_ptr") == 2 * 3 * inside * 32 * x.element_size()


@pytest.mark.usefixtures("only_in_the_interpreter")
def test_beyond_two_to_the_31_elements(device):
    """The last program of the last sample reads and writes the right values, and no access leaves a tensor."""
    size = (2, 1024, 1024)
    x, y = (empty((40, 32, *size), torch.float16, True) for _ in range(2))
    assert x.numel() > 2**31
    x[-1, :, :, -6:, -34:] = torch.randn(32, 2, 6, 34).half()
    _, weight, _ = inputs(32, 32, (1, 1, 1), device)
    from fusedseg.kernels.conv3d import conv3d, ordered_weight

    ordered = ordered_weight(weight, False)
    with checked(device), only_programs(lambda kernel, grid: [(grid[0] - 1, 0, grid[2] - 1)]):
        conv3d(x, ordered, None, y)
    wanted = F.conv3d(x[-1:, :, :, -6:, -34:].double(), weight.double(), padding=1)
    assert_close(y[-1:, :, :, -4:, -32:], wanted[..., -4:, -32:])
