"""Norms and networks of the tests of "bits"; ``tests/hunt/pieces.py`` has random ones."""

from typing import NamedTuple

import torch
from torch import nn

import fusedseg

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MOST = 0.02


def spread(norm):
    """Weights and biases by which values pass all the places where an activation bends."""
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, 1.0, 4.0)
        nn.init.uniform_(norm.bias, -1.0, 1.0)
    return norm


NORMS = {
    "batch": lambda: nn.BatchNorm2d(16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "group": lambda: nn.GroupNorm(4, 16),
    "ours, batch ReLU": lambda: fusedseg.BatchNormAct(16, activation="relu"),
}


class Around(nn.Module):
    """An activation after a norm, and after a sum, in one network."""

    def __init__(self, act):
        super().__init__()
        self.stem, self.conv, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 4, 1),
        )
        self.norms = nn.ModuleList(spread(nn.BatchNorm2d(8)) for _ in range(2))
        self.acts = nn.ModuleList(act() for _ in range(2))

    def forward(self, x):
        x = self.acts[0](self.norms[0](self.stem(x)))
        return self.head(self.acts[1](x + self.norms[1](self.conv(x))))


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Error(NamedTuple):
    """The error of one rounding relative to the gradient, and bias² / error², whose noise is about .02."""

    size: float
    bias: float
