"""Compares random shapes, strides, dtypes and options with stock modules in float64.

A run has 100 examples, and 2,000 with ``pytest -m slow``.  Failures that were found have tests of their own elsewhere.
"""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import fusedseg
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error

DTYPES = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16])
WEIGHTS = st.sampled_from([1.0, -1.0, 0.3, -2.5, 1e-4, 0.0])
BIASES = st.sampled_from([0.0, 0.5, -0.5, 3.0, -3.0])
ACTIVATIONS = st.one_of(
    st.tuples(st.just("leaky_relu"), st.sampled_from([0.01, 0.1, 0.5, 1.0, 2.0])),
    st.tuples(st.just("elu"), st.sampled_from([0.5, 1.0, 2.0])),
    st.just(("identity", 0.0)),
)
STRIDES = st.sampled_from(["contiguous", "channels last", "transposed", "every second", "expanded dz"])


def examples(count, fixed):
    # A database of failures would be a file in the checkout.
    return settings(
        max_examples=count, deadline=None, database=None, derandomize=fixed, suppress_health_check=list(HealthCheck)
    )


def laid_out(x, strides):
    if strides == "channels last" and x.dim() > 2:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if strides == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if strides == "every second":
        return torch.stack([x, x], dim=-1).flatten(-2)[..., ::2]
    return x


def activation(name, param):
    if name == "leaky_relu":
        return nn.LeakyReLU(param)
    return nn.ELU(param) if name == "elu" else nn.Identity()


