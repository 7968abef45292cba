"""Convolutions that the tests of ``functional.conv_abn`` run, and the stock ops that the fused op replaces."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fusedseg.functional import conv_abn
from fusedseg.ops.conv.geometry import Geometry
from tests.reference import FORWARD_TOLERANCE, GRADIENT_TOLERANCE, relative_error, stock_activation

CONV = {4: F.conv2d, 5: F.conv3d}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Conv(NamedTuple):
    """Shapes of x and w, and the options of ``torch.nn.functional.conv2d``."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...] | int = 1
    padding: tuple[int, ...] | int | str = 0
    dilation: tuple[int, ...] | int = 1
    groups: int = 1

    @property
    def geometry(self) -> Geometry:
        """The geometry, unless padding is a word."""
        values = (self.stride, self.padding, self.dilation)
        return Geometry(*((v,) * (len(self.x) - 2) if isinstance(v, int) else v for v in values), self.groups)

    @property
    def options(self) -> dict[str, Any]:
        return dict(zip(self._fields[2:], self[2:], strict=True))

    @property
    def out(self) -> tuple[int, ...]:
        """The shape of the output."""
        x, w = (torch.empty(shape, device="meta") for shape in self[:2])
        return CONV[x.dim()](x, w, None, *self[2:]).shape


# The cases are small enough for the interpreter and for numerical derivatives; each has a property to get wrong.
CASES = {
    "2d": Conv((2, 3, 5, 4), (4, 3, 3, 3), padding=1),
    "1x1": Conv((2, 3, 3, 4), (4, 3, 1, 1)),
    "1x1, stride 2": Conv((2, 3, 5, 4), (3, 3, 1, 1), stride=2),
    "one sample": Conv((1, 2, 5, 5), (3, 2, 3, 3), padding="valid"),
    "one channel each": Conv((2, 1, 4, 3), (1, 1, 3, 3), padding=1),
    "stride 2": Conv((2, 2, 5, 6), (3, 2, 3, 3), stride=2, padding=1),
    "dilation 2": Conv((2, 2, 6, 5), (3, 2, 3, 3), padding=2, dilation=2),
    "oblong": Conv((2, 2, 7, 5), (3, 2, 5, 1), stride=(1, 2), padding=(2, 0), dilation=(1, 3)),
    "groups": Conv((2, 4, 4, 3), (6, 2, 3, 3), padding=1, groups=2),
    "depthwise": Conv((2, 3, 4, 3), (3, 1, 3, 3), padding=1, groups=3),
    "same": Conv((2, 2, 4, 3), (3, 2, 3, 5), padding="same"),
    "same, even kernel": Conv((2, 2, 4, 5), (3, 2, 2, 4), padding="same", dilation=(3, 1)),
    "3d": Conv((2, 2, 3, 4, 2), (3, 2, 3, 3, 3), padding=1),
    "3d, same, even kernel": Conv((2, 2, 2, 3, 3), (3, 2, 1, 2, 3), padding="same"),
    "3d, stride 2": Conv((2, 2, 4, 3, 5), (3, 2, 3, 1, 3), stride=2, padding=(1, 0, 1)),
}
SMALL = CASES["2d"]


def formatted(t, fmt):
    return t.contiguous(memory_format=LAST[t.dim()]) if fmt == "channels_last" else t.contiguous()


class Inputs(NamedTuple):
    """The tensor arguments of ``conv_abn`` in its order, without the running statistics."""

    x: torch.Tensor
    w: torch.Tensor
    conv_bias: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    @property
    def given(self) -> list[torch.Tensor]:
        return [t for t in self if t is not None]

    def replaced(self, tensors) -> "Inputs":
        """Returns a copy that holds ``tensors`` in place of ``given``."""
        others = iter(tensors)
        return Inputs(*(None if t is None else next(others) for t in self))


