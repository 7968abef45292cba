"""The op on both convolutions: values, gradients, running statistics, strides and the effect of settings."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import conv_abn
from tests.ops.conv_abn_cases import CASES, SMALL, Inputs, fused, inputs, running, stock
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error
from tests.tools.called import Called

TRAINING = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")


def check_gradcheck(case, device, training, fmt="contiguous", activation="leaky_relu", param=0.01, **which):
    given = inputs(case, torch.float64, device, fmt, **which)

    def ours(*tensors):
        statistics = running(case, torch.float64, device)
        arguments = given.replaced(tensors)
        return fused(arguments, "aten", training, statistics, case, activation=activation, activation_param=param)

    # The fast mode tests random directions, because numerical derivatives of every element take minutes.
    assert torch.autograd.gradcheck(ours, given.given, fast_mode=True)
    if case is SMALL:
        # The sum gives a dz that is expanded from a scalar.
        assert torch.autograd.gradcheck(lambda *t: ours(*t).sum() * 2, given.given, fast_mode=True)
    z = ours(*given.given)
    expected = stock(case, given, running(case, torch.float64, device), training, activation, param)
    torch.testing.assert_close(z, expected)
    dz = torch.randn_like(z)
    torch.testing.assert_close(*(torch.autograd.grad(out, given.given, dz) for out in (z, expected)))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@TRAINING
def test_gradcheck_geometries(device, case, training):
    check_gradcheck(case, device, training)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        *((name, "contiguous") for name in CASES),
        *((name, "channels_last") for name in ("2d", "1x1", "groups", "same, even kernel", "3d, stride 2")),
    ],
)
def test_values_and_running_statistics(backend, device, dtype, name, fmt):
    """Both backends compute the stock values; running_mean includes the convolution's bias."""
    case = CASES[name]
    for training in (True, False):
        given, statistics = inputs(case, dtype, device, fmt), running(case, dtype, device)
        with torch.no_grad():
            z = fused(given, backend, training, statistics, case, momentum=0.3)
        moved = running(case, torch.float64, device)
        exact = [None if t is None else t.double() for t in given]
        expected = stock(case, exact, moved, training, momentum=0.3)
        assert relative_error(z, expected) <= FORWARD_TOLERANCE[dtype]
        for a, b in zip(statistics, moved, strict=True):
            assert relative_error(a, b) <= FORWARD_TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "fmt", "dtype"),
    [
        ("2d", "contiguous", torch.float32),
        ("2d", "contiguous", torch.float16),
        ("2d", "channels_last", torch.bfloat16),
        ("1x1", "contiguous", torch.bfloat16),
        ("stride 2", "channels_last", torch.float32),
        ("dilation 2", "contiguous", torch.float16),
        ("groups", "channels_last", torch.float16),
        ("groups", "contiguous", torch.bfloat16),
        ("same, even kernel", "contiguous", torch.float32),
        ("3d", "channels_last", torch.float16),
        ("3d", "contiguous", torch.bfloat16),
    ],
)
def test_gradients(backend, device, dtype, case, fmt):
    """The gradients agree with float64, in which y is rounded to the stored dtype.

    Every implementation that stores y can round a value across zero.  Such a value takes the other branch of the
    activation, and its gradient is wrong by its whole size.
    """
    case = CASES[case]
    for training in (True, False):
        given = inputs(case, dtype, device, fmt, params=torch.float32)
        statistics = running(case, torch.float32, device)
        z = fused(given, backend, training, statistics, case)
        dz = torch.randn(z.shape, dtype=torch.float64).to(device, dtype)
        grads = torch.autograd.grad(z, given, dz)

        exact = Inputs(*(t.detach().double().requires_grad_() for t in given))
        # In training y is stored without the bias.
        used = exact._replace(conv_bias=None) if training else exact
        expected = stock(case, used, [s.double() for s in statistics], training, stored=dtype)
        expected = torch.autograd.grad(expected, exact, dz.double(), materialize_grads=True)
        for name, t, mine, theirs in zip(given._fields, given, grads, expected, strict=True):
            assert mine.dtype == t.dtype
            assert relative_error(mine, theirs) <= GRADIENT_TOLERANCE[dtype], (training, name)


@pytest.mark.parametrize(
    ("dtype", "size", "folded"),
    [(torch.float32, 9, True), (torch.float64, 9, True), (torch.float16, 9, False), (torch.float32, 1, False)],
    ids=["fp32", "fp64", "half would be rounded twice", "the weight is larger than the output"],
)
def test_inference_normalises_the_smaller(dtype, size, folded):
    """Inference with the vendor's convolution scales a copy of the weight if the weight is smaller than the output.

    Only the activation then passes over the output.
    """
    torch.manual_seed(0)
    x, w = torch.randn(1, 8, size, size, dtype=dtype), torch.randn(8, 8, 3, 3, dtype=dtype)
    vectors = torch.randn(4, 8, dtype=dtype)
    weight, bias, mean, conv_bias = vectors
    # A weight of 0 turns one channel off.
    weight[3] = 0
    var = torch.rand(8, dtype=dtype) + 0.5
    with Called() as called, torch.no_grad():
        z = conv_abn(x, w, conv_bias, mean, var, weight, bias, padding=1, conv_backend="aten")
    assert ("native_batch_norm" not in called.names) == folded
    y = F.conv2d(x.double(), w.double(), conv_bias.double(), padding=1)
    expected = F.leaky_relu(F.batch_norm(y, mean.double(), var.double(), weight.double(), bias.double()), 0.01)
    assert relative_error(z, expected) <= FORWARD_TOLERANCE[dtype]
