"""Linear upsampling on both backends: values and gradients beside float64, formats, slices, equal bits, errors."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import Interpolated, conv_abn, upsample
from fusedseg.memory import SavedBytes
from fusedseg.ops import upsample as op
from fusedseg.ops.layout import pitch_of
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.spy import spied
from tests.tools.tensors import channels_last

# The shape, and the size or the factors of the result.
CASES = {
    "double": ((2, 3, 5, 7), {"scale_factor": 2}),
    "odd": ((2, 3, 5, 7), {"size": (11, 9)}),
    "one-pixel": ((1, 5, 1, 1), {"size": (3, 4)}),
    "to-one-pixel": ((1, 2, 4, 3), {"size": (1, 1)}),
    "factors": ((1, 2, 5, 4), {"scale_factor": (1.5, 2.3)}),
    "smaller": ((1, 3, 9, 8), {"size": (4, 3)}),
    "equal": ((1, 3, 4, 5), {"size": (4, 5)}),
    "one-axis": ((1, 3, 4, 5), {"size": (8, 5)}),
    "by-eight": ((1, 2, 3, 2), {"scale_factor": 8}),
    "line": ((2, 3, 9), {"scale_factor": 2}),
    "volume": ((1, 3, 3, 4, 2), {"scale_factor": 2}),
    "volume-odd": ((1, 2, 3, 2, 3), {"size": (5, 3, 7)}),
    "volume-of-images": ((1, 2, 3, 3, 4), {"scale_factor": (1, 2, 2)}),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FORMATS = pytest.mark.parametrize("rows", [False, True], ids=["contiguous", "channels_last"])


def stock(x, given, corners):
    return F.interpolate(x, mode=op.MODES[x.dim() - 2], align_corners=corners, **given)


# Each case in fp64 and bf16, one in each format, with corners in one of them; an image and a volume have all dtypes,
# and run first on a GPU.  A signal has one format.
IN_FULL = ("double", "volume-odd")
COMBINED = [
    (name, dtype, rows, (number + rows) % 2 == 0)
    for number, name in enumerate(CASES)
    for rows in ((False,) if name == "line" else (False, True))
    for dtype in (DTYPES if name in (*IN_FULL, "line") else ["bf16" if rows else "fp64"])
]


@pytest.mark.parametrize(
    ("name", "dtype", "rows", "corners"),
    [
        pytest.param(
            name,
            DTYPES[dtype],
            rows,
            corners,
            id=f"{name}-{dtype}" + "-channels_last" * rows + "-corners" * corners,
            marks=[pytest.mark.gpu] * (name in IN_FULL),
        )
        for name, dtype, rows, corners in COMBINED
    ],
)
def test_values_and_gradients_are_those_of_float64(name, corners, rows, dtype, triton, device):
    shape, given = CASES[name]
    x = torch.randn(shape).to(dtype)
    leaf = x.double().requires_grad_()
    expected = stock(leaf, given, corners)
    dy = torch.randn(expected.shape).to(dtype)
    (dx,) = torch.autograd.grad(expected, leaf, dy.double())
    x, dy = ((channels_last(t) if rows else t).to(device) for t in (x, dy))
    x.requires_grad_()
    with SavedBytes([]) as saved:
        y = upsample(x, **given, align_corners=corners)
    assert type(y.grad_fn).__name__ == "LinearFunctionBackward"
    assert saved.nbytes == 0
    found = torch.autograd.grad(y, x, dy)[0]
    # PyTorch's own weights are rounded to fp32 where a factor is given.
    exact = dtype == torch.float64 and "scale_factor" not in given
    assert relative_error(y.detach(), expected) <= (1e-14 if exact else max(1e-7, FORWARD_TOLERANCE[dtype]))
    assert relative_error(found, dx) <= (1e-14 if exact else max(1e-7, FORWARD_TOLERANCE[dtype]))
    assert y.dtype == found.dtype == dtype
    like = stock(x.detach(), given, corners)
    assert y.stride() == like.stride()
    assert found.stride() == x.stride() or 1 in (*shape[2:], *y.shape[2:])


@pytest.mark.gpu
@pytest.mark.usefixtures("triton")
@FORMATS
def test_equal_bits_in_any_order_of_programs(rows, device):
    """PyTorch's gradient adds by atomic operations on a GPU, in an order that changes from call to call."""
    from tests.tools.interpreter import reordered
    from tests.tools.traffic import checked

    x, dy = torch.randn(2, 3, 9, 5), torch.randn(2, 3, 18, 10)
    x, dy = ((channels_last(t) if rows else t).to(device) for t in (x, dy))
    of = op.Linear((18, 10), None, False)

    def both():
        # An atomic operation, or an access outside of a tensor, raises an error.
        with checked(device):
            return op.linear_forward(x, of), op.linear_backward(dy, (9, 5), of)

    first = both()
    with reordered(device):
        again = both()
    assert all(map(torch.equal, first, again))