def run(net, x, dz):
    """Returns the output and the gradients of the input and the parameters."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    z = net(x * 1)
    return z.detach(), torch.autograd.grad(z, [x, *net.parameters()], dz(z), allow_unused=True)


def check(ours, stock, x, dtype, strides, gain=1.0):
    """Compares ``ours`` in ``dtype`` with ``stock`` in float64; gradients are sums of terms of size ``gain`` * dz."""

    def dz(z):
        if strides == "expanded dz":
            return torch.full((), 0.7, dtype=z.dtype).expand(z.shape)
        generator = torch.Generator().manual_seed(0)
        return laid_out(torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z.dtype), strides)

    x = laid_out(x.to(dtype), strides)
    try:
        # The tensors are contiguous, because stock batch norm in eval mode misreads gradients of some strides; see
        # test_faults.py.
        expected, gradients = run(stock, x.double().contiguous(), lambda z: dz(z).contiguous())
    except (ValueError, RuntimeError):
        with pytest.raises((ValueError, RuntimeError)):
            run(ours, x, dz)
        return
    z, mine = run(ours, x, dz)
    assert z.shape == expected.shape
    assert z.dtype == dtype
    # The variance of a small batch depends on rounding.
    assert relative_error(z, expected) <= 20 * FORWARD_TOLERANCE[dtype]
    if dtype in (torch.float16, torch.bfloat16):
        # If rounding moves a y across the kink, its gradient is wrong by its whole size.
        assert all(d is None or d.isfinite().all() for d in mine)
        return
    # The terms of a sum may cancel, so the error is also compared with the size of the terms.
    floor = 1e-2 * gain * torch.linalg.vector_norm(dz(expected)).item()
    # The rounding of a bias moves every xhat of a channel equally, by up to u |bias / weight|, here at most 10 u.
    alike = 5 * torch.finfo(dtype).eps * dz(expected).abs().sum().item()
    for d, exact in zip(mine, gradients, strict=True):
        if exact is not None:
            error = torch.linalg.vector_norm(d.double() - exact).item()
            scale = max(torch.linalg.vector_norm(exact).item(), floor)
            assert error <= 20 * GRADIENT_TOLERANCE[dtype] * scale + alike


@st.composite
def norms(draw):
    spatial = draw(st.lists(st.integers(1, 7), max_size=3))
    shape = (draw(st.integers(0, 4)), draw(st.integers(1, 9)), *spatial)
    # Statistics of two values amplify rounding without limit.
    assume(shape[0] == 0 or shape[0] * torch.Size(spatial).numel() > 3)
    options = {
        "eps": draw(st.sampled_from([1e-5, 1e-3])),
        "momentum": draw(st.sampled_from([0.1, 1.0, None])),
        "affine": draw(st.booleans()),
        "track_running_stats": draw(st.booleans()),
    }
    return shape, options, draw(ACTIVATIONS), draw(DTYPES), draw(STRIDES), draw(st.booleans()), draw(st.data())


def check_norm(case):
    shape, options, act, dtype, strides, training, data = case
    C = shape[1]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ours = fusedseg.InPlaceABN(C, **options, activation=act[0], activation_param=act[1], dtype=wide)
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](C, **options)
    if options["affine"]:
        with torch.no_grad():
            ours.weight.copy_(torch.tensor([data.draw(WEIGHTS) for _ in range(C)]))
            ours.bias.copy_(torch.tensor([data.draw(BIASES) for _ in range(C)]))
    norm = norm.double()
    norm.load_state_dict(ours.state_dict())
    check(ours.train(training), nn.Sequential(norm, activation(*act)).train(training), torch.randn(shape) * 2 + 1,
          dtype, strides)  # fmt: skip
    for mine, theirs in zip(ours.buffers(), norm.buffers(), strict=True):
        assert relative_error(mine, theirs) <= 1e-6 if mine.dtype != torch.int64 else mine == theirs


@st.composite
def convolutions(draw):
    dims = draw(st.sampled_from([2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2]))
    stride = draw(st.integers(1, 2))
    options = {
        "kernel_size": draw(st.integers(1, 3)),
        "stride": stride,
        "padding": draw(st.sampled_from([0, 1, "valid", *(["same"] if stride == 1 else [])])),
        "dilation": draw(st.integers(1, 2)),
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": draw(st.sampled_from(["zeros", "zeros", "reflect", "circular"])),
    }
    channels = [groups * draw(st.integers(1, 4)) for _ in range(2)]
    shape = (draw(st.integers(1, 3)), channels[0], *(draw(st.integers(3, 7)) for _ in range(dims)))
    return shape, channels[1], options, draw(ACTIVATIONS), draw(DTYPES), draw(STRIDES), draw(st.booleans())


def check_convolution(case):
    shape, out, options, act, dtype, strides, training = case
    dims = len(shape) - 2
    conv, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
    stock = nn.Sequential(conv(shape[1], out, **options), norm(out), activation(*act)).double()
    x = torch.randn(shape)
    with torch.no_grad():
        # The reference convolves the weights as they are rounded to dtype.
        for p in stock[0].parameters():
            p.copy_(p.to(dtype))
    fused = getattr(fusedseg, f"ConvABN{dims}d")
    ours = fused.from_modules(copy.deepcopy(stock[0]), copy.deepcopy(stock[1]), *act)
    ours.conv.to(dtype)
    ours.norm.to(torch.float64 if dtype == torch.float64 else torch.float32)
    gain = 1.0
    try:
        y = stock[0](x.to(dtype).double()).transpose(0, 1).flatten(1)
        assume(y.shape[1] > 3)
        if training:
            # The gradient of the weight is a sum of x * dz / std.
            gain = max(1.0, (x.abs().max() / (y.var(1, correction=0) + stock[1].eps).sqrt().min()).item())
    except RuntimeError:
        # Stock modules refuse these inputs, and so must ours.
        pass
    if training and options["bias"]:
        # The stock gradient of this bias is only rounding.
        stock[0].bias.requires_grad_(False)
        ours.conv.bias.requires_grad_(False)
    check(ours.train(training), stock.train(training), x, dtype, strides, gain)


@st.composite
def pools(draw):
    dims = draw(st.sampled_from([2, 3]))
    kernel = draw(st.integers(1, 3))
    options = {
        "kernel_size": kernel,
        "stride": draw(st.sampled_from([None, 1, 2, 3])),
        "padding": draw(st.integers(0, kernel // 2)),
        "dilation": draw(st.integers(1, 2)),
        "ceil_mode": draw(st.booleans()),
    }
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 5)), *(draw(st.integers(2, 9)) for _ in range(dims)))
    # There are only a few different values, so that many values tie.
    return shape, options, draw(DTYPES), draw(STRIDES), draw(st.integers(2, 5))


def check_pool(case):
    shape, options, dtype, strides, values = case
    name = f"MaxPool{len(shape) - 2}d"
    check(
        getattr(fusedseg, name)(**options), getattr(nn, name)(**options), torch.randint(values, shape), dtype, strides
    )


KINDS = {
    "norms": (norms, check_norm, 40),
    "convolutions": (convolutions, check_convolution, 30),
    "pools": (pools, check_pool, 30),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["few", "many"])
def test_as_stock(kind, times):
    cases, body, count = KINDS[kind]

    def seeded(case, seed):
        torch.manual_seed(seed)
        body(case)

    examples(count * times, times == 1)(given(cases(), st.integers(0, 2**20))(seeded))()
