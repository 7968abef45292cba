"""The op on both convolutions: values, gradients, running statistics, memory, strides and the effect of settings."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusedseg
from fusedseg.functional import conv_abn
from fusedseg.memory.meter import measure
from fusedseg.ops.conv.convolutions import convolve_sources
from fusedseg.ops.layout import dense
from tests.ops.conv_abn_cases import CASES, SMALL, Conv, check, formatted, fused, inputs, running
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.called import Called
from tests.tools.precision import cudnn_set
from tests.tools.spy import spied

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
FORMATS = pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
STATES = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])


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


def test_bias_of_the_convolution_in_training(backend, device, dtype):
    """The gradient of the bias is exactly zero; the bias moves the running mean and does not change the output."""
    given = inputs(SMALL, dtype, device)
    unbiased = given._replace(conv_bias=None)
    mean, mean_unbiased = (running(SMALL, dtype, device) for _ in range(2))
    z = fused(given, backend, statistics=mean, momentum=0.25)
    assert torch.equal(z, fused(unbiased, backend, statistics=mean_unbiased, momentum=0.25))
    torch.testing.assert_close(mean[0] - mean_unbiased[0], 0.25 * given.conv_bias.detach(), rtol=1e-4, atol=1e-6)
    assert torch.equal(mean[1], mean_unbiased[1])
    z.square().sum().backward()
    assert torch.equal(given.conv_bias.grad, torch.zeros_like(given.conv_bias))


@STATES
@pytest.mark.parametrize("frozen", ["x", "w", "weight and bias", "all but conv_bias"])
def test_gradients_of_the_others_where_some_are_frozen(backend, device, dtype, frozen, training):
    """The case "all but conv_bias" is how a detector is fine-tuned: norms and weights are frozen, the bias trains."""
    everything = inputs(SMALL, dtype, device)
    names = {"conv_bias"} if frozen.startswith("all") else set(everything._fields) - set(frozen.split(" and "))
    statistics = running(SMALL, dtype, device)
    z = fused(everything, backend, training, statistics)
    dz = torch.randn_like(z)
    expected = dict(zip(everything._fields, torch.autograd.grad(z, everything, dz), strict=True))

    given = inputs(SMALL, dtype, device)._replace(**{n: getattr(everything, n).detach() for n in everything._fields})
    for name in names:
        getattr(given, name).requires_grad_()
    fused(given, backend, training, running(SMALL, dtype, device)).backward(dz)
    for name, t in zip(given._fields, given, strict=True):
        if name in names:
            torch.testing.assert_close(t.grad, expected[name])
        else:
            assert t.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@FORMATS
def test_saved_bytes(backend, device, dtype, fmt):
    """The layers keep the input and one activation tensor each; eager mode keeps two tensors for each layer."""
    C, layers = 4, 3
    memory_format = getattr(torch, fmt if fmt == "channels_last" else "contiguous_format")
    blocks = [fusedseg.ConvABN2d(C, C, 3, padding=1, dtype=dtype, conv_backend=backend) for _ in range(layers)]
    net = nn.Sequential(*blocks).to(device, memory_format=memory_format)
    x = torch.randn(2, C, 8, 8, dtype=dtype, device=device).contiguous(memory_format=memory_format)
    saved = measure(net, x).saved
    # The rest is 1 / sqrt(var + eps) in fp32: one row, or a row of a tensor of two rows.
    assert saved - x.nbytes * (1 + layers) in (layers * 4 * C, layers * 8 * C)


def test_kept_channels_grow_memory_by_just_those(backend, device, dtype):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        given = inputs(SMALL, dtype, device)
        z = fused(given, backend)
    K = SMALL.w[0]
    expected = [given.x.numel(), given.w.numel(), z.numel(), K, K, K, z.numel() // K]
    assert sorted(t.numel() for t in saved) == sorted(expected)


# If a size is 1, a tensor fits more than one memory format.
AMBIGUOUS = {
    "plain": ((2, 3, 5, 4), (4, 3, 3, 3)),
    "one input channel": ((2, 1, 5, 4), (4, 1, 3, 3)),
    "one output channel": ((2, 3, 5, 4), (1, 3, 3, 3)),
    "one channel each": ((2, 1, 5, 4), (1, 1, 3, 3)),
    "one position": ((2, 3, 3, 3), (4, 3, 3, 3)),
    "one row": ((2, 3, 3, 5), (4, 3, 3, 3)),
    "1x1": ((2, 3, 4, 4), (4, 3, 1, 1)),
    "empty batch": ((0, 3, 5, 4), (4, 3, 3, 3)),
    "3d": ((2, 3, 3, 5, 4), (4, 3, 1, 3, 3)),
    "3d, one channel each": ((2, 1, 3, 5, 4), (1, 1, 3, 3, 3)),
}


@pytest.mark.parametrize(("x", "w"), AMBIGUOUS.values(), ids=AMBIGUOUS)
@pytest.mark.parametrize(
    ("fmt", "w_fmt"),
    [("contiguous", "contiguous"), ("channels_last", "contiguous"), ("contiguous", "channels_last")],
    ids=["contiguous", "x channels_last", "w channels_last"],
)
def test_strides_are_those_of_compiled_code(backend, device, x, w, fmt, w_fmt):
    case = Conv(x, w)
    given = inputs(case, torch.float32, device, fmt)
    given = given._replace(w=formatted(given.w.detach(), w_fmt))
    with torch.no_grad():
        z = fused(given, backend, case=case)
    tensors = given.x.detach(), given.w
    with FakeTensorMode() as mode:
        fake_x, fake_w = map(mode.from_tensor, tensors)
        expected, _ = dense(convolve_sources((fake_x,), fake_w, None, case.geometry))
    assert z.stride() == expected.stride()
    assert z.shape == expected.shape


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("allow_tf32", True, True),
        ("allow_tf32", False, False),
        ("fp32_precision", "tf32", True),
        ("fp32_precision", "ieee", False),
    ],
)
def test_tf32_setting_reaches_the_kernel(monkeypatch, device, setting, value, expected):
    launcher = pytest.importorskip("fusedseg.kernels.conv_abn")
    seen = spied(monkeypatch, launcher, "conv_abn_fwd", lambda found, x, *args, tf32, **keywords: (x.dtype, tf32))
    with cudnn_set(setting, value):
        for x_dtype in (torch.float32, torch.float16):
            given = inputs(SMALL, x_dtype, device)
            fused(given, "triton")
    # The TF32 setting applies only to fp32.  The kernel runs several times if the two convolutions are measured.
    assert set(seen) == {(torch.float32, expected), (torch.float16, False)}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_autocast(backend, device, half):
    given, statistics = inputs(SMALL, torch.float32, device), running(SMALL, torch.float32, device)
    with torch.autocast(device.type, dtype=half):
        z = fused(given, backend, statistics=statistics)
    assert z.dtype == half
    direct, same = inputs(SMALL, torch.float32, device), running(SMALL, torch.float32, device)
    cast = direct._replace(**{n: getattr(given, n).detach().to(half) for n in ("x", "w", "conv_bias")})
    assert torch.equal(z, fused(cast, backend, statistics=same))
    # The bias is rounded to half precision only once, so both running means move by the same value.
    torch.testing.assert_close(statistics, same, rtol=0, atol=0)
    grads = torch.autograd.grad(z.float().square().sum(), given)
    assert {g.dtype for g in grads} == {torch.float32}
