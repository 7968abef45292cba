"""Networks whose gradients show a bias, if an op reads rounded values that it must not read."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import fusedseg

IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MOST = 0.02


def spread(norm):
    """Weights and biases by which values pass all the places where an activation bends."""
    if norm.weight is not None:
        nn.init.uniform_(norm.weight, 1.0, 4.0)
        nn.init.uniform_(norm.bias, -1.0, 1.0)
    return norm


class Shortcut(nn.Module):
    """A block as in DenseNet: a norm and a convolution read a concatenation, one source of which is kept anyway."""

    def __init__(self, norm, act):
        super().__init__()
        self.stem, self.more = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act = spread(norm), act
        self.short, self.conv = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        x = torch.cat([x, self.more(x)], 1)
        return self.conv(self.act(self.norm(x))) + self.short(x)


NORMS = {
    "batch": lambda: nn.BatchNorm2d(16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "group": lambda: nn.GroupNorm(4, 16),
    "layer": lambda: nn.LayerNorm([16, 32, 32]),
    "ours, batch ReLU": lambda: fusedseg.BatchNormAct(16, activation="relu"),
    "ours, instance LeakyReLU": lambda: fusedseg.InstanceNormAct(16, affine=True, activation="leaky_relu"),
    "ours, group SELU": lambda: fusedseg.GroupNormAct(4, 16, activation="selu"),
    "ours, batch SiLU": lambda: fusedseg.BatchNormAct(16, activation="silu"),
    "ours, batch ReLU6": lambda: fusedseg.BatchNormAct(16, activation="relu6"),
}
ACTIVATIONS = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "LeakyReLU": nn.LeakyReLU,
    "PReLU": nn.PReLU,
    "SiLU": nn.SiLU,
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


def always(lower, **options):
    """RReLU with one slope, so that two forwards draw the same."""
    return lambda: nn.RReLU(lower, lower, **options)


EVERY = {
    **{name: getattr(nn, name) for name in (
        "CELU", "ELU", "GELU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "LogSigmoid", "Mish",
        "PReLU", "ReLU", "ReLU6", "SELU", "Sigmoid", "SiLU", "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink",
        "Softmax2d",
    )},
    **{f"{name} in place": lambda name=name: getattr(nn, name)(inplace=True) for name in (
        "CELU", "ELU", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyReLU", "Mish", "ReLU", "ReLU6", "SELU", "SiLU",
    )},
    "RReLU": always(0.2),
    "Threshold": lambda: nn.Threshold(0.5, 0.1),
    "Threshold in place": lambda: nn.Threshold(0.5, 0.1, inplace=True),
    "ELU, alpha 3": lambda: nn.ELU(3.0),
    "CELU, alpha 3": lambda: nn.CELU(3.0),
    "GELU, tanh": lambda: nn.GELU("tanh"),
    "Softplus, threshold 1": lambda: nn.Softplus(1.0, 1.0),
    "clamp": lambda: Call(lambda x: x.clamp(-1, 1)),
    "tanh_": lambda: Call(torch.tanh_),
    "glu": lambda: Call(lambda x: F.glu(torch.cat([x, x.flip(1)], 1), 1)),
}  # fmt: skip


class Sum(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem, self.short = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.norm, self.conv = spread(norm), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = self.stem(x)
        return self.conv(self.norm(self.short(x), residual=x))


class Error(NamedTuple):
    """The error of one rounding relative to the gradient, and bias² / error², whose noise is about .02."""

    size: float
    bias: float
