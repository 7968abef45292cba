"""Programs that the passes of the compiler look for, and what a training step of them gives."""

import functools
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusedseg
from tests.compiler.networks import NETWORKS, TwoBlocks
from tests.contract import Everything

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Net(nn.Module):
    """Layers by name, and a function of them and of an image that is the forward pass."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run, self.layers = run, nn.ModuleDict(layers)

    def forward(self, x):
        return self.run(x, **self.layers)


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def conv(cin=3, cout=8, size=3, dims=2, **options):
    return getattr(nn, f"Conv{dims}d")(cin, cout, size, padding=size // 2, **options)


def convolve(x, first):
    return first(x)


@torch.library.custom_op("test_channels_last::halves", mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    """It takes the memory of ``x`` as it lies, as kernels of C++ may."""
    return x.as_strided((x.numel() // 2,), (2,)).clone()


halves.register_fake(lambda x: x.new_empty(x.numel() // 2))


def _halves_backward(ctx, g):
    return torch.stack([g, torch.zeros_like(g)], 1).view(ctx.shape)


def _keep_shape(ctx, inputs, output):
    ctx.shape = inputs[0].shape


halves.register_autograd(_halves_backward, setup_context=_keep_shape)


class Twice(torch.autograd.Function):
    """Its passes take views that only contiguous memory has."""

    @staticmethod
    def forward(ctx, x):
        return (x.view(-1) * 2).view(x.shape)

    @staticmethod
    def backward(ctx, g):
        return (g.contiguous().view(-1) * 2).view(g.shape)


def unet(dims):
    """Two levels: norms of each kind, an activation, a pool or a stride, a transposed convolution and a skip."""
    norm = getattr(nn, f"InstanceNorm{dims}d")(8, affine=True)
    layers = {
        "first": nn.Sequential(conv(dims=dims), norm, nn.LeakyReLU(0.01, inplace=True)),
        "down": nn.Sequential(
            getattr(nn, f"MaxPool{dims}d")(2), conv(8, 16, dims=dims),
            getattr(nn, f"BatchNorm{dims}d")(16), nn.ReLU(inplace=True),
        ),
        "up": getattr(nn, f"ConvTranspose{dims}d")(16, 8, 2, 2),
        "last": nn.Sequential(conv(16, 8, dims=dims), nn.GroupNorm(2, 8), nn.SiLU(), conv(8, 4, dims=dims)),
    }  # fmt: skip

    def run(x, first, down, up, last):
        skip = first(x)
        return last(torch.cat([up(down(skip)), skip], 1))

    return Net(run, **layers)


def residual(x, first, second, third):
    y = first(x)
    return F.relu(second(F.relu(y)) + y) * third(y).sigmoid()


def upsampled(x, first, second):
    large = F.interpolate(first(x), scale_factor=2, mode="bilinear")
    return second(F.avg_pool2d(F.pad(large, (1, 0, 0, 1)), 2))


def pooled(x, first, second):
    return second(F.avg_pool3d(first(x), 2))


def headed(x, first, head):
    y = F.adaptive_avg_pool2d(F.gelu(first(x)), 2)
    return head(y.flatten(1)), y.view(len(y), -1)


def convnext(x, first, deep, norm, inner, second):
    y = first(x)
    z = inner(norm(deep(y).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
    return second(y + z)


def attended(x, first, second):
    y = first(x)
    t = y.flatten(2).transpose(1, 2)
    t = t + F.scaled_dot_product_attention(t, t, t)
    return second(t.transpose(1, 2).reshape(y.shape))


def dropped(x, first, second):
    return second(F.dropout2d(F.dropout(first(x), 0.4), 0.3))


def checkpointed(x, first, second):
    def body(y):
        return second(y.view(y.shape).relu()).reshape(len(y), -1)

    return checkpoint(body, first(x), use_reentrant=False)


def foreign(x, first, second):
    return halves(second(first(x).relu()))


def function(x, first, second):
    return second(Twice.apply(first(x)))


def tied(x, first):
    return first(first(x).tanh())


def in_two_modes(x, first):
    """The weight is read first where no gradient is recorded."""
    with torch.no_grad():
        scale = first(x).sigmoid()
    return first(x * scale)


def moved(x, first):
    """The weight is written between two convolutions, of which the first one has no gradient."""
    with torch.no_grad():
        y = first(x)
        first.weight.mul_(1.5)
    return first(y * x)


def same_memory(x, first, second):
    """``contiguous`` returns its argument, so that a write to its result shows in it."""
    y = first(x)
    y.contiguous().add_(1)
    y.view(-1)[:7].mul_(2)
    return second(y), y


def other_memory(x, first, second):
    """``reshape`` copies, so that a write to its result shows nowhere else."""
    y = first(x)
    flat = y.permute(0, 2, 3, 1).reshape(-1)
    flat.mul_(3)
    return second(y), flat


def written(x, first):
    x.mul_(0.5)
    return first(x)


def returned(x, first, second):
    """An intermediate value that backward reads, one value twice, and views."""
    y = first(x).sigmoid()
    z = second(y)
    return y, z, z, y[:, 1:3], z.transpose(1, 2)


def strided(x, first):
    y = first(x)
    return y.as_strided((4, 3), (7, 2)), y + y.stride(1)


def repeated(x, first, second):
    y = first(x)
    return second(y) + y.mean((2, 3), keepdim=True).expand(y.shape) + y.sum((0, 2, 3)).view(1, -1, 1, 1)


def frozen():
    net = Net(lambda x, first, second: second(first(x).relu()), first=conv(), second=conv(8, 8))
    net.layers["second"].weight.requires_grad_(False)
    return net


def block(conv, norm):
    """Its first bias has an effect or none."""
    return nn.Sequential(conv, norm, nn.ReLU(), CONV[len(conv.kernel_size)](4, 2, 1))


def of_module(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Conv2d(4, 2, 1))


def with_an_effect(x, first, second, third, last, group, frozen, norm):
    """Biases with an effect: a group norm of two channels, a frozen norm, an output that is read twice, no norm."""
    x = F.relu(group(first(x)))
    frozen.eval()
    y = third(F.relu(frozen(second(x))))
    return last(F.relu(norm(y)) + y)


def without_a_batch(x, first, norm):
    """An image without a batch: its convolution gives (C, L), whose channels are not those of the norm."""
    return F.relu(norm(first(x)))


def shared_bias(dead):
    """One bias for two convolutions; with ``dead`` a norm stands after both of them."""

    def run(x, first, second, norm, other):
        y = second(F.relu(norm(first(x))))
        # The second norm has an effect in both cases.
        return F.gelu(other(y)) if dead else other(F.gelu(y))

    net = Net(run, first=conv(2, 4), second=conv(4, 4), norm=nn.BatchNorm2d(4), other=nn.BatchNorm2d(4))
    net.layers["second"].bias = net.layers["first"].bias
    return net


class Up(nn.Module):
    """A decoder's step: interpolation, 1x1 convolution, and something behind them."""

    def __init__(self, dims=2, mode="bilinear", channels=2, bias=True, corners=None, **options):
        super().__init__()
        self.how = {"scale_factor": 2, "mode": mode, "align_corners": corners}
        self.first = CONV[dims](3, 4, 1)
        self.reduce = CONV[dims](4, channels, options.pop("kernel", 1), bias=bias, **options)

    def forward(self, x):
        return self.reduce(F.interpolate(self.first(x), **self.how)).sin()


