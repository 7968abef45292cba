"""norm_act on aten ops, for every device: the very ops of the stock norm and activation, and so the same bits.

Backward rebuilds y by a batch norm of given statistics (``_normalise``), whose rounding is that of the forward pass,
writes g = dz phi'(y) over it, and hands g to the norm's own backward.  Planes of a large tensor are done a part at a
time, each a smaller problem of whole statistics groups, so that there is no temporary of the tensor's size.  Rows
(channels_last) are done in one piece, since a range of channels is scattered there: beside dx there is g.

InstanceNorm of planes is the batch norm of one sample with N C channels, and of rows that of each sample; GroupNorm of
some planes is that of one sample with as many channels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activation import Activation
from .activation_aten import activate, activation_grad
from .groups_aten import over_channels
from .inplace_abn_aten import Exchange
from .layout import channel_view, layout_of, per_channel

aten = torch.ops.aten

# a tensor of as many bytes is still done in one piece; a larger one in parts that a CPU's caches hold
WHOLE_BYTES, PART_BYTES = 2**24, 2**22


class Norm(NamedTuple):
    """Which values share a mean and a variance: those of a channel ("batch"), of a channel of one sample ("instance"),
    or of one of ``groups`` equal groups of a sample's channels ("group")."""

    kind: str
    groups: int = 0


class Statistics(NamedTuple):
    """Mean and 1 / sqrt(var + eps) of every statistics group, (C,), (N C,) or (N groups,); or mean and var of every
    channel, where they are ``running`` ones."""

    mean: Tensor
    second: Tensor
    running: bool


class Gradients(NamedTuple):
    """None for what is not wanted."""

    dx: Tensor
    dweight: Tensor | None
    dbias: Tensor | None
    dresidual: Tensor | None
    dslope: Tensor | None


def _image(x: Tensor) -> Tensor:
    """``x``, or rows as the channels_last (N, C, 1, S) of any number of dimensions, which aten always knows as such."""
    if x.is_contiguous():
        return x
    N, C = x.shape[:2]
    S = x.numel() // (N * C)
    return x.as_strided((N, C, 1, S), (S * C, 1, S * C, C))


def _as(image: Tensor, x: Tensor) -> Tensor:
    """What ``_image`` has made of a tensor like ``x``, as that."""
    return image if image.stride() == x.stride() and image.shape == x.shape else image.as_strided(x.shape, x.stride())


def _problems(x: Tensor, norm: Norm) -> Sequence[Tensor]:
    """Views of ``x`` that batch norm takes, in the order of their statistics."""
    if norm.kind == "batch":
        return [_image(x)]
    if x.is_contiguous():
        return [x.view(1, -1, *x.shape[2:])]
    return _image(x).split(1)


