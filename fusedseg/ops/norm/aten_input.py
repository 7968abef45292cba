"""The norm op that keeps its input on aten ops, for every device: the very ops of the stock norm and
activation, and so the same bits.

Backward rebuilds y by a batch norm of given statistics (``_normalise``), whose rounding is that of the forward pass,
writes g = dz phi'(y) over it, and hands g to the norm's own backward.  Planes of a large tensor are done a part at a
time, each a smaller problem of whole statistics groups, so that there is no temporary of the tensor's size.  Rows
(channels_last) are done in one piece, since a range of channels is scattered there: beside dx there is g.

InstanceNorm of planes is the batch norm of one sample with N C channels, and of rows that of each sample; GroupNorm of
some planes is that of one sample with as many channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...activation import TABLE, Activation
from ..activation_aten import activate, activation_grad
from ..layout import channel_view, layout_of, per_channel
from .aten_groups import over_channels
from .spec import Exchange, Gradients, Normalised, Passed, Saved, Spec, Wanted, stats_dtype

aten = torch.ops.aten

# a tensor of as many bytes is still done in one piece; a larger one in parts that a CPU's caches hold
WHOLE_BYTES, PART_BYTES = 2**24, 2**22


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


def _problems(x: Tensor, spec: Spec) -> Sequence[Tensor]:
    """Views of ``x`` that batch norm takes, in the order of their statistics."""
    if spec.kind == "batch":
        return [_image(x)]
    if x.is_contiguous():
        return [x.view(1, -1, *x.shape[2:])]
    return _image(x).split(1)


def _wide(v: Tensor | None, x: Tensor) -> Tensor | None:
    """A parameter in the dtype of the statistics."""
    if v is None or (v.dtype == x.dtype and v.dtype in (torch.float32, torch.float64)):
        return v
    wide = stats_dtype(x)
    # without a call where there is nothing to do, as nearly always
    return v if v.dtype == wide else v.to(wide)


def _wide_weight(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Beside half precision, a weight in fp32 is also what makes aten compute the statistics in fp32."""
    if weight is None and x.dtype in (torch.float16, torch.bfloat16):
        return torch.ones(x.shape[1], dtype=torch.float32, device=x.device)
    return _wide(weight, x)


def _each(v: Any, x: Tensor, spec: Spec) -> Any:
    """A vector of C values as ``_problems`` have channels."""
    # A fifth of the time of Tensor.repeat.  reshape() would give a view of one channel, through which all samples moved
    # the same running statistics.
    return v if v is None or spec.kind == "batch" else v.expand(len(x), -1).contiguous().view(-1)


def forward(passed: Passed, spec: Spec) -> Normalised:
    x, running_mean, running_var = passed.x, passed.running_mean, passed.running_var
    own, momentum, eps = spec.own, spec.momentum, spec.eps
    weight, bias = _wide_weight(passed.weight, x), _wide(passed.bias, x)
    running = [_wide(v, x) for v in (running_mean, running_var)]
    if spec.kind == "group":
        N, C = x.shape[:2]
        S = x.numel() // (N * C)
        z, mean, second = aten.native_group_norm(_image(x), weight, bias, N, C, S, spec.groups, eps)
        z, mean, second = _as(z, x), mean.view(-1), second.view(-1)
    elif spec.kind == "batch" or not own:
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
        each = [_each(v, x, spec) for v in (weight, bias, *running)]
        mean, second = x.new_empty(2, len(x) * x.shape[1], dtype=stats_dtype(x))
        first = 0
        for xp, zp in zip(_problems(x, spec), _problems(z, spec), strict=True):
            u = slice(first, first := first + xp.shape[1])
            aten.native_batch_norm.out(
                xp, *(None if v is None else v[u] for v in each), True, momentum, eps,
                out=zp, save_mean=mean[u], save_invstd=second[u],
            )  # fmt: skip
        for buffer, v in zip((running_mean, running_var), each[2:], strict=True):
            if buffer is not None:
                buffer.copy_(v.view(-1, x.shape[1]).mean(0))
    if passed.residual is not None:
        z.add_(passed.residual)
    return Normalised(activate(z, spec.act, passed.slope), mean, second)


def _wide_saved(saved: Saved) -> Saved:
    x = saved.source
    weight, bias = _wide_weight(saved.weight, x), _wide(saved.bias, x)
    # without a call where there is nothing to do, as nearly always
    return saved if weight is saved.weight and bias is saved.bias else saved._replace(weight=weight, bias=bias)