class Skip(nn.Module):
    """A stage of a U-Net: the skip is a norm's output, and the other source comes from below by ``up``."""

    def __init__(self, dims, up):
        super().__init__()
        conv, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "InstanceNorm"))
        self.first, self.norm = conv(2, 8, 3, padding=1), norm(8, affine=True)
        self.down = conv(8, 16, 3, stride=2, padding=1)
        self.transposed = getattr(nn, f"ConvTranspose{dims}d")(16, 8, 2, 2) if up is None else None
        self.up, self.last = up, conv(16 if up is None else 24, 2, 3, padding=1)

    def forward(self, x):
        skip = F.leaky_relu(self.norm(self.first(x)))
        below = F.leaky_relu(self.down(skip))
        if self.transposed is not None:
            below = self.transposed(below)
        elif self.up == "pool":
            below = F.max_pool2d(F.interpolate(below, scale_factor=4), 2)
        else:
            below = F.interpolate(below, scale_factor=2, mode=self.up)
        return self.last(torch.cat([skip, below], 1))


class TwoJoins(Skip):
    """Two concatenations of the map from below."""

    def forward(self, x):
        skip = F.leaky_relu(self.norm(self.first(x)))
        below = self.transposed(F.leaky_relu(self.down(skip)))
        return self.last(torch.cat([skip, below], 1)) * self.last(torch.cat([below, skip], 1)).sigmoid()


