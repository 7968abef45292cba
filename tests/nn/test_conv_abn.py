"""Compares the module with a convolution, nn.BatchNorm and an activation: function, state and behaviour."""

import inspect

import pytest
import torch
from torch import nn

from fusedseg import ConvABN2d, ConvABN3d
from tests.nn.test_norms import fill

CONVS = {2: nn.Conv2d, 3: nn.Conv3d}
BATCH_NORMS = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
OURS = {2: ConvABN2d, 3: ConvABN3d}
SIZES = {2: (6, 7), 3: (4, 5, 3)}
NORM = ("eps", "momentum", "affine", "track_running_stats")


def renamed(state):
    """Renames the keys of a state dict of ``Sequential(conv, bn, activation)`` to our module's keys."""
    return {name.replace("0.", "conv.", 1).replace("1.", "norm.", 1): t for name, t in state.items()}


def pair(dims=2, dtype=torch.float64, **options):
    """Makes the stock modules and our module with the same, non-trivial state."""
    options = {"kernel_size": 3, "padding": 1} | options
    of_norm = {name: options.pop(name) for name in NORM if name in options}
    stock = nn.Sequential(
        CONVS[dims](4, 6, dtype=dtype, **options), BATCH_NORMS[dims](6, dtype=dtype, **of_norm), nn.LeakyReLU(0.01)
    )
    fill(stock[1])
    ours = OURS[dims](4, 6, dtype=dtype, **options, **of_norm)
    ours.load_state_dict(renamed(stock.state_dict()), strict=True)
    return stock, ours


def step(net, x):
    """Returns the output and all gradients."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    net.zero_grad()
    z = net(leaf)
    # The loss is not a plain sum, because batch norm maps a constant gradient to zero.
    (z * z.detach().cos()).sum().backward()
    return z, leaf.grad, *(p.grad for p in net.parameters())


def assert_same(stock, ours, x):
    torch.testing.assert_close(step(ours, x), step(stock, x))
    assert_same_state(stock, ours)


def assert_same_state(stock, ours):
    torch.testing.assert_close(dict(ours.state_dict()), renamed(stock.state_dict()))


def data(dims=2, dtype=torch.float64):
    return torch.randn(2, 4, *SIZES[dims], dtype=dtype)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False, "stride": 2},
        {"padding": "same", "dilation": 2},
        {"kernel_size": 2, "padding": "same"},
        {"groups": 2, "kernel_size": 1, "padding": 0},
        {"padding_mode": "reflect"},
        {"padding_mode": "circular", "padding": "same"},
        {"padding_mode": "replicate", "stride": 2},
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"momentum": 0.3, "eps": 1e-2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths:UserWarning")
def test_training_and_eval_as_stock(dims, options):
    stock, ours = pair(dims, **options)
    for _ in range(2):
        assert_same(stock, ours, data(dims))
    stock.eval()
    ours.eval()
    assert_same(stock, ours, data(dims))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", [{}, {"bias": False, "affine": False}, {"track_running_stats": False}], ids=str)
def test_from_and_to_modules_share_everything(dims, options):
    stock, _ = pair(dims, **options)
    ours = OURS[dims].from_modules(stock[0], stock[1])
    conv, bn, act = ours.to_modules()
    assert ours.conv is conv is stock[0]
    assert type(bn) is BATCH_NORMS[dims]
    for name, t in stock[1].state_dict(keep_vars=True).items():
        assert getattr(bn, name) is t
        assert getattr(ours.norm, name) is t
    assert [ours.training, bn.training] == [True, True]
    x = data(dims)
    torch.testing.assert_close(nn.Sequential(conv, bn, act).eval()(x), ours.eval()(x))
    torch.testing.assert_close(ours(x), stock.eval()(x))


@pytest.mark.parametrize(
    ("activation", "param", "expected"),
    [("leaky_relu", 0.2, nn.LeakyReLU(0.2)), ("elu", 1.5, nn.ELU(1.5)), ("identity", 0.0, nn.Identity())],
)
def test_to_modules_has_the_activation(activation, param, expected):
    stock, _ = pair()
    ours = ConvABN2d.from_modules(stock[0], stock[1], activation, param)
    act = ours.to_modules()[2]
    assert type(act) is type(expected)
    y = torch.linspace(-2, 2, 9)
    assert torch.equal(act(y.clone()), expected(y.clone()))
    stock[2] = expected
    assert_same(stock, ours, data())


def test_from_modules_keeps_the_mode_of_the_norm():
    stock, _ = pair()
    stock.eval()
    ours = ConvABN2d.from_modules(stock[0], stock[1], conv_backend="aten")
    assert not ours.training
    assert not ours.norm.training
    assert ours.conv_backend == "aten"


@pytest.mark.parametrize("training", [True, False])
def test_counts_a_batch_in_every_call(backend, device, training):
    """The op counts, as the stock norm does; the measurement of "auto" counts none."""
    module = ConvABN2d(4, 6, 3, conv_backend="auto" if backend == "aten" else "triton").to(device).train(training)
    x = torch.randn(2, 4, 8, 8, device=device)
    module(x)
    with torch.no_grad():
        module(x)
    assert module.norm.num_batches_tracked == 2 * training
    program = torch.export.export(module, (x,), strict=False)
    program.module()(x)
    assert program.module().state_dict()["norm.num_batches_tracked"] == 3 * training


def test_repr():
    text = repr(ConvABN2d(4, 6, 3, stride=2, conv_backend="aten", activation="identity"))
    assert "conv_backend=aten" in text
    assert "(conv): Conv2d(4, 6, kernel_size=(3, 3), stride=(2, 2))" in text
    assert "(norm): InPlaceABN(6" in text
    assert "activation=identity" in text
    assert "conv_backend" not in repr(ConvABN3d(4, 6, 3))


def test_signature_begins_as_that_of_the_convolution():
    for ours, conv in ((ConvABN2d, nn.Conv2d), (ConvABN3d, nn.Conv3d)):
        mine, theirs = (inspect.signature(c).parameters for c in (ours, conv))
        shared = [name for name in theirs if name not in ("device", "dtype")]
        assert list(mine)[: len(shared)] == shared
        assert all(mine[name].default == theirs[name].default for name in theirs)
        assert all(p.kind == p.KEYWORD_ONLY for name, p in mine.items() if name not in shared)
