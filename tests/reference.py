"""The reference of the ops in plain float64 PyTorch, for tests and benches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

# Largest relative error (2-norms, against float64) of an output.  Rounding to the stored dtype costs up to its unit
# roundoff u.  The computation before it is exact to fp32, or fp64, for the lengths tested here.
FORWARD_TOLERANCE = {
    torch.bfloat16: 4e-3,  # u = 2**-8 = 3.9e-3
    torch.float16: 5e-4,  # u = 2**-11 = 4.9e-4
    torch.float32: 4e-6,  # u = 6e-8; the interpreter adds up to m = 1e3 values one by one: sqrt(m) u
    torch.float64: 1e-14,  # u = 1.1e-16, with the same sums
}
# Largest relative error of a gradient.  xhat is rebuilt as (y - bias) / weight, which multiplies the rounding of the
# stored output by up to kappa = 8 (half precision), 64 (fp32), 4096 (fp64) before the channel is kept: see
# "Any weight must train right" in docs/design.md.
GRADIENT_TOLERANCE = {
    torch.bfloat16: 1e-2,
    torch.float16: 2e-3,
    torch.float32: 1e-5,
    torch.float64: 1e-11,
}


# The parameters of activations that the tests use.  They differ from the stock defaults.
PARAMS = {"leaky_relu": 0.2, "elu": 1.3, "celu": 1.5}
# The modules of stock activations that no op of this package has, by the names of their functions.
UNFUSED: dict[str, type[nn.Module]] = {
    "hardtanh": nn.Hardtanh, "rrelu": nn.RReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "hardsigmoid": nn.Hardsigmoid,
}  # fmt: skip


def stock_activation(name: str, param: Any = 0.0) -> Callable[[Tensor], Tensor]:
    """Finds the stock function in PyTorch by the name that the kernels use, without the package's own table."""
    if name == "identity":
        return lambda y: y
    if name == "gelu_tanh":
        return lambda y: functional.gelu(y, approximate="tanh")
    function = getattr(functional, name)
    return (lambda y: function(y, param)) if name in PARAMS or name == "prelu" else function


class Result(NamedTuple):
    """Output and running statistics after the call (None if the norm has no running statistics), in float64."""

    out: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None


class Gradients(NamedTuple):
    """Gradients in float64; None for an argument that was not given."""

    dx: Tensor
    dweight: Tensor | None
    dbias: Tensor | None
    dresidual: Tensor | None


def _double(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.double()


def _per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.view(1, -1, *(1,) * (x.dim() - 2))


def convolve(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: tuple[int, ...] | int = 1,
    padding: tuple[int, ...] | int = 0,
    dilation: tuple[int, ...] | int = 1,
    groups: int = 1,
) -> Tensor:
    """The convolution in as many dimensions as ``x`` has beyond (N, C)."""
    conv = {3: functional.conv1d, 4: functional.conv2d, 5: functional.conv3d}[x.dim()]
    return conv(x.double(), w.double(), _double(bias), stride, padding, dilation, groups)


def norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    param: float = 0.01,
    groups: int | None = None,
    residual: Tensor | None = None,
) -> Result:
    """Computes activation(weight * (x - mean) / sqrt(var + eps) + bias + residual); autograd can differentiate it.

    No argument is changed.  ``groups=None`` takes the statistics of each channel over the batch; a number takes the
    statistics of each group of channels of each sample, and C groups are an instance norm.  Mean and variance take two
    passes, so that a mean far from zero does not make the variance less exact.
    """
    x, weight, bias, running_mean, running_var = map(_double, (x, weight, bias, running_mean, running_var))
    assert x is not None
    if training:
        # The first axis runs over all groups that have statistics of their own.
        grouped = x.transpose(0, 1).flatten(1) if groups is None else x.reshape(x.shape[0] * groups, -1)
        m = grouped.shape[1]
        mean = grouped.sum(1, keepdim=True) / m
        d = grouped - mean
        var = d.square().sum(1, keepdim=True) / m
        if running_mean is not None and running_var is not None:
            means, variances = (v.detach().view(-1, x.shape[1]).mean(0) for v in (mean, var))
            running_mean = (1 - momentum) * running_mean + momentum * means
            running_var = (1 - momentum) * running_var + momentum * variances * m / (m - 1)
        xhat = d / (var + eps).sqrt()
        xhat = xhat.view(x.transpose(0, 1).shape).transpose(0, 1) if groups is None else xhat.view(x.shape)
    else:
        assert running_mean is not None
        assert running_var is not None
        xhat = (x - _per_channel(running_mean, x)) / _per_channel((running_var + eps).sqrt(), x)
    y = xhat if weight is None else xhat * _per_channel(weight, x)
    if bias is not None:
        y = y + _per_channel(bias, x)
    if residual is not None:
        y = y + residual.double()
    return Result(stock_activation(activation, param)(y), running_mean, running_var)