class SkipAndMap(Skip):
    """The result of the transposed convolution is returned too."""

    def __init__(self):
        super().__init__(2, None)

    def forward(self, x):
        skip = self.first(x)
        below = self.transposed(self.down(skip))
        return self.last(torch.cat([skip, below], 1)), below


def clicked(x, first, last):
    """Segmentation with clicks of a user: a mask of booleans, and coordinates in another precision, are channels."""
    rows = torch.linspace(0, 1, x.shape[-1], dtype=torch.float32).expand(len(x), 1, *x.shape[2:])
    return last(torch.cat([x[:, :1] > 0.5, first(x).relu(), rows], 1))


def collected(x, first, last):
    """A concatenation of a list of maps whose first one may be missing: an empty vector stands for it."""
    return last(torch.cat([first(x).relu(), torch.empty(0, dtype=x.dtype), x], 1))


class Biased(nn.Module):
    """Biases that are columns of a parameter: of a transposed convolution, and added by the program to two maps.

    The second map has one channel, which the sum repeats.
    """

    def __init__(self):
        super().__init__()
        self.first, self.one, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 1, 1), nn.Conv2d(12, 2, 1)
        self.below = nn.Parameter(torch.randn(4, 4, 2, 2))
        self.biases = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        x = self.first(x)
        below = F.conv_transpose2d(F.max_pool2d(x, 2), self.below, self.biases[:, 0], 2)
        dense = x.sin() + self.biases[:, 1].view(1, 4, 1, 1)
        repeated = self.one(x) + self.biases[:, 2].contiguous().view(1, 4, 1, 1)
        return self.last(torch.cat([x, below, dense], 1)) + self.last(torch.cat([x, repeated, x], 1))


def pooled_skip(dims=2, first=True):
    """A skip over a pool; the skip lies before or behind the enlarged map in the concatenation."""
    up, pool, norm = (getattr(nn, f"{name}{dims}d") for name in ("ConvTranspose", "MaxPool", "BatchNorm"))

    def run(x, down, middle, last):
        skip = down(x)
        large = middle(skip)
        return last(torch.cat([skip, large] if first else [large, skip], 1))

    return Net(
        run,
        down=nn.Sequential(conv(2, 8, dims=dims), norm(8), nn.ReLU()),
        middle=nn.Sequential(pool(2), conv(8, 16, dims=dims), norm(16), nn.ReLU(), up(16, 8, 2, 2)),
        last=CONV[dims](16, 2, 3),
    )


def read(x, first, norm, left, right, more):
    """The output of a norm that a program reads too, whose gradient has three terms."""
    z = F.relu(norm(first(x)))
    return left(z) * right(z).sigmoid() + more(z)


def norm_of_the_input(x, norm, last):
    """The gradient of the input is read by nobody."""
    z = F.relu(norm(x))
    return last(F.avg_pool2d(z, 2) + F.avg_pool2d(z, 4, 2, 1))


class Blocks(nn.Module):
    """Three residual blocks; the shortcut of the first one is a norm, which is computed after the other norm."""

    def __init__(self, norm):
        super().__init__()
        self.convs, self.short = nn.ModuleList(nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4, 4)), nn.Conv2d(2, 4, 1)
        self.norms, self.last = nn.ModuleList(norm() for _ in range(4)), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = torch.relu(self.norms[0](self.convs[0](x)) + self.norms[3](self.short(x)))
        for conv, norm in zip(self.convs[1:], self.norms[1:], strict=False):
            x = torch.relu(norm(conv(x)) + x)
        return self.last(x)


def doubled(x, first, norm, last):
    """The result of a norm is added to its own detached form, as a straight-through estimator does."""
    y = norm(first(x))
    return last(torch.relu(y + y.detach()))


def frozen_part(of, x, first, norm, last):
    """Gradients are switched off for one of three calls."""
    with torch.no_grad() if of == "convolution" else torch.enable_grad():
        y = first(x)
    with torch.no_grad() if of == "norm" else torch.enable_grad():
        z = norm(y)
    z = z + x
    with torch.no_grad() if of == "activation" else torch.enable_grad():
        a = torch.relu(z)
    return last(a + x)


def normed_twice(x, first, layer, norm, last):
    """The input of a norm is added to its output, and is not kept for backward."""
    y = layer(first(x))
    return last((norm(y) + y).square())