def _normalise(saved: Saved, spec: Spec, out: Tensor | None) -> Tensor:
    """The normalised x, in ``out`` or in new memory; weight and bias are wide."""
    x, weight, bias, mean, second, eps = saved.source, saved.weight, saved.bias, saved.mean, saved.second, spec.eps
    assert mean is not None
    running = spec.keeps_variance
    if not running and spec.kind == "group":
        D = len(x) * x.shape[1] // len(mean)
        mean, second = over_channels(mean, D), over_channels(second, D)
    bias = _each(bias, x, spec)
    # aten's group norm rounds otherwise where it has neither of them
    bare = spec.kind == "group" and weight is None and bias is None
    if not running:
        # aten rounds weight / sqrt(var + eps) once, and not again with a variance of 1 and an eps of 0
        weight = second if weight is None else second * _each(weight, x, spec)
        second, eps = torch.ones_like(mean), 0.0
    if spec.kind == "batch" and out is None:
        return _as(aten.native_batch_norm(_image(x), weight, bias, mean, second, False, 0.0, eps)[0], x)
    out = torch.empty_like(x) if out is None else out
    unused = mean.new_empty(0)
    first = 0
    for xp, yp in zip(_problems(x, spec), _problems(out, spec), strict=True):
        u = slice(first, first := first + xp.shape[1])
        if bare:
            assert weight is not None
            each = (1, -1, *(1,) * (xp.dim() - 2))
            torch.sub(xp, mean[u].view(each), out=yp).mul_(weight[u].view(each))
            continue
        parameters = [None if v is None else v[u] for v in (weight, bias, mean, second)]
        aten.native_batch_norm.out(
            xp, *parameters, False, 0.0, eps, out=yp, save_mean=unused, save_invstd=unused
        )  # fmt: skip
    return out


def rebuild(saved: Saved, spec: Spec) -> Tensor:
    """z once more, with the bits it had."""
    z = _normalise(_wide_saved(saved), spec, None)
    if saved.residual is not None:
        z.add_(saved.residual)
    return activate(z, spec.act, saved.slope)


