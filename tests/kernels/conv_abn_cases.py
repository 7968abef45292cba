"""Convolutions that the tests of ``conv_abn_fwd`` launch, and their comparison with float64."""

import torch
import triton
from torch import Tensor

from fusedseg.ops.layout import layout_of
from tests import reference
from tests.ops import conv_abn_cases
from tests.ops.conv_abn_cases import Conv, Inputs, running
from tests.reference import FORWARD_TOLERANCE, relative_error
from tests.tools.tensors import channels_last
from tests.tools.traffic import checked

LEAKY, ELU, IDENTITY = ("leaky_relu", 0.01), ("elu", 1.3), ("identity", 0.0)
EPS = 1e-5
# For tf32, a GPU also cuts off in its sums, in an order that is not documented.
TF32_TOLERANCE = 1e-3


def inputs(conv: Conv, dtype, device, rows=True) -> Inputs:
    """Inputs without gradients, whose parameters are fp32."""
    fmt = "channels_last" if rows else "contiguous"
    given = conv_abn_cases.inputs(conv, dtype, device, fmt, kept=False, params=torch.float32)
    x, w, conv_bias, *affine = (t.detach() for t in given)
    return Inputs(x, w, conv_bias.float(), *affine)


def output(conv: Conv, dtype, device, rows=True) -> Tensor:
    """An output full of NaN, so that an element that no program writes is found."""
    out = torch.full(conv.out, float("nan"), dtype=dtype, device=device)
    return channels_last(out) if rows else out


def running_statistics(conv: Conv, device) -> tuple[Tensor, Tensor]:
    return running(conv, torch.float32, device)


def cut_off(x: Tensor) -> Tensor:
    """Truncates fp32 as a tensor core does for tf32: the lowest 13 bits become 0.  The interpreter does not do it."""
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


def launch(conv, given, out, act=LEAKY, training=True, running=(None, None), kept=None, tf32=False):
    """Writes ``out``; returns mean, rstd and xhat of the kept channels."""
    from fusedseg.kernels.conv_abn import conv_abn_fwd

    layouts = layout_of(given.x), layout_of(out)
    with checked(out.device):
        return conv_abn_fwd(
            given.x, given.w, out, *layouts, conv.geometry, given.conv_bias, given.weight, given.bias, *running,
            training, 0.1, EPS, act, kept, tf32,
        )  # fmt: skip


def check(conv, given, out, act=LEAKY, training=True, running=(None, None), kept=None, tf32=False) -> None:
    """Compares everything that ``launch`` writes and returns with float64."""
    before = [None if r is None else r.clone() for r in running]
    strides = out.stride()
    mean, rstd, xhat = launch(conv, given, out, act, training, running, kept, tf32)

    x, w, conv_bias, weight, bias = (None if t is None else t.cpu() for t in given)
    before = [None if r is None else r.cpu() for r in before]
    compiled = not triton.knobs.runtime.interpret
    if tf32 and compiled:
        x, w = cut_off(x), cut_off(w)
    y = reference.convolve(x, w, None if training else conv_bias, *conv[2:])
    if training or kept is not None:
        # The kernel normalises the stored values.
        y = y.to(out.dtype).double()
    options = {"training": training, "eps": EPS, "activation": act[0], "param": act[1]}
    expected = reference.norm_act(y, weight, bias, *before, **options)
    tolerance = TF32_TOLERANCE if tf32 and out.device.type == "cuda" else FORWARD_TOLERANCE[out.dtype]
    assert out.stride() == strides
    assert relative_error(out, expected.out) <= tolerance
    # A value between two values of the dtype may be stored as either, so fp16 and bf16 need this tolerance.
    axes = [d for d in range(y.dim()) if d != 1]
    variance = y.var(axes, correction=0) if training else before[1].double()
    assert relative_error(rstd, (variance + EPS).rsqrt()) <= tolerance
    if training:
        assert relative_error(mean, y.mean(axes)) <= tolerance
    if running[0] is not None:
        assert relative_error(running[0], expected.running_mean) <= tolerance
        assert relative_error(running[1], expected.running_var) <= tolerance
    if kept is not None:
        slots, count = kept
        normalised = reference.norm_act(y, None, None, *before, **options | {"activation": "identity"}).out
        normalised = normalised[:, slots.cpu() >= 0]
        if layout_of(out).rows:
            normalised = normalised.movedim(1, -1)
        assert xhat.numel() == normalised.numel() == out.numel() // out.shape[1] * count
        assert relative_error(xhat, normalised.flatten()) <= 2 * tolerance
