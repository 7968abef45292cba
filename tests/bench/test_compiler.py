"""The bytes of the bench of the compiler's backend."""

import pytest
import torch
from torch import nn

from bench.networks import Network
from bench.test_compiler import counted, kernels_of_zeros
from fusedseg import _torch

CPU = torch.device("cpu")


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))


@pytest.mark.slow
@pytest.mark.skipif(bool(_torch.inductor_problem()), reason="Inductor needs a C++ compiler")
def test_kernels_of_zeros_allocate_as_real_ones(monkeypatch):
    from contextlib import nullcontext

    network = Network(net, (2, 1, 18, 18))
    without = counted(network, "ours", CPU)
    monkeypatch.setattr("bench.test_compiler.kernels_of_zeros", nullcontext)
    assert without == counted(network, "ours", CPU)
    assert kernels_of_zeros is not nullcontext