def inputs(case, dtype, device, fmt="contiguous", conv_bias=True, affine=True, kept=True, params=None) -> Inputs:
    """Makes leaves; the output of the convolution has a variance of about 1, and weights have both signs.

    ``kept`` sets the last weight to 0.  ``params`` is the dtype of weight and bias.
    """
    K = case.w[0]
    x = torch.randn(case.x, dtype=torch.float64) + 0.5
    w = torch.randn(case.w, dtype=torch.float64)
    w /= w[0].numel() ** 0.5
    weight = torch.linspace(0.6, 1.4, K, dtype=torch.float64)
    weight[1::2] *= -1
    if kept:
        weight[-1] = 0.0
    bias = torch.linspace(-0.3, 0.4, K, dtype=torch.float64)
    params = params or dtype
    made = Inputs(
        formatted(x.to(device, dtype), fmt),
        w.to(device, dtype),
        torch.linspace(1, -1, K, dtype=torch.float64).to(device, dtype) if conv_bias else None,
        weight.to(device, params) if affine else None,
        bias.to(device, params) if affine else None,
    )
    for t in made.given:
        t.requires_grad_()
    return made


def running(case, dtype, device):
    K = case.w[0]
    values = torch.linspace(-1, 1, K, dtype=torch.float64), torch.linspace(0.5, 2, K, dtype=torch.float64)
    return tuple(v.to(device, dtype) for v in values)


def fused(given, backend, training=True, statistics=(None, None), case=SMALL, **options):
    x, w, conv_bias, weight, bias = given
    options = {
        "training": training,
        "conv_backend": backend,
        **dict(zip(case._fields[2:], case[2:], strict=True)),
        **options,
    }
    return conv_abn(x, w, conv_bias, *statistics, weight, bias, **options)


def stock(case, given, statistics, training, activation="leaky_relu", param=0.01, momentum=0.1, stored=None):
    """Computes the stock ops that ``conv_abn`` replaces.

    ``stored`` is the dtype in which the convolution's output is stored; rounding to it has a derivative of 1.
    """
    x, w, conv_bias, weight, bias = given
    y = CONV[x.dim()](x, w, conv_bias, *case[2:])
    if stored is not None:
        y = y + (y.to(stored).to(y.dtype) - y).detach()
    return stock_activation(activation, param)(F.batch_norm(y, *statistics, weight, bias, training, momentum))


def check(case, backend, device, fmt, dtype, training, sources=1) -> torch.Tensor:
    """Output, running statistics and gradients are those of float64, in which y is rounded to the stored dtype.

    Every implementation that stores y can round a value across zero.  Such a value takes the other branch of the
    activation, and its gradient is wrong by its whole size.  running_mean includes the convolution's bias.

    ``sources`` share the channels of x.  Returns the output.
    """
    params = dtype if dtype.itemsize > 2 else torch.float32
    given = inputs(case, dtype, device, fmt, params=params)
    statistics = running(case, params, device)
    x = given.x if sources == 1 else given.x.chunk(sources, dim=1)
    z = fused(given._replace(x=x), backend, training, statistics, case, momentum=0.3)
    # In eval mode the gradient is expanded from a scalar.
    dz = torch.randn(z.shape if training else (1,) * z.dim(), dtype=torch.float64).to(device, dtype).expand(z.shape)
    grads = torch.autograd.grad(z, given, dz)

    exact = Inputs(*(t.detach().double().requires_grad_() for t in given))
    # In training y is stored without the bias, which moves the mean.
    used = exact._replace(conv_bias=None) if training else exact
    moved = running(case, torch.float64, device)
    expected = stock(case, used, moved, training, momentum=0.3, stored=dtype)
    assert relative_error(z, expected) <= FORWARD_TOLERANCE[dtype], training
    of_bias = 0.3 * exact.conv_bias.detach() if training else 0.0
    for mine, theirs in zip(statistics, (moved[0] + of_bias, moved[1]), strict=True):
        assert relative_error(mine, theirs) <= FORWARD_TOLERANCE[dtype], training
    expected = torch.autograd.grad(expected, exact, dz.double(), materialize_grads=True)
    for field, t, mine, theirs in zip(given._fields, given, grads, expected, strict=True):
        assert mine.dtype == t.dtype
        assert relative_error(mine, theirs) <= GRADIENT_TOLERANCE[dtype], (training, field)
    return z
