"""The op on both convolutions: values, gradients, running statistics, strides and the effect of settings."""

import pytest
import torch
from torch.nn import functional as F

from fusedseg.functional import conv_abn
from tests.ops.conv_abn_cases import CASES, check
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.called import Called

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")
# The dtype in which every case runs: Triton's convolution does not take float64.
EXACT = {"aten": torch.float64, "triton": torch.float32}
HALF = [
    ("2d", "contiguous", torch.float16),
    ("2d", "channels_last", torch.bfloat16),
    ("1x1", "contiguous", torch.bfloat16),
    ("dilation 2", "contiguous", torch.float16),
    ("groups", "channels_last", torch.float16),
    ("groups", "contiguous", torch.bfloat16),
    ("3d", "channels_last", torch.float16),
    ("3d", "contiguous", torch.bfloat16),
]
ROWS = ("2d", "1x1", "stride 2", "groups", "same, even kernel", "3d, stride 2")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "fmt", "dtype"),
    [*((name, "contiguous", None) for name in CASES), *((name, "channels_last", None) for name in ROWS), *HALF],
)
def test_values_and_gradients(backend, device, name, fmt, dtype):
    for training in (True, False):
        check(CASES[name], backend, device, fmt, dtype or EXACT[backend], training)


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