def late(x, first, norm, last):
    """A residual that is computed after the norm, whose running mean gets the part of the bias before it."""
    y = norm(first(x))
    return last(torch.relu(y + x.mean(1, keepdim=True)[:, :, 2:, 2:].repeat(1, 4, 1, 1)))


class Moving(nn.Module):
    """A buffer that forward writes to: backward would compute what comes from it again from the new values."""

    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
        self.b = nn.Conv2d(4, 2, 1)
        self.register_buffer("shift", torch.full((4,), 0.5))

    def forward(self, x):
        y = torch.relu(self.a(x) + self.shift.view(1, 4, 1, 1))
        self.shift.lerp_(y.detach().mean((0, 2, 3)), 0.5)
        return self.b(y * 2)


def called_twice(x, first, second):
    return second(first(x)) + second(first(x.flip(2)))


def of_two_parts():
    first = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(True), conv(8, 8))
    second = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(True), nn.MaxPool2d(2), conv(8, 4))
    return {"first": first, "second": second}


class Program(NamedTuple):
    build: object
    shape: tuple = (2, 3, 9, 8)


def chain(run, *channels, dims=2):
    """A function that makes convolutions of 3, then of so many channels, under the names that functions above use."""

    def build():
        sizes = zip(("first", "second", "third"), (3, *channels), channels, strict=False)
        return Net(run, **{name: conv(cin, cout, dims=dims) for name, cin, cout in sizes})

    return build


# Some op of each is computed in channels_last if the backend is asked for it.
LAID_OUT = {
    "U-Net 2D": Program(lambda: unet(2), (2, 3, 12, 8)),
    "U-Net 3D": Program(lambda: unet(3), (2, 3, 8, 6, 4)),
    "odd sizes": Program(chain(residual, 8, 8, 8), (3, 3, 7, 5)),
    "batch of one": Program(chain(residual, 8, 8, 8), (1, 3, 7, 5)),
    "one position": Program(chain(residual, 8, 8, 8), (2, 3, 1, 1)),
    "one channel": Program(lambda: Net(residual, first=conv(1, 1), second=conv(1, 1), third=conv(1, 1)), (2, 1, 7, 5)),
    "an image of one channel": Program(
        lambda: Net(residual, first=conv(1, 8), second=conv(8, 8), third=conv(8, 8)), (2, 1, 7, 5)
    ),
    "upsampling": Program(chain(upsampled, 8, 8)),
    "volumes, pooled": Program(chain(pooled, 8, 8, dims=3), (2, 3, 8, 7, 6)),
    "heads": Program(lambda: Net(headed, first=conv(), head=nn.Linear(32, 3))),
    "ConvNeXt": Program(
        lambda: Net(
            convnext, first=conv(), deep=conv(8, 8, groups=8), norm=nn.LayerNorm(8), inner=nn.Linear(8, 8),
            second=conv(8, 8),
        )
    ),
    "attention": Program(chain(attended, 8, 8)),
    "grouped": Program(lambda: Net(residual, first=conv(), second=conv(8, 8, groups=2), third=conv(8, 8, groups=8))),
    "dropout": Program(chain(dropped, 8, 8)),
    "checkpoint": Program(chain(checkpointed, 8, 8)),
    "custom op": Program(chain(foreign, 8, 8)),
    "autograd.Function": Program(chain(function, 8, 8)),
    "tied weights": Program(lambda: Net(tied, first=conv(3, 3))),
    "in two grad modes": Program(lambda: Net(in_two_modes, first=conv(3, 3))),
    "a written weight": Program(lambda: Net(moved, first=conv(3, 3))),
    "one memory": Program(chain(same_memory, 8, 8)),
    "two memories": Program(chain(other_memory, 8, 8)),
    "a written input": Program(lambda: Net(written, first=conv())),
    "returned": Program(chain(returned, 8, 8)),
    "as_strided": Program(lambda: Net(strided, first=conv())),
    "repeated": Program(chain(repeated, 8, 8)),
    "frozen": Program(frozen),
}  # fmt: skip


