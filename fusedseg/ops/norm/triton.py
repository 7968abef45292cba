"""The norm op on Triton kernels: ``kernels/norm_act.py``, ``norm_act_bwd.py``, and ``norm_sums.py`` for sums."""

import functools
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._backend import launching
from ...activation import IDENTITY
from ..at_size import checked
from ..check import HALF
from ..layout import Layout, layout_of, pitch_of
from ..registry import Result, family
from ..self_test.cases import EPS, FORMATS, MOMENTUM, SHAPE, SLOPE, TOLERANCE, image, parameters, stock
from . import exact
from .call import BackwardCall, Gradients, Norm, Operands, Statistics, move_running, stats_dtype
from .kept import Kept

# The second family has the kernel of ``statistics_of_sums``, which convolutions with norms inside of them need alone.
FAMILY, SUMS_FAMILY = "norm", "norm_sums"
# More parts of statistics than a program merges by itself (MAX_PARTIALS in kernels/launch.py), in the self-test.
PARTS = 18


@functools.cache
def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of the kernels, which the first call imports."""
    # An import statement would look the modules up in every call.
    from ...kernels import norm_act, norm_act_bwd

    return norm_act, norm_act_bwd


def _layout(x: Tensor, norm: Norm) -> Layout:
    """How a dense x lies in memory, and the values of a statistic."""
    layout = layout_of(x)
    assert layout is not None
    return norm.over.by_sample(layout, x) if norm.over.of_samples else layout


@checked(FAMILY, exact.forward, exact.forward_kind, exact.before_forward)
def forward(given: Operands, norm: Norm, kept: Kept | None, out: Tensor | None) -> tuple[Tensor, Statistics]:
    norm_act, _ = _kernels()
    x, weight, bias, residual, _, running_mean, running_var, batches = given
    own, layout = norm.own, _layout(x, norm)
    # Kernels move the running statistics of a batch only.
    of_batch = not norm.over.of_samples or (norm.keep == "output" and layout.I * layout.D == 1)
    if not of_batch:
        running_mean = running_var = None
    counted = batches if own and running_mean is not None and _can_count(batches, x) else None
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        mean, rstd, xhat = norm_act.norm_act_fwd(
            x, z, layout, weight, bias, running_mean=running_mean, running_var=running_var, training=own,
            momentum=norm.momentum, eps=norm.eps, act=norm.act,
            kept=None if kept is None else (kept.slots, kept.count), residual=residual,
            batches=counted,
            # An op that writes over x keeps no mean.  The means of samples are needed to move running statistics.
            keep_mean=own and (out is not x or not of_batch),
        )  # fmt: skip
    if counted is not None:
        torch.autograd.graph.increment_version(counted)
    elif batches is not None:
        batches.add_(1)
    if not own and norm.keep == "input":
        assert running_mean is not None
        mean = running_mean.to(rstd.dtype, copy=True)
    if own and not of_batch and given.running_mean is not None:
        # The variance without Bessel's correction.
        var = (rstd**-2 - norm.eps).clamp_min(0.0)
        move_running(given, norm, mean, var, layout.N * layout.S)
    return z, Statistics(mean, rstd, xhat)


@checked(FAMILY, exact.recompute, exact.recompute_kind, exact.before_forward)
def recompute(given: Operands, stats: Statistics, norm: Norm, out: Tensor | None) -> Tensor:
    norm_act, _ = _kernels()
    x = given.x
    z = torch.empty_like(x) if out is None else out
    with launching(x):
        norm_act.norm_act_rebuild(
            x, z, _layout(x, norm), given.weight, given.bias, mean=stats.mean, rstd=stats.rstd, act=norm.act,
            residual=given.residual,
        )  # fmt: skip
    return z


@checked(FAMILY, exact.backward, exact.backward_kind, exact.before_backward)
def backward(call: BackwardCall) -> Gradients:
    _, kernels = _kernels()
    dz, given, stats, norm, kept, needs, into, also, over_also, exchange = call
    source, weight, bias, residual = given[:4]
    _, need_weight, need_bias, writes_g, _ = needs
    if norm.keep == "input":
        # The kernels of an op that keeps its input write g whenever there is a residual.
        writes_g = residual is not None
    layout = _layout(source, norm)
    pitch = dresidual = None
    if writes_g:
        over = also is not None and over_also and also.stride() == source.stride()
        dresidual = also if over else torch.empty_like(source)
    if also is not None:
        pitch = _pitch(also, source, layout)
        if pitch is None:
            dz, also = torch.add(dz, also, out=into) if into is dz else dz + also, None
    parameter = None if not (need_weight or need_bias) else bias if weight is None else weight
    tensors = dz, source, layout, weight, bias, stats.rstd, stats.xhat
    options = {
        "kept": None if kept is None else (kept.slots, kept.count),
        "act": norm.act,
        "dparam_dtype": None if parameter is None else parameter.dtype,
        "dx": into,
        "mean": stats.mean,
        "residual": residual,
        "dresidual": dresidual,
    }
    with launching(source):
        if exchange is None:
            found = kernels.norm_act_bwd(*tensors, training=norm.own, also=also, pitch=pitch, **options)
        else:
            found = kernels.norm_act_bwd_of_all_processes(*tensors, exchange=exchange, **options)
    dx, dweight, dbias = found
    return Gradients(dx, dweight, dbias, dresidual)


def _pitch(also: Tensor, x: Tensor, layout: Layout) -> int | None:
    """How far the rows of a second gradient are apart, or the number of channels; None if no kernel reads it."""
    if also.stride() == x.stride():
        return layout.C
    pitch = pitch_of(also) if layout.rows else None
    return pitch if pitch is not None and pitch * also.element_size() % 16 == 0 else None


@checked(FAMILY, exact.moments)
def moments(x: Tensor) -> Tensor:
    from ...kernels.norm_stats import few, norm_stats

    with launching(x):
        return few(norm_stats(x, _layout(x, exact.OF_BATCH)), x.shape[1]).transpose(0, 1)


def statistics_of_sums(
    y: Tensor, sums: Tensor, norm: Norm, running: tuple[Tensor | None, Tensor | None], far: float
) -> tuple[Tensor, Tensor]:
    """The mean and rstd of y, in channels_last, from the sums of y - shift, (2, values of a statistic), and its square.

    The shift is the running mean, or 0.  It is far from the mean if their difference, squared, is above ``far`` times
    the variance.  The running statistics move.
    """
    from ...kernels.norm_sums import norm_of_sums

    with launching(y):
        return norm_of_sums(y, sums, _layout(y, norm), *running, momentum=norm.momentum, eps=norm.eps, far=far)


def backward_of_sums(call: BackwardCall, sums: Tensor) -> Gradients:
    _, kernels = _kernels()
    g, given, stats, norm, _, needs, *_ = call
    parameter = None if not (needs[1] or needs[2]) else given.bias if given.weight is None else given.weight
    tensors = g, given.x, _layout(given.x, norm), given.weight, given.bias, stats.rstd, None
    with launching(g):
        found = kernels.norm_act_bwd(
            *tensors, kept=None, training=True, act=IDENTITY, dx=g, mean=stats.mean,
            dparam_dtype=None if parameter is None else parameter.dtype, sums=sums.unsqueeze(1),
        )  # fmt: skip
    return Gradients(*found)


def _can_count(batches: Tensor | None, x: Tensor) -> bool:
    """Whether a kernel can add to ``batches``: it must be one int64 on the device of ``x``, as in the stock norm."""
    return batches is not None and batches.dtype == torch.int64 and batches.numel() == 1 and batches.device == x.device


def _padded(parts: Tensor) -> Tensor:
    """Parts of statistics or sums, (k, parts, C), with empty parts behind them."""
    return torch.cat([parts, parts.new_zeros(parts.shape[0], PARTS - parts.shape[1], parts.shape[2])], 1)


def _norm_float64(x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, slope: float) -> dict[str, Tensor]:
    """Forward and backward of BatchNorm and a (leaky) ReLU, and the running statistics, which were zeros."""
    mean, var = torch.zeros(2, x.shape[1], dtype=torch.float64)

    def norm_act(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS), slope)

    z, dx, dweight, dbias = stock(norm_act, x, weight, bias, dy=dz)
    return {"z": z, "dx": dx, "dweight": dweight, "dbias": dbias, "running_mean": mean, "running_var": var}


def _norm_by_kernels(
    x: Tensor, dz: Tensor, weight: Tensor, bias: Tensor, act: tuple[str, float], split: bool
) -> dict[str, Tensor]:
    """The same results from the launchers.  LeakyReLU keeps its output, and ReLU its input.

    ``split`` says that several programs share a channel, and that their statistics are merged by a kernel.
    """
    from ...kernels.norm_act import norm_act_fwd, norm_act_rebuild
    from ...kernels.norm_act_bwd import norm_act_bwd, norm_act_bwd_sums
    from ...kernels.norm_stats import norm_stats

    layout, z = _layout(x, exact.OF_BATCH), torch.empty_like(x)
    running = torch.zeros(2, x.shape[1], dtype=weight.dtype, device=x.device)
    mean, rstd, _ = norm_act_fwd(
        x, z, layout, weight, bias, running_mean=running[0], running_var=running[1], training=True,
        momentum=MOMENTUM, eps=EPS, act=act, kept=None, partial=_padded(norm_stats(x, layout)) if split else None,
        batches=torch.zeros((), dtype=torch.int64, device=x.device),
    )  # fmt: skip
    found = {"z": z, "running_mean": running[0], "running_var": running[1]}
    saved, options = z, {"xhat_kept": None, "kept": None, "act": act}
    if act[0] == "relu":
        saved, options["mean"] = x, mean
        found["z rebuilt"] = torch.empty_like(x)
        norm_act_rebuild(x, found["z rebuilt"], layout, weight, bias, mean, rstd, act)
    affine = weight, bias, rstd
    sums = _padded(norm_act_bwd_sums(dz, saved, layout, *affine, **options)) if split else None
    found["dx"], found["dweight"], found["dbias"] = norm_act_bwd(
        dz, saved, layout, *affine, training=True, dparam_dtype=weight.dtype, sums=sums, **options
    )
    # In eval mode statistics are constants, so these gradients are the same for the same statistics.
    _, found["dweight in eval mode"], found["dbias in eval mode"] = norm_act_bwd(
        dz, saved, layout, *affine, training=False, dparam_dtype=weight.dtype, **options
    )
    # Two gradients of z, the second of which is a slice of channels.
    half, wide = dz * 0.5, torch.cat([dz, dz * 0.5], 1)
    wide = wide.contiguous(memory_format=FORMATS["channels_last" if layout.rows else "contiguous"])
    also, pitch = (wide[:, dz.shape[1] :], wide.shape[1]) if layout.rows else (half, layout.C)
    given = (half, saved, layout, *affine)
    found["dx of two gradients"], *_ = norm_act_bwd(
        *given, training=True, dparam_dtype=weight.dtype, also=also, pitch=pitch, **options
    )
    return found


@family(FAMILY)
def _self_test(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    for fmt, act in (("contiguous", ("leaky_relu", SLOPE)), ("channels_last", ("relu", 0.0))):
        x, dz = (image(SHAPE, dtype, device, fmt, seed) for seed in (0, 1))
        weight, bias = parameters(SHAPE[1], dtype, device)
        expected = _norm_float64(x, dz, weight, bias, act[1])
        expected["z rebuilt"] = expected["z"]
        expected |= {f"{name} in eval mode": expected[name] for name in ("dweight", "dbias")}
        expected["dx of two gradients"] = expected["dx"]
        for split in (False, True):
            way = "several programs a channel" if split else "one program a channel"
            for what, found in _norm_by_kernels(x, dz, weight, bias, act, split).items():
                yield Result(f"{what} ({fmt}, {way})", found, expected[what], TOLERANCE[dtype])


@family(SUMS_FAMILY, dtypes=HALF)
def _self_test_of_sums(dtype: torch.dtype, device: torch.device) -> Iterator[Result]:
    x = image(SHAPE, dtype, device, "channels_last", 0) + 1
    wide, exact = x.to(stats_dtype(x)), x.double()
    mean, var = exact.mean((0, 2, 3)), exact.var((0, 2, 3), correction=0)
    norm = Norm("input", IDENTITY, EPS, MOMENTUM)
    # The second shift is so far from the mean that x is read again.
    for shift in (0.5, 1000.0):
        start = wide.new_full(SHAPE[1:2], shift)
        running, d = (start, torch.ones_like(start)), wide - shift
        sums = torch.stack([d.sum((0, 2, 3)), d.square().sum((0, 2, 3))])
        found = *statistics_of_sums(x, sums, norm, running, far=64.0), start
        expected = mean, (var + EPS).rsqrt(), shift + MOMENTUM * (mean - shift)
        for what, one, right in zip(("mean", "rstd", "running_mean"), found, expected, strict=True):
            yield Result(f"{what}, shift {shift}", one, right, TOLERANCE[dtype])
