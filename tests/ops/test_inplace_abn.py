"""The op on both backends: how it behaves with memory, formats and autograd, and what it keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedseg
from fusedseg.activation import Activation
from fusedseg.functional import inplace_abn
from fusedseg.memory.meter import measure
from fusedseg.ops.norm import op
from fusedseg.ops.norm.spec import Spec
from tests.reference import stock_activation
from tests.tools.compiling import opcheck
from tests.tools.tensors import channels_last

ACT = Activation("leaky_relu", 0.01)


def stock(x, running_mean, running_var, weight, bias, training, activation="leaky_relu", param=0.01):
    return stock_activation(activation, param)(F.batch_norm(x, running_mean, running_var, weight, bias, training))


def test_other_strides_are_copied_once(backend, device):
    base = torch.randn(4, 3, 5, 2, device=device)
    x = base.permute(3, 1, 0, 2)
    before = base.clone()
    z = inplace_abn(x, None, None, training=True)
    assert z.is_contiguous()
    assert torch.equal(base, before)
    torch.testing.assert_close(z, stock(x, None, None, None, None, True))


@pytest.mark.parametrize("view", ["reshaped", "sliced"])
def test_view_of_a_result(backend, device, view):
    x = torch.randn(4, 6, dtype=torch.float64, device=device, requires_grad=True)

    def f(x):
        base = x * 3
        v = base.view(2, 2, 6) if view == "reshaped" else base[:, :4]
        return inplace_abn(v, None, None, training=True).square().sum()

    def plain(x):
        v = (x * 3).view(2, 2, 6) if view == "reshaped" else (x * 3)[:, :4]
        return stock(v, None, None, None, None, True).square().sum()

    assert torch.autograd.gradcheck(f, (x,))
    torch.testing.assert_close(f(x), plain(x))


def test_variance_of_large_mean(backend, device):
    """The formula E[x^2] - E[x]^2 in fp32 would give 0 here."""
    x = torch.randn(4, 2, 64, 64, dtype=torch.float64) * 0.1 + 300
    x32 = x.float().to(device)
    var = x32.double().var((0, 2, 3))
    running_mean, running_var = torch.zeros(2, device=device), torch.zeros(2, device=device)
    inplace_abn(x32, running_mean, running_var, training=True, momentum=1.0)
    torch.testing.assert_close(running_var.double(), var, rtol=1e-4, atol=0)


@pytest.mark.parametrize("fmt", ["contiguous", "channels_last"])
def test_bit_identical(backend, device, fmt):
    x = torch.randn(3, 5, 40, 41, device=device)
    x = channels_last(x) if fmt == "channels_last" else x
    results = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        z = inplace_abn(leaf * 1, None, None, training=True)
        results.append((z, *torch.autograd.grad(z.square().sum(), leaf)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_saved_bytes(backend, device, dtype, fmt):
    """A convolution with its norm and activation keeps one activation tensor, where eager mode keeps two."""
    C, layers = 4, 3

    def net(norm_act):
        blocks = [nn.Sequential(nn.Conv2d(C, C, 3, padding=1, dtype=dtype), norm_act()) for _ in range(layers)]
        return nn.Sequential(*blocks).to(device, memory_format=fmt)

    x = torch.randn(2, C, 16, 16, dtype=dtype, device=device).contiguous(memory_format=fmt)
    eager = measure(net(lambda: nn.Sequential(nn.BatchNorm2d(C), nn.LeakyReLU(0.01, inplace=True))), x).saved
    ours = measure(net(lambda: fusedseg.InPlaceABN(C)), x).saved
    # The statistics are mean and rstd in fp32; our rstd is a row of a tensor that holds both.
    per_channel = 2 * 4 * C
    assert ours <= x.nbytes * (1 + layers) + layers * per_channel
    assert eager >= x.nbytes * (1 + 2 * layers)


def test_kept_channels_grow_memory_by_just_those(backend, device):
    leaf = torch.randn(2, 4, 8, 8, device=device, requires_grad=True)
    weight = torch.tensor([1.0, 0.0, 1.0, 1e-3], device=device, requires_grad=True)
    bias = torch.full((4,), 0.5, device=device, requires_grad=True)
    x = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        inplace_abn(x, None, None, weight, bias, training=True)
    assert sorted(t.numel() for t in saved) == [4, 4, 4, 2 * 2 * 64, 2 * 4 * 64]


def test_empty_batch(backend, device):
    bn, ours = nn.BatchNorm2d(3, device=device), fusedseg.InPlaceABN(3, device=device)
    for module in (bn, ours):
        x = torch.randn(0, 3, 4, 4, device=device, requires_grad=True)
        y = module(x * 1)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad.shape == x.shape
        assert torch.equal(module.weight.grad, torch.zeros(3, device=device))
    for (name, a), b in zip(ours.state_dict().items(), bn.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# Pairs that contain each format and each kind of kept channels.
KEPT_AND_FORMAT = [pytest.param("contiguous", False, id="contiguous-none kept"),
                   pytest.param("channels_last", True, id="channels_last-one kept")]  # fmt: skip


@pytest.mark.parametrize(("fmt", "kept"), KEPT_AND_FORMAT)
def test_opcheck(backend, device, fmt, kept):
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, device=device)
    x = (channels_last(x) if fmt == "channels_last" else x).requires_grad_()
    weight = torch.tensor([1.0, 0.0 if kept else 0.5, -1.0], dtype=x.dtype, device=device, requires_grad=True)
    bias = torch.zeros(3, dtype=x.dtype, device=device, requires_grad=True)
    slots = torch.tensor([-1, 0, -1], dtype=torch.int32, device=device) if kept else None
    mean, var = torch.zeros(3, dtype=x.dtype, device=device), torch.ones(3, dtype=x.dtype, device=device)
    for stats in ((None, None), (mean, var)):
        spec = Spec("output", ACT, own=stats[0] is None)
        opcheck(op.norm_op, (x, weight, bias, None, None, *stats, slots, int(kept), *op.flat(spec)), backend)


def test_double_backward(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    functional_op = lambda x: op.norm_op(x, *(None,) * 7, 0, *op.flat(Spec("output", ACT)))[0]  # noqa: E731
    for f in (lambda x: inplace_abn(x * 1, None, None, training=True), functional_op):
        (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
        assert torch.isfinite(dx).all()
        with pytest.raises(RuntimeError, match=r"fusedseg.inplace_abn: double backward is not supported"):
            dx.sum().backward()


def test_second_backward_with_retain_graph(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    loss = inplace_abn(x * 1, None, None, training=True).square().sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_output_modified_by_the_user_raises(backend, device):
    x = torch.randn(2, 3, 4, 5, device=device, requires_grad=True)
    z = inplace_abn(x * 1, None, None, training=True)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()
