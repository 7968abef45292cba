"""Programs whose convolutions a compiler may compute in channels_last, and what a training step of them gives."""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Layers by name, and a function of them and of an image that is the forward pass."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run, self.layers = run, nn.ModuleDict(layers)

    def forward(self, x):
        return self.run(x, **self.layers)


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


halves.register_autograd(_halves_backward, setup_context=lambda ctx, inputs, output: _keep_shape(ctx, inputs))


def _keep_shape(ctx, inputs):
    ctx.shape = inputs[0].shape


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


class Program(NamedTuple):
    build: object
    shape: tuple = (2, 3, 9, 8)


def chain(run, *channels, dims=2):
    """A function that makes convolutions of 3, then of so many channels, under the names that functions above use."""

    def build():
        sizes = zip(("first", "second", "third"), (3, *channels), channels, strict=False)
        return Net(run, **{name: conv(cin, cout, dims=dims) for name, cin, cout in sizes})

    return build


PROGRAMS = {
    "U-Net 2D": Program(lambda: unet(2), (2, 3, 12, 8)),
    "U-Net 3D": Program(lambda: unet(3), (2, 3, 8, 6, 4)),
    "odd sizes": Program(chain(residual, 8, 8, 8), (3, 3, 7, 5)),
    "batch of one": Program(chain(residual, 8, 8, 8), (1, 3, 7, 5)),
    "one position": Program(chain(residual, 8, 8, 8), (2, 3, 1, 1)),
    "one channel": Program(lambda: Net(residual, first=conv(1, 1), second=conv(1, 1), third=conv(1, 1)), (2, 1, 7, 5)),
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
