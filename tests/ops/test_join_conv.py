"""Convolutions of several sources: the concatenation is neither formed nor kept, and the numbers are the same."""

import pytest
import torch
import torch.nn.functional as F

from fusedseg.functional import Interpolated, conv_abn, join_conv
from fusedseg.memory import SavedBytes
from fusedseg.ops.conv import convolutions as module
from tests.reference import GRADIENT_TOLERANCE, relative_error
from tests.tools.spy import spied

CONV = {2: F.conv2d, 3: F.conv3d}
# (mode, align_corners) for each number of dimensions.
MODES = {
    2: [("nearest", None), ("nearest-exact", None), ("area", None), ("bilinear", False), ("bicubic", True)],
    3: [("nearest", None), ("nearest-exact", None), ("area", None), ("trilinear", False), ("trilinear", True)],
}
CASES = [(dims, *mode) for dims, modes in MODES.items() for mode in modes]


@pytest.fixture(params=["formed", "apart", "slabs"])
def joined(request, monkeypatch):
    """Joins sources as small ones, or as large ones: one after another, wide enlarged sources in ranges of channels.

    Very large ones are also computed in slabs of samples.
    """
    if request.param != "formed":
        monkeypatch.setattr(module, "FORMED_BYTES", 0)
    if request.param == "slabs":
        monkeypatch.setattr(module, "SLAB_BYTES", 1)


def tensors(dims, kernel=3):
    """Three sources of 3, 5 and 1 channels, of which the second is enlarged; weight and bias of 2 output channels."""
    size = (7, 6, 5)[:dims]
    shapes = (2, 3, *size), (2, 5, *(4, 3, 3)[:dims]), (2, 1, *size), (2, 9, *(kernel,) * dims), (2,)
    return size, *(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)


def concatenated(a, b, c, size, mode, align_corners=None):
    """The concatenation of the sources by stock functions."""
    return torch.cat([a, F.interpolate(b, size, mode=mode, align_corners=align_corners), c], dim=1)


@pytest.fixture
def formed(monkeypatch):
    """The shapes of the enlarged tensors that have been formed."""
    return spied(monkeypatch, Interpolated, "formed", lambda formed, self: self.shape)


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("kernel", [3, 1])
@pytest.mark.parametrize(("dims", "mode", "align_corners"), CASES)
def test_equals_the_convolution_of_the_concatenation(dims, mode, align_corners, kernel, formed):
    """Backward of a pointwise convolution enlarges nothing."""
    size, a, b, c, w, bias = tensors(dims, kernel)
    leaves = (a, b, c, w, bias)
    out = join_conv((a, Interpolated(b, size, mode, align_corners), c), w, bias, padding=kernel // 2)
    expected = CONV[dims](concatenated(a, b, c, size, mode, align_corners), w, bias, padding=kernel // 2)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    formed.clear()
    torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))
    assert bool(formed) == (kernel > 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_pointwise_convolution_is_as_exact_as_eager(dtype):
    given = torch.randn(2, 16, 9, 8), torch.randn(8, 16, 1, 1), torch.randn(8), torch.randn(2, 8, 18, 16)

    def gradients(conv, dtype):
        x, w, bias, dout = (t.to(given_dtype).to(dtype) for t in given)
        leaves = [t.requires_grad_() for t in (x, w, bias)]
        return torch.autograd.grad(conv(*leaves), leaves, dout)

    def eager(x, w, bias):
        return F.conv2d(F.interpolate(x, (18, 16), mode="bilinear"), w, bias)

    given_dtype = dtype
    exact = gradients(eager, torch.float64)
    ours = gradients(lambda x, w, bias: join_conv(Interpolated(x, (18, 16), "bilinear"), w, bias), dtype)
    for got, stock, expected in zip(ours, gradients(eager, dtype), exact, strict=True):
        error, of_stock = relative_error(got, expected), relative_error(stock, expected)
        # The bounds of docs/design.md; twice eager's own error where that is larger.
        assert error <= max(GRADIENT_TOLERANCE[dtype], 2 * of_stock)


@pytest.mark.parametrize(
    ("size", "channels", "options"),
    [((12, 10), 8, {}), ((4, 3), 2, {}), ((12, 10), 2, {"stride": 2}), ((12, 10), 2, {"padding": 1})],
    ids=["more channels", "smaller", "stride", "padding"],
)
def test_other_pointwise_convolutions_enlarge_in_backward(formed, size, channels, options):
    x, w = torch.randn(1, 4, 6, 5, requires_grad=True), torch.randn(channels, 4, 1, 1, requires_grad=True)
    out = join_conv(Interpolated(x, size, "bilinear"), w, **options)
    expected = F.conv2d(F.interpolate(x, size, mode="bilinear"), w, **options)
    formed.clear()
    got = torch.autograd.grad(out.square().sum(), (x, w))
    assert formed
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), (x, w)))


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("dims", [2, 3])
def test_conv_abn_of_sources(dims, training):
    size, a, b, c, w, conv_bias = tensors(dims)
    mode = "bilinear" if dims == 2 else "trilinear"
    weight, bias = (torch.randn(2, dtype=a.dtype, requires_grad=True) for _ in range(2))
    running = [torch.randn(2, dtype=a.dtype), torch.rand(2, dtype=a.dtype) + 0.5]
    moved = [r.clone() for r in running]
    out = conv_abn(
        (a, Interpolated(b, size, mode), c), w, conv_bias, *moved, weight, bias, padding=1, training=training
    )
    y = CONV[dims](concatenated(a, b, c, size, mode), w, conv_bias, padding=1)
    expected = F.leaky_relu(F.batch_norm(y, *running, weight, bias, training), 0.01)
    dout = torch.randn_like(out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(moved, running)
    leaves = (a, b, c, w, conv_bias, weight, bias)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout))


