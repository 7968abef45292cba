"""Calls that the op refuses: the text of the error, and that no tensor has changed before the error."""

import pytest
import torch

import fusedseg
from fusedseg.functional import conv_abn
from fusedseg.ops.conv import conv_abn as op


def call(x=(2, 6, 5, 5), w=(4, 6, 3, 3), conv_bias=None, running_mean=None, running_var=None, training=True, **options):
    """Calls the op; an argument is a tensor, or the shape of a tensor to make."""
    x, w = (torch.randn(t) if isinstance(t, tuple) else t for t in (x, w))
    return conv_abn(x, w, conv_bias, running_mean, running_var, training=training, **options)


def ones(*shape, **options):
    return lambda: torch.ones(*shape, **options)


# Arguments (the test makes the tensors), the error and its text.
REFUSED = {
    "channel mismatch": ({"x": (2, 5, 5, 5)}, ValueError,
        r"x must have 6 channels for a weight of shape \(4, 6, 3, 3\) and groups=1, got 5 in \(2, 5, 5, 5\)"),
    "one dimension too few": ({"x": (6, 5, 5)}, ValueError,
        r"x must have shape \(N, C\) with 2 spatial dimensions after it, got \(6, 5, 5\)"),
    "a vector": ({"x": (6,)}, ValueError, r"x must have shape \(N, C, \*spatial\), got \(6,\)"),
    "one dimension too few for even kernel sizes": ({"x": (6, 1), "w": (4, 6, 2, 2), "padding": "same"}, ValueError,
        r"x must have shape \(N, C\) with 2 spatial dimensions after it, got \(6, 1\)"),
    "weight of one dimension": ({"x": (2, 6, 5), "w": (4, 6, 3)}, ValueError,
        r"conv_weight must have shape \(K, C / groups, \*kernel\) in two or three dimensions, got \(4, 6, 3\)"),
    "no tensor": ({"x": "x"}, TypeError, r"x must be a tensor, .* got \['str'\]"),
    "integer input": ({"x": ones(2, 6, 5, 5, dtype=torch.int32)}, TypeError,
        r"x must be float16, bfloat16, float32 or float64, got torch.int32"),
    "dtype of the weight": ({"w": ones(4, 6, 3, 3, dtype=torch.float16)}, TypeError,
        r"conv_weight must be torch.float32, the dtype of x, got torch.float16"),
    "dtype of the bias": ({"conv_bias": ones(4, dtype=torch.float64)}, TypeError,
        r"conv_bias must be torch.float32, the dtype of x, got torch.float64"),
    "device of the weight": ({"w": ones(4, 6, 3, 3, device="meta")}, ValueError,
        r"conv_weight must be on cpu, the device of x, got meta"),
    "groups that do not divide": ({"x": (2, 6, 5, 5), "w": (4, 2, 3, 3), "groups": 3}, ValueError,
        r"groups=3 must divide the output channels, got 4"),
    "groups 0": ({"groups": 0}, ValueError, r"groups must be an integer >= 1, got 0"),
    "shape of the bias": ({"conv_bias": ones(6)}, ValueError, r"conv_bias must have shape \(4,\), got \(6,\)"),
    "kernel larger than the input": ({"x": (2, 6, 4, 5), "dilation": 2}, ValueError,
        r"the kernel, \(3, 3\) with dilation \(2, 2\), does not fit in x \(2, 6, 4, 5\) with padding \(0, 0\)"),
    "one value per channel": ({"x": (1, 6, 3, 3)}, ValueError,
        r"expected more than 1 value per channel when training, got input size \(1, 4, 1, 1\)"),
    "channels of the norm": ({"weight": ones(6)}, ValueError,
        r"weight must have shape \(4,\), one value per channel of the convolution's output, got \(6,\)"),
    "eval without statistics": ({"training": False, "running_mean": None, "running_var": None}, ValueError,
        r"running_mean and running_var are needed when training is False, got None"),
    "stride 0": ({"stride": 0}, ValueError, r"stride must be an integer >= 1, or 2 of them, got 0"),
    "three strides": ({"stride": (1, 1, 1)}, ValueError,
        r"stride must be an integer >= 1, or 2 of them, got \(1, 1, 1\)"),
    "negative padding": ({"padding": -1}, ValueError, r"padding must be an integer >= 0, or 2 of them, got -1"),
    "word of padding": ({"padding": "full"}, ValueError, r"padding must be integers, 'same' or 'valid', got 'full'"),
    "same with a stride": ({"padding": "same", "stride": 2}, ValueError,
        r"padding='same' needs a stride of 1, got \(2, 2\)"),
    "unknown conv_backend": ({"conv_backend": "cudnn"}, ValueError,
        r"conv_backend must be one of auto, triton, aten, got 'cudnn'"),
    "relu": ({"activation": "relu"}, ValueError, r"activation 'relu' cannot be inverted; use fusedseg.BatchNormAct"),
}  # fmt: skip


@pytest.fixture
def nothing_runs(monkeypatch):
    """Fails the test if one of the two convolutions starts."""

    def launched(*args):
        raise AssertionError("a convolution was launched")

    monkeypatch.setattr(op, "_forward_with", launched)


@pytest.mark.parametrize(("arguments", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(nothing_runs, arguments, error, text):
    made = {name: value() if callable(value) else value for name, value in arguments.items()}
    statistics = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
    with pytest.raises(error, match="fusedseg.conv_abn: " + text):
        call(**statistics | made)
    assert not statistics["running_mean"].any()
    assert torch.equal(statistics["running_var"], torch.ones(4))


@pytest.mark.parametrize(
    ("name", "dtype", "text"),
    [
        ("aten", torch.float32, r"conv_backend is 'triton', but .* fusedseg.backend is 'aten'"),
        ("auto", torch.float32, r"conv_backend is 'triton', but .* 'auto' takes Triton on GPUs only, and this is cpu"),
        ("triton", torch.float64, r"conv_backend is 'triton', but x must be float16, .* got torch.float64"),
    ],
)
def test_triton_where_it_cannot_serve(monkeypatch, nothing_runs, name, dtype, text):
    if name == "triton":
        pytest.importorskip("triton")
    monkeypatch.setattr(fusedseg, "backend", name)
    mean, var = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    x, w, conv_bias = (torch.randn(s, dtype=dtype) for s in ((2, 6, 5, 5), (4, 6, 3, 3), (4,)))
    with pytest.raises(RuntimeError, match="fusedseg.conv_abn: " + text):
        call(x, w, conv_bias, mean, var, conv_backend="triton")
    assert not mean.any()
    assert torch.equal(var, torch.ones_like(var))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=lambda d: str(d)[6:])
def test_autocast_does_not_turn_other_dtypes_into_numbers(nothing_runs, dtype):
    """Stock convolutions refuse such dtypes under autocast too; a cast would drop imaginary parts."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"x must be float16, .* got torch"):
        call(torch.ones(2, 6, 5, 5, dtype=dtype))