# A norm and an activation.
NORM_ACTS = {
    "relu": (lambda: nn.BatchNorm2d(4), nn.ReLU(True)),
    "no parameters": (lambda: nn.BatchNorm2d(4, affine=False), nn.ReLU()),
    "batch alone": (lambda: nn.BatchNorm2d(4, track_running_stats=False), nn.SiLU()),
    "momentum": (lambda: nn.BatchNorm2d(4, momentum=0.3), nn.LeakyReLU(0.1, True)),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), nn.SiLU(True)),
    "gelu": (lambda: nn.BatchNorm2d(4), nn.GELU()),
    "elu": (lambda: nn.BatchNorm2d(4), nn.ELU(0.7)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(0.01, True)),
    "plain instance": (lambda: nn.InstanceNorm2d(4), nn.ReLU()),
    "running instance": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.ReLU()),
    "group": (lambda: nn.GroupNorm(2, 4), nn.PReLU()),
}
# Norms of so many positions.
OF_ITS_SIZE = ("no batch", "its input as the residual")
# Programs that take views which images in channels_last do not have, or ask for strides.
CONTIGUOUS = "heads", "autograd.Function", "one memory", "as_strided"
OF_TWO = (2, 2, 9, 8)
# The positions of a small map; the interpreter takes seconds for a volume.
SMALL = {1: (5,), 2: (5, 4), 3: (3, 2, 2)}
# Biases of convolutions before norms.
BIASES = {
    "batch": Program(lambda: block(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), OF_TWO),
    "batch alone": Program(lambda: block(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), OF_TWO),
    "instance": Program(lambda: block(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4)), OF_TWO),
    "running instance": Program(
        lambda: block(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), (3, 2, 9, 8)
    ),
    "group of one": Program(lambda: block(nn.Conv2d(2, 4, 3), nn.GroupNorm(4, 4)), OF_TWO),
    "1d": Program(lambda: block(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), (2, 2, 9)),
    "3d transposed": Program(lambda: block(nn.ConvTranspose3d(2, 4, 2, 2), nn.BatchNorm3d(4)), (2, 2, 3, 4, 3)),
    "biases with an effect": Program(
        lambda: Net(
            with_an_effect,
            first=nn.Conv2d(2, 4, 3),
            second=conv(4, 4),
            third=conv(4, 4),
            last=conv(4, 4),
            group=nn.GroupNorm(2, 4),
            frozen=nn.BatchNorm2d(4),
            norm=nn.BatchNorm2d(4),
        ),
        OF_TWO,
    ),
    "no batch": Program(lambda: Net(without_a_batch, first=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm1d(7)), (2, 9, 8)),
    "two biases without": Program(lambda: shared_bias(True), OF_TWO),
    "one of two biases": Program(lambda: shared_bias(False), OF_TWO),
    "in-place norm": Program(lambda: of_module(fusedseg.InPlaceABN(4)), OF_TWO),
    "in-place instance norm": Program(lambda: of_module(fusedseg.InPlaceInstanceNormAct(4, affine=True)), OF_TWO),
    "convolution and norm": Program(lambda: nn.Sequential(fusedseg.ConvABN2d(2, 4, 3), nn.Conv2d(4, 2, 1)), OF_TWO),
}
PROGRAMS = LAID_OUT | BIASES | {
    # Interpolations before 1x1 convolutions.
    **{f"up, {mode}": Program(lambda mode=mode, n=n: Up(n, mode), (2, 3, *SMALL[n]))
       for mode, n in (("linear", 1), ("nearest", 2), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))},
    "up with corners": Program(lambda: Up(mode="bilinear", corners=True), (2, 3, *SMALL[2])),
    # Concatenations.
    "skip": Program(lambda: Skip(2, None), (2, 2, 8, 12)),
    "skip, 3D": Program(lambda: Skip(3, None), (2, 2, 8, 12, 6)),
    "skip, interpolated": Program(lambda: Skip(2, "bilinear"), (2, 2, 8, 12)),
    "skip, pooled": Program(lambda: Skip(2, "pool"), (2, 2, 8, 12)),
    "skip twice": Program(lambda: TwoJoins(2, None), (2, 2, 8, 12)),
    "skip and its map": Program(SkipAndMap, (2, 2, 8, 12)),
    "clicked": Program(lambda: Net(clicked, first=conv(2, 6), last=conv(8, 3)), (2, 2, 16, 16)),
    "collected": Program(lambda: Net(collected, first=conv(2, 6), last=conv(8, 3)), (2, 2, 16, 16)),
    "biased": Program(Biased, (2, 2, 8, 12)),
    # Gradients with several terms.
    "pooled skip": Program(pooled_skip, (2, 2, 12, 12)),
    "pooled skip last, 3D": Program(lambda: pooled_skip(3, False), (2, 2, 8, 8, 8)),
    "three gradients": Program(
        lambda: Net(
            read, first=conv(2, 8), norm=nn.BatchNorm2d(8), left=conv(8, 8), right=conv(8, 8), more=conv(8, 8)
        ), (2, 2, 9, 7),
    ),
    "norm of the input": Program(
        lambda: Net(norm_of_the_input, norm=nn.BatchNorm2d(16), last=nn.Conv2d(16, 2, 1)), (2, 16, 32, 32)
    ),
    # Norms.
    **{f"blocks, {name}": Program(lambda of=of: TwoBlocks(*of, channels=2), (2, 2, 14, 13))
       for name, of in NORM_ACTS.items()},
    "shared norm": Program(lambda: TwoBlocks(*NORM_ACTS["momentum"], True, 2), (2, 2, 14, 13)),
    "residual blocks": Program(lambda: Blocks(lambda: nn.BatchNorm2d(4)), (2, 2, 15, 13)),
    "its own residual": Program(
        lambda: Net(doubled, first=conv(2, 4), norm=nn.BatchNorm2d(4), last=nn.Conv2d(4, 2, 3)), (2, 2, 15, 13)
    ),
    **{f"a frozen {of}": Program(
        lambda of=of: Net(
            functools.partial(frozen_part, of), first=conv(2, 2), norm=nn.BatchNorm2d(2), last=nn.Conv2d(2, 2, 3)
        ), (2, 2, 15, 13)
    ) for of in ("convolution", "norm", "activation")},
    "its input as the residual": Program(
        lambda: Net(
            normed_twice, first=conv(2, 4), layer=nn.LayerNorm(8), norm=nn.BatchNorm2d(4), last=nn.Conv2d(4, 2, 3)
        ), (2, 2, 15, 8)
    ),
    "late residual": Program(
        lambda: Net(late, first=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4, momentum=0.5), last=nn.Conv2d(4, 2, 1)),
        (2, 2, 14, 13),
    ),
    # Training.
    "two parts": Program(lambda: Net(lambda x, first, second: second(first(x)), **of_two_parts()), (2, 3, 14, 14)),
    "called twice": Program(lambda: Net(called_twice, **of_two_parts()), (2, 3, 14, 14)),
    "a buffer that moves": Program(Moving),
    "every module": Program(Everything, (2, 4, 8, 8)),
    **{name: Program(build, shapes[0]) for name, (build, shapes) in NETWORKS.items() if len(shapes) == 1},
}  # fmt: skip
# ``test_norm_kernels.py`` runs these.
BY_KERNELS = [f"blocks, {name}" for name in NORM_ACTS if name not in ("cumulative", "group")]
# Other tests have published networks, the layout of LAID_OUT, and kernels behind convolutions with a bias.
OF_A_GPU = [name for name in PROGRAMS if name not in {*LAID_OUT, *NETWORKS, *BIASES, *BY_KERNELS}]


