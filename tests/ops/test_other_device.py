"""Kernels are launched under the device of their tensors, which need not be the current one.

A driver launches on the current device.  There the address of a tensor of another GPU is not valid, or worse, is.
``tests/training/test_cuda.py`` runs this on two GPUs.
"""

import contextlib

import pytest
import torch
from torch.overrides import TorchFunctionMode

import fusedseg
from fusedseg import _backend
from fusedseg.ops.conv import conv_abn
from fusedseg.ops.norm import triton

C = 4


class Guarded:
    """Notes the tensors whose devices are guarded, and launches without a guard."""

    def __init__(self, monkeypatch):
        from fusedseg.kernels.launcher import Launcher

        self.guarded, self.launched, self.unguarded = [], [], []
        call, context = Launcher.__call__, _backend.launching

        @contextlib.contextmanager
        def launching(x):
            self.guarded.append(x)
            with context(x):
                yield
            self.guarded.pop()

        def launch(launcher, tensors, *floats):
            name = launcher._kernel.fn.__name__
            self.launched.append(name)
            if not self.guarded:
                self.unguarded.append(name)
            call(launcher, tensors, *floats)

        for module in (_backend, conv_abn, triton):
            monkeypatch.setattr(module, "launching", launching)
        monkeypatch.setattr(Launcher, "__call__", launch)


@pytest.fixture
def guarded(needs_interpreter, monkeypatch):
    monkeypatch.setattr(fusedseg, "backend", "triton")
    return Guarded(monkeypatch)


def activation(device):
    return torch.randn(2, C, 4, 4, device=device, requires_grad=True) * 1


MODULES = {
    "InPlaceABN": lambda: fusedseg.InPlaceABN(C),
    "InPlaceInstanceNormAct": lambda: fusedseg.InPlaceInstanceNormAct(C),
    "BatchNormAct": lambda: fusedseg.BatchNormAct(C),
    "BatchNormAct in eval mode": lambda: fusedseg.BatchNormAct(C).eval(),
    "MaxPool2d": lambda: fusedseg.MaxPool2d(2),
    "ConvABN2d": lambda: fusedseg.ConvABN2d(C, C, 3, conv_backend="triton"),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_launch_is_guarded(guarded, device, name):
    module = MODULES[name]().to(device)
    module(activation(device)).sum().backward()
    assert len(guarded.launched) >= 2
    assert not guarded.unguarded


def test_statistics_of_several_processes_are_guarded(guarded, device):
    x = torch.randn(2, C, 4, 4, device=device)
    triton.moments(x)
    assert guarded.launched
    assert not guarded.unguarded


class OnGpu:
    def __init__(self, index):
        self.is_cuda, self.index = True, index

    def get_device(self):
        return self.index


class Calls(TorchFunctionMode):
    """Notes the calls that a function mode sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_the_guard_changes_the_device(monkeypatch):
    changed, t = [], torch.empty(1)

    @contextlib.contextmanager
    def device_of(x):
        changed.append(x.get_device())
        yield
        changed.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for x, expected in ((OnGpu(1), [1, "left"]), (OnGpu(0), []), (t, [])):
        changed.clear()
        launching = _backend.launching(x)
        with Calls() as mode:
            t.data_ptr()
            with launching:
                t.data_ptr()
        assert len(mode.seen) == 1, "a function mode must not see the calls of a launch"
        assert changed == expected


def test_the_self_test_runs_on_the_device_that_it_is_for(monkeypatch):
    from fusedseg.ops.self_test import first_use

    seen = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: seen.append(device) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: seen.append(device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(first_use, "compare", lambda family, dtype, device: seen.append(device))
    second = torch.device("cuda", 1)
    first_use.test_now("norm", torch.float32, second)
    assert seen == [second] * 3


def test_kept_channels_under_another_default_device():
    """The list of kept channels lay on the default device."""
    x, norm = torch.randn(2, C, 8, 8, requires_grad=True), fusedseg.InPlaceABN(C)
    norm.weight.data[0] = 0
    with torch.device("meta"):
        norm(x * 1).sum().backward()
    assert x.grad.device.type == "cpu"
