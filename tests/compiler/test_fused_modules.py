"""Converted models, and models that use the modules of this package, through the backend."""

import pytest
import torch
from torch import nn

import fusedseg
from tests.compiler.networks import in_both, kept

# For each module of this package the stock modules that compute the same.
MODULES = {
    "in place": (lambda: fusedseg.InPlaceABN(8), lambda: (nn.BatchNorm2d(8), nn.LeakyReLU(0.01, True))),
    "exact": (
        lambda: fusedseg.BatchNormAct(8, activation="relu"), lambda: (nn.BatchNorm2d(8), nn.ReLU(True))),
    "instance": (
        lambda: fusedseg.InstanceNormAct(8, activation="gelu"), lambda: (nn.InstanceNorm2d(8), nn.GELU())),
    "group": (
        lambda: fusedseg.GroupNormAct(2, 8, activation="silu"), lambda: (nn.GroupNorm(2, 8), nn.SiLU(True))),
    "in place, group": (
        lambda: fusedseg.InPlaceGroupNormAct(2, 8), lambda: (nn.GroupNorm(2, 8), nn.LeakyReLU(0.01, True))),
}  # fmt: skip


def layers(norm):
    """Two convolutions with a norm each, a pool, and a third convolution."""
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 3)
    return nn.Sequential(convs[0], *norm(), convs[1], *norm(), nn.MaxPool2d(2), convs[2])


def through(net, codegen):
    torch._dynamo.reset()
    # Inductor would keep copies of small weights in another layout.
    inductor = {"inductor": {"layout_optimization": False}} if codegen == "inductor" else {}
    return torch.compile(net, backend="fusedseg", options={"codegen": codegen, **inductor})


@pytest.mark.parametrize(("name", "codegen"), in_both(MODULES, "in place"))
def test_modules_keep_no_more_than_stock_modules(name, codegen):
    """``test_programs.py`` has the values of every module."""
    ours, stock = MODULES[name]
    net, twin, converted = layers(lambda: (ours(),)), layers(stock), layers(stock)
    x = torch.randn(2, 3, 14, 14)
    fusedseg.convert(converted)
    most = kept(twin, through(twin, codegen), [x])
    for model in (net, converted):
        assert kept(model, through(model, codegen), [x]) <= most