def shifted(net):
    """Gives it biases and running statistics that are not zero, so that one that is lost changes something."""
    torch.manual_seed(0)
    for name, t in [*net.named_parameters(), *net.named_buffers()]:
        if name.endswith(("bias", "running_mean", "running_var")):
            t.data.uniform_(1, 2)
    return net


def made(name, scale=1):
    """A program and its input, whose positions are ``scale`` times as many along each dimension."""
    torch.manual_seed(0)
    net, (*first, last) = PROGRAMS[name].build(), PROGRAMS[name].shape
    shape = *first[:2], *(n * scale for n in first[2:]), last * scale
    return shifted(net), torch.randn(shape)


def outputs_of(net, run, x):
    """What one pass returns, with the same random numbers each time."""
    torch.manual_seed(1)
    found = run(x)
    return list(found) if isinstance(found, tuple) else [found]


def step(net, run, x):
    """Outputs, the gradient of the input, and all that a step leaves in the parameters, by name."""
    net.zero_grad(set_to_none=True)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    # A view of a copy: a program may write to it, and the strides stay those of the caller.
    outputs = outputs_of(net, run, leaf.clone(memory_format=torch.preserve_format))
    sum((t * t * weight).mean() for weight, t in enumerate(outputs, 1)).backward()
    found = {f"output {place}": t for place, t in enumerate(outputs)} | {"input": leaf.grad}
    grads = {f"gradient of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    return found | grads | dict(net.named_parameters()) | dict(net.named_buffers())