@pytest.mark.usefixtures("triton", "replanned")
@FORMATS
def test_walks_of_several_programs(rows, monkeypatch, device):
    """A program computes some lines of a map; what it reads at both ends of its walk is read by its neighbours too."""
    from fusedseg.kernels import upsample as kernels

    monkeypatch.setattr(kernels, "FEWEST_LINES", 2)
    monkeypatch.setattr(kernels, "MOST_LINES", 4)
    x, dy = torch.randn(1, 2, 9, 3, dtype=torch.float64), torch.randn(1, 2, 17, 5, dtype=torch.float64)
    x, dy = ((channels_last(t) if rows else t).to(device) for t in (x, dy))
    for corners in (False, True):
        of = op.Linear((17, 5), None, corners)
        leaf = x.detach().requires_grad_()
        expected = stock(leaf, {"size": (17, 5)}, corners)
        torch.testing.assert_close(op.linear_forward(x, of), expected.detach(), rtol=1e-12, atol=1e-12)
        (wanted,) = torch.autograd.grad(expected, leaf, dy)
        torch.testing.assert_close(op.linear_backward(dy, (9, 3), of), wanted, rtol=1e-12, atol=1e-12)


def test_positions_are_exact():
    """With fp32 positions the last outputs of a long signal read by weights that are off by 1e-3."""
    axis = op.axis_of(20_001, 40_003, None, False)
    assert axis.fits
    o = 39_999
    s = (o * axis.step + axis.shift) / axis.den
    assert abs(s - ((o + 0.5) * 20_001 / 40_003 - 0.5)) < 1e-9


def test_what_is_left_to_aten(triton):
    """Integers, symbols, empty batches, and an axis with an input that very many outputs read."""
    of = op.Linear((130, 130), None, False)
    assert not op.serves(torch.randn(1, 1, 1, 1), (1, 1), of)
    assert op.serves(torch.randn(1, 1, 9, 9), (9, 9), of)
    assert not op.serves(torch.randn(0, 1, 9, 9), (9, 9), of)
    assert not op.serves(torch.ones(1, 1, 9, 9, dtype=torch.uint8), (9, 9), of)
    torch.testing.assert_close(upsample(torch.ones(1, 1, 1, 1), 130), torch.ones(1, 1, 130, 130))
    assert upsample(torch.ones(0, 1, 2, 2), 4).shape == (0, 1, 4, 4)


def test_captured_and_fused_ops_take_the_kernels(backend, device, monkeypatch):
    """The op of captured graphs, and sources of convolutions, call the same functions."""
    forward, backward = (spied(monkeypatch, op, name) for name in ("linear_forward", "linear_backward"))
    x = torch.randn(1, 4, 3, 2, device=device, requires_grad=True)
    y = op.interpolate(x, scale_factor=2, mode="bilinear")
    torch.testing.assert_close(y, stock(x, {"scale_factor": 2}, False))
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, torch.full_like(dx, 4))
    wanted = backend == "triton"
    assert len(forward) == len(backward) == wanted
    del forward[:], backward[:]
    w = torch.randn(2, 4, 1, 1, device=device, requires_grad=True)
    source = Interpolated(x, (6, 4), "bilinear")
    z = conv_abn(source, w, None, None, None, None, training=True)
    assert torch.isfinite(torch.autograd.grad(z.square().sum(), x)[0]).all()
    assert bool(forward) == bool(backward) == wanted


@pytest.mark.parametrize("fit", ["resize", "pad"])
def test_the_decoder_of_our_u_nets_takes_the_kernels(fit, device, monkeypatch, triton):
    from fusedseg.unet import Up

    calls = spied(monkeypatch, op, "linear_backward")
    up = Up(4, 2, 2, fit=fit).to(device)
    x = torch.randn(1, 4, 2, 2, device=device, requires_grad=True)
    up(x, torch.randn(1, 2, 5, 5, device=device)).sum().backward()
    assert len(calls) == 1


def test_pitch_of():
    wide = channels_last(torch.randn(2, 8, 3, 4))
    assert pitch_of(wide) == pitch_of(wide[:, 2:5]) == 8
    assert pitch_of(wide.contiguous()) is None
    assert pitch_of(wide[:, :, ::2]) is None
