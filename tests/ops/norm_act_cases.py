"""Shared by the tests of norm_act: the activations, and a function that calls the stock functions and norm_act."""

import math

import torch
from torch.nn import functional as F

from fusedseg.activation import TABLE
from fusedseg.functional import norm_act
from tests.reference import PARAMS, stock_activation
from tests.tools.tensors import channels_last

# name: activation, activation_param, the stock function; prelu has slopes for 3 channels
SLOPES = (0.25, -0.1, 1.5)
ACTIVATIONS = {
    name: (*(row.selected_by or (name, PARAMS.get(name))), stock_activation(name, PARAMS.get(name)))
    for name, row in TABLE.items()
}
ACTIVATIONS |= {
    "leaky_relu-negative": ("leaky_relu", -0.2, stock_activation("leaky_relu", -0.2)),
    "prelu-shared": ACTIVATIONS["prelu"],
}
# The rounding of a dtype.
U = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float32, torch.float64)}
NORMS = ("batch", "instance", "group")
GROUPS = 3


def slope_of(name, x):
    if not name.startswith("prelu"):
        return None
    slopes = SLOPES[:1] if name == "prelu-shared" else SLOPES * (x.shape[1] // 3)
    return torch.tensor(slopes, dtype=x.dtype, device=x.device)


def stock_norm(norm, x, running, weight, bias, training, eps=1e-5):
    if norm == "batch":
        return F.batch_norm(x, *running, weight, bias, training, 0.1, eps)
    if norm == "instance":
        return F.instance_norm(x, *running, weight, bias, training, 0.1, eps)
    return F.group_norm(x, GROUPS, weight, bias, eps)


def fused(norm, x, weight=None, bias=None, groups=GROUPS, **options):
    """``norm_act`` with statistics of its own, and none that run."""
    options = {"training": True, "num_groups": groups if norm == "group" else None} | options
    return norm_act(x, None, None, weight, bias, norm=norm, **options)


def both(norm, name, x, weight, bias, residual, training=True, eps=1e-5):
    """Yields (output, gradients of all given tensors, final running statistics) of the stock functions, then of ours.

    The stock functions run on a CPU: on CUDA hardswish multiplies by one sixth in fp32, in fp64 too.
    """
    activation, param, stock = ACTIVATIONS[name]
    running = [torch.linspace(s, 1.2, x.shape[1], dtype=x.dtype, device=x.device) for s in (-0.5, 0.5)]
    gradient = torch.randn_like(x)
    for fused in (False, True):
        place = x.device if fused else "cpu"
        dz = gradient.to(place)
        given = [x, weight, bias, residual, slope_of(name, x)]
        leaves = [None if t is None else t.to(place, copy=True).requires_grad_() for t in given]
        xs, w, b, r, slope = leaves
        buffers = (None, None) if norm == "group" else [v.to(place, copy=True) for v in running]
        if fused:
            options = {"norm": norm, "num_groups": GROUPS if norm == "group" else None, "residual": r, "slope": slope}
            options |= {"activation": activation, "activation_param": param}
            z = norm_act(xs, *buffers, w, b, training, 0.1, eps, **options)
        else:
            y = stock_norm(norm, xs, buffers, w, b, training, eps)
            y = y if r is None else y + r
            z = stock(y) if slope is None else F.prelu(y, slope)
            # The stock instance norm of one sample copies x, and misreads a gradient that is in channels_last.
            dz = dz.contiguous() if norm == "instance" else dz
        grads = torch.autograd.grad(z, [t for t in leaves if t is not None], dz)
        yield z, *grads, *(v for v in buffers if v is not None)


def inputs(shape=(3, 6, 8, 8), dtype=torch.float32, fmt="contiguous", residual=True, device="cpu"):
    x = torch.randn(shape, dtype=dtype, device=device) * 2 + 0.5
    x = channels_last(x) if fmt == "channels_last" else x
    C = shape[1]
    # The weights have both signs, and one is zero.
    weight = torch.linspace(-1, 1.5, C, dtype=dtype, device=device)
    return (
        x,
        weight,
        torch.linspace(-0.5, 0.5, C, dtype=dtype, device=device),
        torch.randn_like(x) if residual else None,
    )


def close_gradients(found, expected, x):
    """Compares gradients with those of eager mode, which adds in another order.

    The error of a sum of m terms grows with sqrt(m) u times their size, which is about 16 here at most.  The gradient
    of x contains such a sum divided by m, and is rounded about four times.
    """
    m = x.numel() // x.shape[1]
    for mine, theirs in zip(found, expected, strict=True):
        bound = 16 * U[x.dtype] * (math.sqrt(m) if mine.dim() == 1 else 4)
        torch.testing.assert_close(mine, theirs, rtol=bound, atol=bound)