def gradients(
    dz: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    **options,
) -> Gradients:
    """The gradients of sum(dz * norm_act(x, weight, bias, residual=residual, **options).out), by autograd in
    float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias, residual)]
    given = [t for t in leaves if t is not None]
    out = norm_act(*leaves[:3], residual=leaves[3], **options).out
    found = iter(torch.autograd.grad(out, given, dz.double()))
    return Gradients(*(None if t is None else next(found) for t in leaves))


class Rounded(NamedTuple):
    """A norm that kept its output z: what it was given, and ``kept``, which is True for its kept channels."""

    z: Tensor
    dz: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor | None
    kept: Tensor


class Bounded(NamedTuple):
    """Gradients in float64, and the largest error of each channel: of dx in the 2-norm, and of dweight."""

    dx: Tensor
    dweight: Tensor
    error_of_dx: Tensor
    error_of_dweight: Tensor


def amplification(y: Tensor, activation: str) -> Tensor:
    """|phi(y) / phi'(y)|: how many times the relative error of z the y that is rebuilt from z is off."""
    return torch.where(y < 0, torch.expm1(-y), y) if activation in ("elu", "selu") else y.abs()


def from_output(given: Rounded, activation: str, param: float, groups: int | None, rounds_y: bool) -> Bounded:
    """The gradients of a norm that keeps its output, and the bounds of docs/design.md for them.

    Each rounding is independent and uniform, so for a value v its variance is (u v)^2 / 3 at most.  The largest of many
    normal errors counts as 4 of their standard deviations.  ``rounds_y``: PyTorch's functions round y too, before and
    after they add the residual, and again in backward.  The sign of z, which forward has rounded, decides phi'.
    """
    C, u = given.x.shape[1], torch.finfo(given.x.dtype).eps / 2

    def by_statistic(v: Tensor) -> Tensor:
        """(samples, statistics, channels of a statistic, positions)"""
        if groups is None:
            return v.double().transpose(0, 1).reshape(1, C, 1, -1)
        return v.double().reshape(len(v), groups, C // groups, -1)

    def of_channels(v: Tensor) -> Tensor:
        return v.sum((0, 3)).flatten()

    def means(v: Tensor) -> Tensor:
        return v.mean((2, 3), keepdim=True)

    x, dz = by_statistic(given.x), by_statistic(given.dz)
    w, b, kept = (v.double().view(1, x.shape[1], -1, 1) for v in (given.weight, given.bias, given.kept))
    rstd = (x.var((2, 3), correction=0, keepdim=True) + 1e-5).rsqrt()
    xhat = (x - means(x)) * rstd
    normal = w * xhat + b
    y = normal if given.residual is None else normal + by_statistic(given.residual)
    leaf = torch.where(by_statistic(given.z) > 0, y.abs(), -y.abs()).requires_grad_()
    (g,) = torch.autograd.grad(stock_activation(activation, param)(leaf), leaf, dz)
    s2 = means(w * g * xhat)
    dx = rstd * (w * g - means(w * g) - xhat * s2)

    # The variances of xhat and of g, in units of u^2 / 3.
    var_y = amplification(y, activation).square() + rounds_y * 2 * y.square()
    if rounds_y and given.residual is not None:
        var_y += 2 * normal.square()
    var_xhat = torch.where(kept > 0, xhat.square(), var_y / w.square())
    tail = (y < 0) & (activation in ("elu", "selu"))
    # The y of a kept channel, and its exponential, are rounded to fp32.
    var_kept = (w * xhat).square() + (2.0**-23 / u) ** 2 * (normal.square() + y.square())
    var_g = tail * g.square() * torch.where(kept > 0, var_kept, var_y)
    # Those of the sums of g and g * xhat of a channel, and of the means over a statistic of w times them.
    var_sums = [v.sum(3, keepdim=True) for v in (var_g, var_g * xhat.square() + var_xhat * g.square())]
    var_means = [(w.square() * v).sum(2, keepdim=True) / x[0, 0].numel() ** 2 for v in var_sums]
    var_dx = w.square() * var_g + var_xhat * s2.square() + 16 * (var_means[0] + var_means[1] * xhat.square())
    # The slope and its reciprocal are rounded to fp32, which makes all y of one sign off by the same factor.
    of_slope = of_channels((g * torch.where(kept > 0, xhat, y / w)).sum(3, keepdim=True).abs())
    # Statistics and sums have the accuracy of fp32.  An error of the statistics moves y, and with it g in the tail.
    of_statistics = of_channels((g * xhat).abs() * (1 + tail * w.abs() * (1 + xhat.abs())))
    # dx is rounded to its dtype.
    size = of_channels((rstd * w * g).square()).sqrt()
    least = torch.finfo(given.x.dtype).smallest_normal * u * (x.numel() / C) ** 0.5
    return Bounded(
        (dx.view(C, len(given.x), -1).transpose(0, 1) if groups is None else dx).reshape(given.x.shape),
        of_channels(g * xhat),
        2 * u / 3**0.5 * of_channels(rstd.square() * var_dx).sqrt() + (u + 2.0**-20) * size + least,
        4 * u / 3**0.5 * of_channels(var_sums[1]).sqrt() + of_statistics * 2.0**-20 + of_slope * 2.0**-23,
    )


def segmentation_sums(
    logits: Tensor,
    target: Tensor,
    mask: Tensor | None = None,
    probability: str = "softmax",
    likelihood: str = "softmax",
    ignore_index: int | None = None,
    squared: bool = False,
    minimum: bool = False,
    gamma: float = 0.0,
) -> Tensor:
    """The sums of ``fusedseg.functional.segmentation_sums``, (5, N, K), 0 for those that were not asked for.

    Every tensor of the formulas is formed; autograd can differentiate it.
    """
    N, K = logits.shape[:2]
    x = logits.double().reshape(N, K, -1)
    t = target.reshape(N, -1, x.shape[2])
    m = torch.ones_like(t[:, :1]).double() if mask is None else mask.double().reshape(N, 1, -1)
    if ignore_index is not None:
        # In float64, because a small integer dtype may lack the number, which would wrap.
        m = m * (t.double() != ignore_index)
    classes = torch.arange(K, device=x.device).view(1, K, 1)
    y = t.double() if target.shape == logits.shape else (t == classes).double()
    sums = [torch.zeros(N, K, dtype=x.dtype, device=x.device)] * 5
    if probability != "none":
        p = {"softmax": lambda: x.softmax(1), "sigmoid": x.sigmoid, "identity": lambda: x}[probability]()
        sums[0] = (m * (torch.minimum(p, y) if minimum else p * y)).sum(2)
        sums[1] = (m * (p * p if squared else p)).sum(2)
    sums[2] = (m * (y * y if squared else y)).sum(2)
    if likelihood == "sigmoid":
        m = m * (x * (1 - 2 * y)).sigmoid() ** gamma
        sums[3] = (m * y * functional.softplus(-x)).sum(2)
        sums[4] = (m * (1 - y) * functional.softplus(x)).sum(2)
    elif likelihood != "none":
        nll = -x.log_softmax(1)
        # A power below 1 has no gradient at p = 1.
        factor = (1 - x.softmax(1)).clamp(min=1e-30) ** gamma if gamma else 1
        sums[3] = (m * factor * torch.where(y == 0, 0, y * nll)).sum(2)
        sums[4] = (m * nll).sum(2) if likelihood == "smoothed" else sums[4]
    return torch.stack(sums)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """|value - reference| / |reference| in 2-norms; |value| if the reference is zero, and NaN if any value is NaN."""
    assert value.shape == reference.shape, (value.shape, reference.shape)
    value, reference = value.detach().double().cpu(), reference.detach().double().cpu()
    norm = torch.linalg.vector_norm(reference).item()
    return torch.linalg.vector_norm(value - reference).item() / (norm or 1.0)


def gradient_errors(gradients: dict[str, Tensor], stock: dict[str, Tensor]) -> dict[str, float]:
    """The relative difference of each gradient.  A thousandth of the largest norm counts as the least norm.

    So the gradient of a bias before a norm, which is nothing but rounding, has no large error.
    """
    assert gradients.keys() == stock.keys()
    floor = 1e-3 * max(g.norm().item() for g in stock.values())
    return {name: (gradients[name] - g).norm().item() / max(g.norm().item(), floor) for name, g in stock.items()}