def _norm_backward(g: Tensor, saved: Saved, spec: Spec, affine: bool) -> Any:
    """dx, dweight and dbias of the norm alone; the latter two of every channel of every sample where ``x`` is not one
    piece to aten."""
    x, weight, mean, second, eps = saved.source, saved.weight, saved.mean, saved.second, spec.eps
    assert mean is not None
    mask = [True, affine, affine]
    if spec.keeps_variance:
        return aten.native_batch_norm_backward(_image(g), _image(x), weight, mean, second, None, None, False, eps, mask)
    if spec.kind == "group":
        N, C = x.shape[:2]
        shape = (N, C, x.numel() // (N * C), spec.groups)
        mean, rstd = (v.view(N, spec.groups) for v in (mean, second))
        return aten.native_group_norm_backward(_image(g), _image(x), mean, rstd, weight, *shape, mask)
    if spec.kind == "batch":
        return aten.native_batch_norm_backward(_image(g), _image(x), weight, None, None, mean, second, True, eps, mask)
    weight = _each(weight, x, spec)
    done = []
    first = 0
    for gp, xp in zip(_problems(g, spec), _problems(x, spec), strict=True):
        u = slice(first, first := first + xp.shape[1])
        w = None if weight is None else weight[u]
        done.append(aten.native_batch_norm_backward(gp, xp, w, None, None, mean[u], second[u], True, eps, mask))
    if len(done) == 1:
        return done[0]
    dx, *sums = zip(*done, strict=True)
    return torch.cat(dx), *(torch.cat(s) if affine else None for s in sums)


def _exchanged(g: Tensor, saved: Saved, spec: Spec, exchange: Exchange) -> Any:
    """dx, dweight and dbias of a batch norm; dx is that of other sums than those of x, as if its statistics were."""
    x, weight, mean = saved.source, saved.weight, saved.mean
    assert mean is not None
    rstd = torch.rsqrt(saved.second + spec.eps)
    given = (weight, None, None, mean, rstd, True, spec.eps, [False, True, True])
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
        mu, a, b, w = (per_channel(v[c], layout) for v in (mean, slope, offset, scale))
        dxv[:, c, r] = (xv[:, c, r] - mu).mul_(a).add_(b).add_(gv[:, c, r] * w)
    return dx, s2, s1


def reads_output(x: Tensor, act: Activation) -> bool:
    """Whether ``backward`` uses the output of ``x`` where it is at hand, which saves it from computing y."""
    return TABLE[act.name].grad_of_output is not None and (x.nbytes <= WHOLE_BYTES or not x.is_contiguous())


def _from_output(dz: Tensor, rebuilt: list[Tensor] | None, x: Tensor, act: Activation) -> Tensor | None:
    """g from the output, if that is at hand and lies in memory as ``x`` does."""
    z = rebuilt.pop() if rebuilt else None
    grad = TABLE[act.name].grad_of_output
    return None if z is None or grad is None or z.stride() != x.stride() else grad(dz, z)


def _whole(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted, buffer: Tensor | None = None) -> Gradients:
    """The gradients in one piece, with ``buffer`` or new memory for y and g; those of vectors may be per sample."""
    affine, exchange = wanted.affine, wanted.exchange
    g, dslope, residual = _from_output(dz, wanted.rebuilt, saved.source, spec.act), None, saved.residual
    if g is None and TABLE[spec.act.name].identity:
        g = dz
    elif g is None:
        y = _normalise(saved, spec, buffer)
        if residual is not None:
            y.add_(residual)
        g, dslope = activation_grad(dz, y, spec.act, saved.slope)
    if exchange is None:
        dx, dweight, dbias = _norm_backward(g, saved, spec, affine)
    else:
        dx, dweight, dbias = _exchanged(g, saved, spec, exchange)
    return Gradients(_as(dx, saved.source), dweight, dbias, None if residual is None else g, dslope)


def backward(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted) -> Gradients:
    """``dz`` and the residual lie in memory as x does.  With an exchange, which a batch norm alone has, y and g are
    computed in one piece."""
    x, slope = saved.source, saved.slope
    saved = _wide_saved(saved)
    if x.nbytes <= WHOLE_BYTES or not x.is_contiguous() or wanted.exchange is not None:
        found = _whole(dz, saved, spec, wanted)
    else:
        found = _in_parts(dz, saved, spec, wanted._replace(rebuilt=None))
    C = x.shape[1]
    # of every sample, one after the other, where a norm of samples was done as a batch norm
    dweight, dbias = (v if v is None or len(v) <= C else v.view(-1, C).sum(0) for v in (found.dweight, found.dbias))
    dslope = found.dslope
    if slope is not None and dslope is not None and len(dslope) > len(slope):
        dslope = dslope.view(-1, len(slope)).sum(0)
    return Gradients(found.dx, dweight, dbias, found.dresidual, dslope)


def _in_parts(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted) -> Gradients:
    """Of contiguous planes."""
    x, residual, slope, mean = saved.source, saved.residual, saved.slope, saved.mean
    assert mean is not None
    shape = x.shape if spec.kind == "batch" else (1, -1, *x.shape[2:])
    wide: dict[str, Any] = {"x": x, "dz": dz, "residual": residual, "dx": torch.empty_like(x)}
    if residual is not None:
        wide["dresidual"] = torch.empty_like(x)
    wide = {name: None if t is None else t.view(shape) for name, t in wide.items()}
    N, U = wide["x"].shape[:2]
    one_slope = slope is None or len(slope) == 1
    vectors = [_each(v, x, spec) for v in (saved.weight, saved.bias, None if one_slope else slope)]
    D = U // len(mean)
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
            dzp = buffer.copy_(dzp) if TABLE[spec.act.name].identity else dzp
        w, b, s = (None if v is None else v[u] for v in vectors)
        of = slice(u.start // D, u.stop // D)
        grouped = spec.kind == "group"
        part = spec._replace(kind="group" if grouped else "batch", groups=of.stop - of.start if grouped else 0)
        own = Saved(xp, w, b, rp, slope if s is None else s, mean[of], saved.second[of])
        found = _whole(dzp, own, part, wanted, buffer)
        wide["dx"][:, u] = found.dx
        if residual is not None:
            wide["dresidual"][:, u] = found.dresidual
        sums.append((found.dweight, found.dbias, found.dslope))
    dweight, dbias, dslope = (None if v[0] is None else torch.cat(v) for v in zip(*sums, strict=True))
    dresidual = None if residual is None else wide["dresidual"].view(x.shape)
    return Gradients(wide["dx"].view(x.shape), dweight, dbias, dresidual, dslope)