def _wide(v: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter in the dtype of the statistics."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # without a call where there is nothing to do, as nearly always
    return v if v is None or v.dtype == wide else v.to(wide)


def _wide_weight(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Beside half precision, a weight in fp32 is also what makes aten compute the statistics in fp32."""
    if weight is None and x.dtype in (torch.float16, torch.bfloat16):
        return torch.ones(x.shape[1], dtype=torch.float32, device=x.device)
    return _wide(weight, x)


def _each(v: Any, x: Tensor, norm: Norm) -> Any:
    """A vector of C values as ``_problems`` have channels."""
    # A fifth of the time of Tensor.repeat.  reshape() would give a view of one channel, through which all samples moved
    # the same running statistics.
    return v if v is None or norm.kind == "batch" else v.expand(len(x), -1).contiguous().view(-1)


def forward(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    own: bool,
    momentum: float,
    eps: float,
    act: Activation,
    residual: Tensor | None,
    slope: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """z, and the two vectors of ``Statistics``; ``own``: those of x, which move the running ones."""
    weight, bias = _wide_weight(weight, x), _wide(bias, x)
    running = [_wide(v, x) for v in (running_mean, running_var)]
    if norm.kind == "group":
        N, C = x.shape[:2]
        S = x.numel() // (N * C)
        z, mean, second = aten.native_group_norm(_image(x), weight, bias, N, C, S, norm.groups, eps)
        z, mean, second = _as(z, x), mean.view(-1), second.view(-1)
    elif norm.kind == "batch" or not own:
        z, mean, second = aten.native_batch_norm(_image(x), weight, bias, *running, own, momentum, eps)
        z = _as(z, x)
        if not own:
            # copies: the buffers may move before backward comes
            mean, second = (v.clone() for v in running if v is not None)
        for buffer, v in zip((running_mean, running_var), running, strict=True):
            if own and buffer is not None and v is not None and v is not buffer:
                buffer.copy_(v)
    else:
        z = torch.empty_like(x)
        each = [_each(v, x, norm) for v in (weight, bias, *running)]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, second = x.new_empty(2, len(x) * x.shape[1], dtype=wide)
        first = 0
        for xp, zp in zip(_problems(x, norm), _problems(z, norm), strict=True):
            u = slice(first, first := first + xp.shape[1])
            aten.native_batch_norm.out(
                xp, *(None if v is None else v[u] for v in each), True, momentum, eps,
                out=zp, save_mean=mean[u], save_invstd=second[u],
            )  # fmt: skip
        for buffer, v in zip((running_mean, running_var), each[2:], strict=True):
            if buffer is not None:
                buffer.copy_(v.view(-1, x.shape[1]).mean(0))
    if residual is not None:
        z.add_(residual)
    return activate(z, act, slope), mean, second


def _normalise(x, norm, weight, bias, stats: Statistics, eps, out: Tensor | None) -> Tensor:
    """The normalised x, in ``out`` or in new memory; weight and bias are wide."""
    mean, second = stats.mean, stats.second
    if not stats.running and norm.kind == "group":
        D = len(x) * x.shape[1] // len(mean)
        mean, second = over_channels(mean, D), over_channels(second, D)
    bias = _each(bias, x, norm)
    # aten's group norm rounds otherwise where it has neither of them
    bare = norm.kind == "group" and weight is None and bias is None
    if not stats.running:
        # aten rounds weight / sqrt(var + eps) once, and not again with a variance of 1 and an eps of 0
        weight = second if weight is None else second * _each(weight, x, norm)
        second, eps = torch.ones_like(mean), 0.0
    if norm.kind == "batch" and out is None:
        return _as(aten.native_batch_norm(_image(x), weight, bias, mean, second, False, 0.0, eps)[0], x)
    out = torch.empty_like(x) if out is None else out
    unused = mean.new_empty(0)
    first = 0
    for xp, yp in zip(_problems(x, norm), _problems(out, norm), strict=True):
        u = slice(first, first := first + xp.shape[1])
        if bare:
            each = (1, -1, *(1,) * (xp.dim() - 2))
            torch.sub(xp, mean[u].view(each), out=yp).mul_(weight[u].view(each))
            continue
        parameters = (None if v is None else v[u] for v in (weight, bias, mean, second))
        aten.native_batch_norm.out(
            xp, *parameters, False, 0.0, eps, out=yp, save_mean=unused, save_invstd=unused
        )  # fmt: skip
    return out


def rebuild(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Statistics,
    eps: float,
    act: Activation,
    residual: Tensor | None,
    slope: Tensor | None,
) -> Tensor:
    """z once more, with the bits it had."""
    z = _normalise(x, norm, _wide_weight(weight, x), _wide(bias, x), stats, eps, None)
    if residual is not None:
        z.add_(residual)
    return activate(z, act, slope)


def _norm_backward(g, x, norm, weight, stats: Statistics, eps, affine: bool):
    """dx, dweight and dbias of the norm alone; the latter two of every channel of every sample where ``x`` is not one
    piece to aten."""
    mask = [True, affine, affine]
    if stats.running:
        return aten.native_batch_norm_backward(
            _image(g), _image(x), weight, stats.mean, stats.second, None, None, False, eps, mask
        )
    if norm.kind == "group":
        N, C = x.shape[:2]
        shape = (N, C, x.numel() // (N * C), norm.groups)
        mean, rstd = (v.view(N, norm.groups) for v in (stats.mean, stats.second))
        return aten.native_group_norm_backward(_image(g), _image(x), mean, rstd, weight, *shape, mask)
    if norm.kind == "batch":
        own = (stats.mean, stats.second)
        return aten.native_batch_norm_backward(_image(g), _image(x), weight, None, None, *own, True, eps, mask)
    weight = _each(weight, x, norm)
    done = []
    first = 0
    for gp, xp in zip(_problems(g, norm), _problems(x, norm), strict=True):
        u = slice(first, first := first + xp.shape[1])
        w = None if weight is None else weight[u]
        own = (stats.mean[u], stats.second[u])
        done.append(aten.native_batch_norm_backward(gp, xp, w, None, None, *own, True, eps, mask))
    if len(done) == 1:
        return done[0]
    dx, *sums = zip(*done, strict=True)
    return torch.cat(dx), *(torch.cat(s) if affine else None for s in sums)


def _exchanged(g, x, weight, stats: Statistics, eps, exchange: Exchange):
    """dx, dweight and dbias of a batch norm; dx is that of other sums than those of x, as if its statistics were."""
    rstd = torch.rsqrt(stats.second + eps)
    given = (weight, None, None, stats.mean, rstd, True, eps, [False, True, True])
    _, s2, s1 = aten.native_batch_norm_backward(_image(g), _image(x), *given)
    t1, t2 = exchange(s1, s2)
    layout = layout_of(x)
    assert layout is not None
    m = layout.N * layout.S
    # dx = slope (x - mean) + offset + scale g: a mean far from zero costs it nothing
    scale = rstd if weight is None else rstd * weight
    slope, offset = scale * rstd * t2 / -m, scale * t1 / -m
    dx = torch.empty_like(x)
    xv, gv, dxv = (channel_view(t, layout) for t in (x, g, dx))
    of_row = layout.C if layout.rows else m
    step = max(1, PART_BYTES // (4 * of_row))
    every = slice(None)
    for first in range(0, m if layout.rows else layout.C, step):
        part = slice(first, first + step)
        c, r = (every, part) if layout.rows else (part, every)
        mean, a, b, w = (per_channel(v[c], layout) for v in (stats.mean, slope, offset, scale))
        dxv[:, c, r] = (xv[:, c, r] - mean).mul_(a).add_(b).add_(gv[:, c, r] * w)
    return dx, s2, s1


def _whole(dz, x, norm, weight, bias, stats, eps, act, residual, slope, affine, buffer, exchange=None) -> Gradients:
    """The gradients in one piece, with ``buffer`` or new memory for y and g; those of vectors may be per sample."""
    g, dslope = dz, None
    if act.name != "identity":
        y = _normalise(x, norm, weight, bias, stats, eps, buffer)
        if residual is not None:
            y.add_(residual)
        g, dslope = activation_grad(dz, y, act, slope)
    if exchange is None:
        dx, dweight, dbias = _norm_backward(g, x, norm, weight, stats, eps, affine)
    else:
        dx, dweight, dbias = _exchanged(g, x, weight, stats, eps, exchange)
    return Gradients(_as(dx, x), dweight, dbias, None if residual is None else g, dslope)


def backward(
    dz: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Statistics,
    eps: float,
    act: Activation,
    residual: Tensor | None,
    slope: Tensor | None,
    affine: bool,
    exchange: Exchange | None = None,
) -> Gradients:
    """``dz`` and ``residual`` lie in memory as ``x`` does; ``affine``: the gradients of weight and bias are wanted.
    With an ``exchange``, of a batch norm alone, y and g are done in one piece."""
    weight, bias = _wide_weight(weight, x), _wide(bias, x)
    problem = (weight, bias, stats, eps, act, residual, slope, affine)
    if x.nbytes <= WHOLE_BYTES or not x.is_contiguous() or exchange is not None:
        found = _whole(dz, x, norm, *problem, None, exchange)
    else:
        found = _in_parts(dz, x, norm, *problem)
    C = x.shape[1]
    # of every sample, one after the other, where a norm of samples was done as a batch norm
    dweight, dbias = (v if v is None or len(v) <= C else v.view(-1, C).sum(0) for v in (found.dweight, found.dbias))
    dslope = found.dslope
    if slope is not None and dslope is not None and len(dslope) > len(slope):
        dslope = dslope.view(-1, len(slope)).sum(0)
    return Gradients(found.dx, dweight, dbias, found.dresidual, dslope)


def _in_parts(dz, x, norm, weight, bias, stats, eps, act, residual, slope, affine) -> Gradients:
    """Of contiguous planes."""
    batch = norm.kind == "batch"
    shape = x.shape if batch else (1, -1, *x.shape[2:])
    wide: dict[str, Any] = {"x": x, "dz": dz, "residual": residual, "dx": torch.empty_like(x)}
    if residual is not None:
        wide["dresidual"] = torch.empty_like(x)
    wide = {name: None if t is None else t.view(shape) for name, t in wide.items()}
    N, U = wide["x"].shape[:2]
    vectors = [_each(v, x, norm) for v in (weight, bias, slope if slope is not None and len(slope) > 1 else None)]
    D = U // len(stats.mean)
    # two channels at least, so that two threads find work
    step = max(2, PART_BYTES // (x.nbytes // U) // D) * D
    # new memory for each part would cost more than what is done with it
    scratch = x.new_empty(2, N * step * (x.numel() // (N * U)))
    sums: list[tuple] = []
    for u in (slice(first, min(first + step, U)) for first in range(0, U, step)):
        xp, dzp = wide["x"][:, u], wide["dz"][:, u]
        rp = None if residual is None else wide["residual"][:, u]
        copy, buffer = (memory[: dzp.numel()].view(dzp.shape) for memory in scratch)
        if N > 1:
            xp = copy.copy_(xp)
            dzp = buffer.copy_(dzp) if act.name == "identity" else dzp
        w, b, s = (None if v is None else v[u] for v in vectors)
        of = slice(u.start // D, u.stop // D)
        part = Norm("group", of.stop - of.start) if norm.kind == "group" else Norm("batch")
        own = Statistics(stats.mean[of], stats.second[of], stats.running)
        found = _whole(dzp, xp, part, w, b, own, eps, act, rp, slope if s is None else s, affine, buffer)
        wide["dx"][:, u] = found.dx
        if residual is not None:
            wide["dresidual"][:, u] = found.dresidual
        sums.append((found.dweight, found.dbias, found.dslope))
    dweight, dbias, dslope = (None if v[0] is None else torch.cat(v) for v in zip(*sums, strict=True))
    dresidual = None if residual is None else wide["dresidual"].view(x.shape)
    return Gradients(wide["dx"].view(x.shape), dweight, dbias, dresidual, dslope)
