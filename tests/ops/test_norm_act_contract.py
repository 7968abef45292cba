"""The memory of norm_act, the tensors that it must not change, and the requirements of PyTorch for an op."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fusedseg.activation import Activation
from fusedseg.functional import norm_act
from fusedseg.memory.meter import LiveBytes, measure
from fusedseg.ops.norm import reference as norm_reference
from fusedseg.ops.norm.call import Norm
from fusedseg.ops.norm.graph import NormCall, norm_op
from fusedseg.ops.norm.statistic import Statistic
from tests.ops.norm_act_cases import ACTIVATIONS, NORMS, fused, inputs, slope_of
from tests.tools.tensors import channels_last


def saved_by(f):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _out = f()
    return {t.data_ptr() for t in saved if t.numel() > 100}


@pytest.mark.parametrize("norm", NORMS)
def test_keeps_the_input_and_the_residual_alone(norm):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs())
    for activation, extra in (("relu", {residual.data_ptr()}), ("identity", set())):
        kept = saved_by(partial(fused, norm, x, weight, bias, activation=activation, residual=residual))
        assert kept == {x.data_ptr()} | extra


def test_saved_bytes_of_a_network():
    """Without the scope the next convolution also keeps the output, so the bytes equal those of stock modules."""
    x = torch.randn(2, 4, 16, 16)
    stock = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.b(norm_act(self.a(x), None, None, training=True, activation="relu"))

    # Statistics are two values per channel; stock also keeps the parameters of its norm.
    assert measure(Ours(), x).saved <= measure(stock, x).saved + 2 * 4 * 4


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "shape", [(2, 64, 128, 512), (1, 64, 256, 256), (1, 1, 1024, 1024)], ids=["samples", "one sample", "one channel"]
)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1.2), (torch.float16, 1.4)], ids=["fp32", "fp16"])
def test_backward_holds_one_tensor_beyond_dz(norm, shape, fmt, dtype, most):
    """That is dx.  Tiles of backward have a sixteenth of the tensor or 2^18 elements; a few are alive at once, in fp32.

    Once a tile was two channels at least, and in channels_last the whole tensor.
    """
    x = torch.randn(shape, dtype=dtype)
    x = (channels_last(x) if fmt == "channels_last" else x).requires_grad_()
    z = fused(norm, x, groups=min(32, shape[1]), activation="silu")
    dz = torch.randn_like(z)
    with LiveBytes() as live:
        torch.autograd.grad(z, x, dz)
    assert live.peak <= most * x.nbytes, live.peak / x.nbytes


@pytest.mark.parametrize("norm", NORMS)
def test_without_values_two_tiles_stand_for_all(norm, monkeypatch):
    """Gradients have the shapes of the inputs, and the peak is that of a real step where no tile has whole planes."""
    monkeypatch.setattr(norm_reference, "_plane_tiles", lambda x, norm: None)
    shape = (2, 12, 32, 64)
    peaks, tiles = [], []
    of = norm_reference._tiles
    monkeypatch.setattr(norm_reference, "_tiles", lambda x: tiles.append(of(x)) or tiles[-1])
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            x, residual = (torch.empty(shape).requires_grad_() for _ in range(2))
            weight, bias, slope = (torch.ones(12).requires_grad_() for _ in range(3))
            given = [x, weight, bias, slope, residual]
            z = fused(norm, x, weight, bias, groups=6, activation="prelu", residual=residual, slope=slope)
            dz = torch.empty(shape)
            with LiveBytes() as live:
                grads = torch.autograd.grad(z, given, dz)
        assert [g.shape for g in grads] == [t.shape for t in given]
        peaks.append(live.peak)
    assert [len(each) for each in tiles] == [12, 2]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.005)


@pytest.mark.parametrize("norm", NORMS)
def test_gradient_shared_with_another_branch_is_not_written(norm):
    for name, (activation, param, _) in ACTIVATIONS.items():
        x, _, _, residual = (None if t is None else t.requires_grad_() for t in inputs())
        other = torch.randn_like(x, requires_grad=True)
        dz = torch.randn_like(x)
        before = dz.clone()
        options = {"activation": activation, "activation_param": param, "slope": slope_of(name, x)}
        z = fused(norm, x, residual=residual, **options)
        # The addition passes the same gradient tensor to both inputs.
        (z + other).backward(dz)
        assert torch.equal(dz, before)
        assert torch.equal(other.grad, before)


def test_expanded_gradient_and_other_strides():
    base = torch.randn(4, 3, 5, 2, dtype=torch.float64)
    residual = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for r in (None, residual, channels_last(residual)):
        grads = []
        for ours in (False, True):
            leaf = base.clone().requires_grad_()
            x = leaf.permute(3, 1, 0, 2)
            if ours:
                z = norm_act(x, None, None, training=True, activation="silu", residual=r)
                assert z.is_contiguous()
            else:
                y = F.batch_norm(x, None, None, training=True)
                z = F.silu(y if r is None else y + r)
            grads.append((z, *torch.autograd.grad(z.sum(), leaf)))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("norm", NORMS)
def test_empty_batch(norm):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((0, 6, 4, 4)))
    slope = torch.ones(1, requires_grad=True)
    z = fused(norm, x, weight, bias, activation="prelu", residual=residual, slope=slope)
    grads = torch.autograd.grad(z.sum(), (x, weight, bias, residual, slope))
    assert [tuple(g.shape) for g in grads] == [(0, 6, 4, 4), (6,), (6,), (0, 6, 4, 4), (1,)]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_opcheck(norm, fmt):
    x, weight, bias, residual = (t.requires_grad_() for t in inputs((2, 3, 4, 5), torch.float64, fmt))
    slope = torch.full((3,), 0.2, dtype=x.dtype, requires_grad=True)
    running = (torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype))
    spec = Norm("input", Activation("prelu", 0.25), over=Statistic(norm, 1 if norm == "group" else 0))
    torch.library.opcheck(norm_op, NormCall(spec, x, weight, bias, residual, slope=slope).arguments)
    if norm == "batch":
        spec = spec._replace(act=Activation("identity", 0.0), own=False)
        torch.library.opcheck(norm_op, NormCall(spec, x, None, None, residual, *running).arguments)


def test_double_backward():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    spec = Norm("input", Activation("silu", 0.0))
    functional_op = lambda x: norm_op(*NormCall(spec, x).arguments)[0]  # noqa: E731
    for f in (lambda x: norm_act(x, None, None, training=True, activation="silu"), functional_op):
        (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        assert torch.isfinite(dx).all()
        with pytest.raises(RuntimeError, match=r"fusedseg.norm_act: double backward is not supported"):
            dx.sum().backward()


def test_backward_twice_and_between_other_calls():
    """The running statistics of an eval call may move before its backward runs."""
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    running = torch.zeros(3), torch.ones(3)
    loss = norm_act(x, *running, activation="relu").square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    norm_act(x + 3, *running, training=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_input_modified_by_the_user_raises():
    x = torch.randn(2, 3, 4, 5, requires_grad=True) * 1
    z = norm_act(x, None, None, training=True)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
