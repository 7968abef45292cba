"""Converted models, and models that use the modules of this package, through the backend."""

import torch
from torch import nn

import fusedseg
from tests.compiler.networks import BOTH, kept

# Each module, and the stock modules that compute the same.
OURS, STOCK = 0, 1
NORMS = (
    (lambda: [fusedseg.InPlaceABN(8)], lambda: [nn.BatchNorm2d(8), nn.LeakyReLU(0.01, True)]),
    (lambda: [fusedseg.BatchNormAct(8, activation="relu")], lambda: [nn.BatchNorm2d(8), nn.ReLU(True)]),
    (lambda: [fusedseg.InstanceNormAct(8, activation="gelu")], lambda: [nn.InstanceNorm2d(8), nn.GELU()]),
    (lambda: [fusedseg.GroupNormAct(2, 8, activation="silu")], lambda: [nn.GroupNorm(2, 8), nn.SiLU(True)]),
    (lambda: [fusedseg.InPlaceGroupNormAct(2, 8)], lambda: [nn.GroupNorm(2, 8), nn.LeakyReLU(0.01, True)]),
)


def layers(whose):
    """A convolution before each norm, a pool, and a last convolution."""
    torch.manual_seed(0)
    blocks = ((nn.Conv2d(8 if i else 3, 8, 3, padding=1), *row[whose]()) for i, row in enumerate(NORMS))
    return nn.Sequential(*(layer for of in blocks for layer in of), nn.MaxPool2d(2), nn.Conv2d(8, 2, 3))


def through(net, codegen):
    torch._dynamo.reset()
    # Inductor would keep copies of small weights in another layout.
    inductor = {"inductor": {"layout_optimization": False}} if codegen == "inductor" else {}
    return torch.compile(net, backend="fusedseg", options={"codegen": codegen, **inductor})


@BOTH
def test_modules_keep_no_more_than_stock_modules(codegen):
    """``test_programs.py`` has the values of every module."""
    net, twin, converted = layers(OURS), layers(STOCK), layers(STOCK)
    x = torch.randn(2, 3, 14, 14)
    fusedseg.convert(converted)
    most = kept(twin, through(twin, codegen), [x])
    for model in (net, converted):
        assert kept(model, through(model, codegen), [x]) <= most