def test_groups_of_one_enlarged_source(monkeypatch):
    monkeypatch.setattr(module, "FORMED_BYTES", 0)
    x, w = torch.randn(1, 4, 3, 3, dtype=torch.float64), torch.randn(2, 2, 3, 3, dtype=torch.float64)
    out = join_conv(Interpolated(x, (6, 6), "bilinear"), w, groups=2)
    torch.testing.assert_close(out, F.conv2d(F.interpolate(x, (6, 6), mode="bilinear"), w, groups=2))


@pytest.mark.usefixtures("joined")
@pytest.mark.parametrize("needed", ["a", "b", "w", "bias"])
def test_only_what_is_needed_gets_a_gradient(needed):
    size, a, b, c, w, bias = tensors(2)
    named = {"a": a, "b": b, "w": w, "bias": bias}
    for name, t in [*named.items(), ("c", c)]:
        t.requires_grad_(name == needed)
    out = join_conv((a, Interpolated(b, size, "bilinear"), c), w, bias, padding=1)
    expected = F.conv2d(concatenated(a, b, c, size, "bilinear"), w, bias, padding=1)
    leaf = named[needed]
    grads = [torch.autograd.grad(z.square().sum(), leaf)[0] for z in (out, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.usefixtures("joined")
def test_keeps_the_sources_and_the_weight():
    a = torch.randn(2, 8, 32, 32, requires_grad=True)
    b = torch.randn(2, 8, 16, 16, requires_grad=True)
    w = torch.randn(4, 16, 3, 3, requires_grad=True)
    with SavedBytes([w]) as saved:
        out = join_conv((a, Interpolated(b, (32, 32), "bilinear")), w, padding=1)
    assert out.requires_grad
    assert saved.nbytes == a.nbytes + b.nbytes


def test_channels_last_stays_channels_last():
    a, b = (torch.randn(2, 4, s, s).to(memory_format=torch.channels_last) for s in (8, 4))
    w = torch.randn(6, 8, 3, 3)
    out = join_conv((a, Interpolated(b, (8, 8), "bilinear")), w, padding=1)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_autocast_casts_sources_of_several_dtypes():
    a, b, w = torch.randn(2, 3, 8, 8), torch.randn(2, 2, 4, 4, dtype=torch.bfloat16), torch.randn(4, 5, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        out = join_conv((a, Interpolated(b, (8, 8), "nearest")), w)
    assert out.dtype == torch.bfloat16
