"""Faults and misuse raise an error or behave as in stock modules, and leave no state half-changed."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fusedseg
from fusedseg.ops.conv import conv_abn as conv_abn_op
from tests.tools.threads import in_threads

SLOPE = 0.01


PAIRS = {
    "InPlaceABN": (fusedseg.InPlaceABN, nn.BatchNorm2d),
    "BatchNormAct": (fusedseg.BatchNormAct, nn.BatchNorm2d),
    "InPlaceInstanceNormAct": (partial(fusedseg.InPlaceInstanceNormAct, affine=True),
                               partial(nn.InstanceNorm2d, affine=True)),
    "InPlaceGroupNormAct": (partial(fusedseg.InPlaceGroupNormAct, 3), partial(nn.GroupNorm, 3)),
}  # fmt: skip


def pair(name="InPlaceABN"):
    """Makes our module and the stock modules with the same parameters."""
    ours, stock = PAIRS[name]
    return ours(3, activation_param=SLOPE).double(), nn.Sequential(stock(3), nn.LeakyReLU(SLOPE)).double()


def step(module, x, dz):
    x = x.clone().requires_grad_()
    z = module(x * 1)
    z.backward(dz)
    return z.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()


VALUES = {
    "NaN": lambda x: x[0, 1, 0].fill_(float("nan")),
    "infinite": lambda x: x[0, 1, 0].fill_(float("inf")),
    "minus infinite": lambda x: x[0, 1, 0].fill_(float("-inf")),
    "all equal": lambda x: x[:, 1].fill_(3.0),
    "all zero": lambda x: x[:, 1].zero_(),
    "huge": lambda x: x[:, 1].mul_(1e100),
    "subnormal": lambda x: x[:, 1].mul_(1e-310),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("value", VALUES)
def test_values_as_stock(backend, value, name):
    """Unusual values in one channel give the same result as stock modules, and do not affect the other channels."""
    x, dz = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64)
    VALUES[value](x)
    ours, stock = pair(name)
    for mine, theirs in zip(step(ours, x, dz), step(stock, x, dz), strict=True):
        # An infinite input makes the whole channel NaN in both modules.
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_weight_containing_nan(backend):
    """A weight that is NaN makes only its own channel NaN."""
    ours, _ = pair()
    with torch.no_grad():
        ours.weight[1] = float("nan")
    x, dz = torch.randn(2, 2, 3, 4, 5, dtype=torch.float64)
    z, dx, *_ = step(ours, x, dz)
    assert z[:, 1].isnan().all()
    assert dx[:, 1].isnan().all()
    for t in (z, dx):
        assert t[:, [0, 2]].isfinite().all()


MODULES = {
    "InPlaceABN": lambda: fusedseg.InPlaceABN(2, activation="identity"),
    "BatchNormAct": lambda: fusedseg.BatchNormAct(2, activation="identity"),
    "ConvABN2d": lambda: fusedseg.ConvABN2d(2, 2, 1, activation="identity"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_gradient_of_strides_that_stock_batch_norm_misreads(backend, name, training):
    """Four pixels have their two channels side by side in memory.

    ``nn.BatchNorm2d`` in eval mode (torch 2.13) then returns another gradient than for a contiguous copy.
    """
    layer = MODULES[name]().double().train(training)
    x, dz = torch.randn(2, 1, 2, 1, 4, dtype=torch.float64)
    x.requires_grad_()
    odd = dz.transpose(0, -1).contiguous().transpose(0, -1)
    assert odd.stride() == (1, 1, 1, 2)
    first, second = (torch.autograd.grad(layer(x * 1), x, of) for of in (dz, odd))
    torch.testing.assert_close(second, first)


@pytest.mark.parametrize("way", [pytest.param("torch.compile", marks=pytest.mark.slow), "Module.compile"])
def test_pickled(way):
    """A compiled module is compiled again after it is unpickled."""
    net = fusedseg.ConvABN2d(1, 2, 3).double()
    run = torch.compile(net, backend="aot_eager") if way == "torch.compile" else net
    if way == "Module.compile":
        net.compile(backend="aot_eager")
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    run(x).sum().backward()
    copied = pickle.loads(pickle.dumps(run))
    torch.testing.assert_close(copied(x), run(x))
    copied(x).sum().backward()
    torch._dynamo.reset()


def test_threads():
    """Several threads share one module in eval mode, and use a module of their own in training."""
    net = fusedseg.unet.UNet(1, 2, widths=(4, 8))
    x = torch.randn(4, 1, 8, 8)
    expected = copy.deepcopy(net)(x).detach(), net.eval()(x).detach()

    def run():
        return copy.deepcopy(net).train()(x).detach(), net(x).detach()

    for found in in_threads(*[run] * 4):
        torch.testing.assert_close(found, expected)


class Normalised(Dataset):
    """Passes samples through a fused layer in the worker process."""

    def __init__(self):
        self.layer = fusedseg.ConvABN2d(1, 2, 3, padding=1).eval()

    def __len__(self):
        return 4

    def __getitem__(self, i):
        with torch.no_grad():
            return self.layer(torch.full((1, 1, 6, 6), float(i)))[0]


def test_forked_data_loader_workers():
    data = Normalised()
    # The parent process has run the layer before, which must not stop the workers.
    expected = torch.stack([data[i] for i in range(4)])
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
    torch.testing.assert_close(next(iter(loader)), expected)


class Stopped:
    """Replaces a function so that its n-th call raises ``error``."""

    def __init__(self, function, error, after=0):
        self.function, self.error, self.left = function, error, after

    def __call__(self, *args, **kwargs):
        if self.left == 0:
            raise self.error
        self.left -= 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), KeyboardInterrupt()], ids=["OOM", "Ctrl-C"])
@pytest.mark.parametrize("where", ["convolution", "statistics"])
def test_stopped_forward_moves_no_statistics(backend, monkeypatch, error, where):
    net = fusedseg.ConvABN2d(2, 3, 3)
    state = copy.deepcopy(net.state_dict())
    x = torch.randn(2, 2, 5, 5)
    if where == "convolution":
        monkeypatch.setattr(conv_abn_op, "convolve_sources", Stopped(conv_abn_op.convolve_sources, error))
    else:
        monkeypatch.setattr(conv_abn_op.norm_op, "forward", Stopped(conv_abn_op.norm_op.forward, error))
    with pytest.raises(type(error)):
        net(x)
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)
    monkeypatch.undo()
    # Training continues after the error.
    net(x).sum().backward()


# rstd and the side buffer; an op that keeps its output needs no memory for the mean.
@pytest.mark.parametrize("nth", range(2))
def test_out_of_memory_in_a_launcher(monkeypatch, nth):
    """A launcher allocates memory before any kernel runs, so the input and the running statistics do not change."""
    pytest.importorskip("triton")
    from fusedseg.kernels import norm_act, norm_stats

    monkeypatch.setattr(fusedseg, "backend", "triton")
    layer = fusedseg.InPlaceABN(3)
    with torch.no_grad():
        # The kept channel needs a side buffer, which is allocated too.
        layer.weight[0] = 0
    x = torch.randn(2, 3, 40, 1000)
    state, before = copy.deepcopy(layer.state_dict()), x.clone()
    empty = Stopped(torch.empty, torch.OutOfMemoryError("out of memory"), after=nth)
    fake = type("torch", (), {"__getattr__": lambda self, name: empty if name == "empty" else getattr(torch, name)})()
    for module in (norm_act, norm_stats):
        monkeypatch.setattr(module, "torch", fake)
    with pytest.raises(torch.OutOfMemoryError):
        layer(x)
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    assert torch.equal(x, before)
