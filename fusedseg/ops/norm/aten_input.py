"""The norm op that keeps its input, on aten ops, for every device.

It calls the same ops as the stock norm and activation, so its results have the same bits on a CPU.

Backward rebuilds y by a batch norm of given statistics (``_normalise``), which rounds as a CPU's forward pass does.  It
writes g = dz phi'(y) over y, and passes g to the norm's own backward.  Planes of a large tensor are processed in parts.
Each part is a smaller problem of whole statistics groups, so that there is no temporary of the tensor's size.  Rows
(channels_last) are processed in one piece, because a range of channels is scattered in memory there; g then takes the
memory of a whole tensor beside dx.

InstanceNorm of planes is computed as the batch norm of one sample with N C channels.  InstanceNorm of rows is computed
as one batch norm per sample.  GroupNorm of a part of the planes is the GroupNorm of one sample with these channels.

aten's group norm on a GPU takes only contiguous tensors of one dtype.  So forward finds the statistics there and calls
``_normalise``, and backward calls aten with copies of x and g where these are needed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _backend
from ..._torch import FakeTensor
from ...activation import TABLE
from ..layout import channel_view, layout_of, per_channel
from .aten_chunks import activate, activation_grad, over_channels, over_samples, run_of, scale_shift
from .spec import Exchange, Gradients, Normalised, Passed, Saved, Spec, Wanted, cast, stats_dtype

# A call of ``torch.ops`` takes longer than a call of the functions of ``torch``, which have no backward functions.  A
# call of an overload by position is the shortest there is for those.
# The type checker cannot count the arguments of starred lists.
_batch_norm: Any = torch.native_batch_norm
_batch_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default

# A tensor of up to WHOLE_BYTES is processed in one piece, a larger one in parts of PART_BYTES, which fit into a CPU's
# caches.
WHOLE_BYTES, PART_BYTES = 2**24, 2**22


def _image(x: Tensor) -> Tensor:
    """``x`` if it is contiguous.  Otherwise its rows as a channels_last tensor (N, C, 1, S).

    aten recognises channels_last by four dimensions, whatever number of dimensions ``x`` has.
    """
    if x.is_contiguous():
        return x
    N, C = x.shape[:2]
    S = x.numel() // (N * C)
    return x.as_strided((N, C, 1, S), (S * C, 1, S * C, C))


def _off_cpu(x: Tensor) -> bool:
    """Whether a GPU computes on ``x``.  Tensors without values show the memory of the kernels of this package."""
    return _backend.off_cpu(x) and not isinstance(x, FakeTensor)


def _as(image: Tensor, x: Tensor) -> Tensor:
    """Gives a result of ``_image`` the shape and strides of ``x`` again."""
    if image.stride() == x.stride() and image.shape == x.shape:
        return image
    if _off_cpu(x) and image.is_contiguous() and not x.is_contiguous():
        # CUDA returns planes where a CPU returns rows.
        image = torch.empty_like(_image(x)).copy_(image)
    return image.as_strided(x.shape, x.stride())


def _problems(x: Tensor, spec: Spec) -> Sequence[Tensor]:
    """The views of ``x`` on which batch norm is called, in the order of their statistics."""
    if spec.kind == "batch":
        return [_image(x)]
    if x.is_contiguous():
        return [x.view(1, -1, *x.shape[2:])]
    return _image(x).split(1)


def _wide(weight: Tensor | None, bias: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias in the dtype of the statistics; the weight is ones where aten needs one.

    A weight in fp32 beside half-precision ``x`` makes aten compute the statistics in fp32.  On CUDA the gradient of a
    bias has the dtype of the weight, and does not exist without one.
    """
    acc = stats_dtype(x)
    if weight is None and (bias is not None or x.dtype in (torch.float16, torch.bfloat16)):
        weight = torch.ones(x.shape[1], dtype=acc, device=x.device)
    return cast(weight, acc), cast(bias, acc)


def _each(v: Tensor | None, x: Tensor, spec: Spec) -> Any:
    """Repeats a vector of C values for every sample, because the views of ``_problems`` have N C channels together."""
    return v if spec.kind == "batch" else over_samples(v, len(x))


def forward(passed: Passed, spec: Spec) -> Normalised:
    x, running_mean, running_var = passed.x, passed.running_mean, passed.running_var
    own, momentum, eps = spec.own, spec.momentum, spec.eps
    acc = stats_dtype(x)
    weight, bias = _wide(passed.weight, passed.bias, x)
    running = [cast(v, acc) for v in (running_mean, running_var)]
    if spec.kind == "group" and _off_cpu(x):
        groups = x.unflatten(1, (spec.groups, -1)).to(acc)
        var, mean = torch.var_mean(groups, list(range(2, groups.dim())), correction=0)
        mean, second = mean.view(-1), torch.rsqrt(var + eps).view(-1)
        z = _normalise(Saved(x, weight, bias, None, None, mean, second), spec, None)
    elif spec.kind == "group":
        N, C = x.shape[:2]
        S = x.numel() // (N * C)
        z, mean, second = torch.native_group_norm(_image(x), weight, bias, N, C, S, spec.groups, eps)
        z, mean, second = _as(z, x), mean.view(-1), second.view(-1)
    elif spec.kind == "batch" or not own:
        z, mean, second = _batch_norm(_image(x), weight, bias, *running, own, momentum, eps)
        z = _as(z, x)
        if not own:
            # These are copies, because the buffers may change before backward runs.
            mean, second = (v.clone() for v in running if v is not None)
        for buffer, v in zip((running_mean, running_var), running, strict=True):
            if own and buffer is not None and v is not None and v is not buffer:
                buffer.copy_(v)
    else:
        z = torch.empty_like(x)
        each = [_each(v, x, spec) for v in (weight, bias, *running)]
        mean, second = x.new_empty((2, len(x) * x.shape[1]), dtype=acc)
        first = 0
        for xp, zp in zip(_problems(x, spec), _problems(z, spec), strict=True):
            u = slice(first, first := first + xp.shape[1])
            given = [None if v is None else v[u] for v in each]
            _batch_norm(xp, *given, True, momentum, eps, out=(zp, mean[u], second[u]))
        for buffer, v in zip((running_mean, running_var), each[2:], strict=True):
            if buffer is not None:
                buffer.copy_(v.view(-1, x.shape[1]).mean(0))
    if passed.residual is not None:
        z.add_(passed.residual)
    return Normalised(activate(z, spec.act, passed.slope), mean, second)


def _wide_saved(saved: Saved) -> Saved:
    weight, bias = _wide(saved.weight, saved.bias, saved.source)
    # In nearly all cases nothing changes, and the call of ``_replace`` is saved.
    return saved if weight is saved.weight and bias is saved.bias else saved._replace(weight=weight, bias=bias)


def _normalise(saved: Saved, spec: Spec, out: Tensor | None) -> Tensor:
    """The normalised x, in ``out`` or in new memory.  ``saved`` comes from ``_wide_saved``."""
    x, weight, bias, mean, second, eps = saved.source, saved.weight, saved.bias, saved.mean, saved.second, spec.eps
    assert mean is not None
    running = spec.keeps_variance
    if not running and spec.kind == "group":
        D = len(x) * x.shape[1] // len(mean)
        mean, second = over_channels(mean, D), over_channels(second, D)
    bias = _each(bias, x, spec)
    # Without weight and bias, aten's group norm rounds differently from its batch norm.
    bare = spec.kind == "group" and weight is None and bias is None
    if not running:
        # aten rounds weight / sqrt(var + eps) once.  A variance of 1 and an eps of 0 avoid a second rounding here.
        weight = second if weight is None else second * _each(weight, x, spec)
        second, eps = torch.ones_like(mean), 0.0
    if spec.kind == "batch" and out is None:
        return _as(_batch_norm(_image(x), weight, bias, mean, second, False, 0.0, eps)[0], x)
    out = torch.empty_like(x) if out is None else out
    first = 0
    for xp, yp in zip(_problems(x, spec), _problems(out, spec), strict=True):
        u = slice(first, first := first + xp.shape[1])
        if bare:
            assert weight is not None
            each = (1, -1, *(1,) * (xp.dim() - 2))
            torch.sub(xp, mean[u].view(each), out=yp).mul_(weight[u].view(each))
            continue
        w, b, mu, var = (None if v is None else v[u] for v in (weight, bias, mean, second))
        scale_shift(xp, yp, w, b, mu, var, eps)
    return out


def rebuild(saved: Saved, spec: Spec) -> Tensor:
    """Computes z again, with the same bits as in the forward pass."""
    z = _normalise(_wide_saved(saved), spec, None)
    if saved.residual is not None:
        z.add_(saved.residual)
    return activate(z, spec.act, saved.slope)


def _norm_backward(g: Tensor, saved: Saved, spec: Spec, affine: bool) -> Any:
    """dx, dweight and dbias of the norm alone.

    If a norm of samples is computed as a batch norm, dweight and dbias have one value per channel and sample.
    """
    x, weight, mean, second, eps = saved.source, saved.weight, saved.mean, saved.second, spec.eps
    assert mean is not None
    mask = [True, affine, affine]
    if spec.keeps_variance:
        # A CPU reads the first two of them, CUDA any two.
        running = mean, second, mean, torch.rsqrt(second + eps)
        return _batch_norm_backward(_image(g), _image(x), weight, *running, False, eps, mask)
    if spec.kind == "group":
        N, C = x.shape[:2]
        shape = (N, C, x.numel() // (N * C), spec.groups)
        mean, rstd = (v.view(N, spec.groups) for v in (mean, second))
        g, image = _image(g), _image(x)
        if _off_cpu(x):
            g, image = (t.to(mean.dtype, memory_format=torch.contiguous_format) for t in (g, image))
        dx, *sums = _group_norm_backward(g, image, mean, rstd, weight, *shape, mask)
        return dx.to(x.dtype), *sums
    if spec.kind == "batch":
        own = None, None, mean, second
        return _batch_norm_backward(_image(g), _image(x), weight, *own, True, eps, mask)
    weight = _each(weight, x, spec)
    done = []
    first = 0
    for gp, xp in zip(_problems(g, spec), _problems(x, spec), strict=True):
        u = slice(first, first := first + xp.shape[1])
        w = None if weight is None else weight[u]
        own = None, None, mean[u], second[u]
        done.append(_batch_norm_backward(gp, xp, w, *own, True, eps, mask))
    if len(done) == 1:
        return done[0]
    dx, *sums = zip(*done, strict=True)
    return torch.cat(dx), *(torch.cat(s) if affine else None for s in sums)


def _exchanged(g: Tensor, saved: Saved, spec: Spec, exchange: Exchange) -> Any:
    """dx, dweight and dbias of a batch norm whose sums are replaced by ``exchange`` before dx is computed.

    dweight and dbias are the sums of this process.
    """
    x, weight, mean = saved.source, saved.weight, saved.mean
    assert mean is not None
    rstd = torch.rsqrt(saved.second + spec.eps)
    given = (weight, None, None, mean, rstd, True, spec.eps, [False, True, True])
    _, s2, s1 = _batch_norm_backward(_image(g), _image(x), *given)
    t1, t2 = exchange(s1, s2)
    layout = layout_of(x)
    assert layout is not None
    m = layout.N * layout.S
    # dx = slope (x - mean) + offset + scale g.  This form loses no accuracy if the mean is far from zero.
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


def _whole(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted, buffer: Tensor | None = None) -> Gradients:
    """The gradients, computed in one piece, with ``buffer`` or new memory for y.

    g is written over dz if ``wanted.into`` allows that, otherwise over y.  The gradients of weight, bias and slope may
    have one value per channel and sample.
    """
    affine, exchange = wanted.affine, wanted.exchange
    g, dslope, residual = dz, None, saved.residual
    if not TABLE[spec.act.name].identity:
        y = _normalise(saved, spec, buffer)
        if residual is not None:
            y.add_(residual)
        g, dslope = activation_grad(dz, y, spec.act, saved.slope, y if wanted.into is None else wanted.into)
        # The memory is free before aten allocates dx, for which it takes memory twice.
        del y
    if exchange is None:
        dx, dweight, dbias = _norm_backward(g, saved, spec, affine)
    else:
        dx, dweight, dbias = _exchanged(g, saved, spec, exchange)
    return Gradients(_as(dx, saved.source), dweight, dbias, None if residual is None else g, dslope)


def backward(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted) -> Gradients:
    """The gradients of all inputs.  ``dz`` and the residual have the strides of x.

    With an exchange, which only a batch norm has, y and g are computed in one piece.
    """
    x, slope = saved.source, saved.slope
    saved = _wide_saved(saved)
    if x.nbytes <= WHOLE_BYTES or not x.is_contiguous() or wanted.exchange is not None:
        found = _whole(dz, saved, spec, wanted)
        if spec.kind == "batch":
            return found
    else:
        found = _in_parts(dz, saved, spec, wanted)
    C = x.shape[1]
    # If a norm of samples was computed as a batch norm, these vectors hold one sample after another.
    dweight, dbias = (v if v is None or len(v) <= C else v.view(-1, C).sum(0) for v in (found.dweight, found.dbias))
    dslope = found.dslope
    if slope is not None and dslope is not None and len(dslope) > len(slope):
        dslope = dslope.view(-1, len(slope)).sum(0)
    return Gradients(found.dx, dweight, dbias, found.dresidual, dslope)


def _in_parts(dz: Tensor, saved: Saved, spec: Spec, wanted: Wanted) -> Gradients:
    """The gradients for contiguous planes, computed part by part."""
    x, residual, slope, mean = saved.source, saved.residual, saved.slope, saved.mean
    assert mean is not None
    shape = x.shape if spec.kind == "batch" else (1, -1, *x.shape[2:])
    # Each part of dx is written after that part of dz was read.
    dx = torch.empty_like(x) if wanted.into is None else wanted.into
    wide: dict[str, Any] = {"x": x, "dz": dz, "residual": residual, "dx": dx}
    if residual is not None:
        wide["dresidual"] = torch.empty_like(x)
    wide = {name: None if t is None else t.view(shape) for name, t in wide.items()}
    N, U = wide["x"].shape[:2]
    one_slope = slope is None or len(slope) == 1
    vectors = [_each(v, x, spec) for v in (saved.weight, saved.bias, None if one_slope else slope)]
    D = U // len(mean)
    # A part has at least two groups of channels, so that two threads find work.
    step = max(2, PART_BYTES // (x.nbytes // U) // D) * D
    # All parts share this memory, because allocating memory for each part would cost more than the computation.
    scratch = x.new_empty((2, N * step * (x.numel() // (N * U))))
    sums: list[tuple] = []
    of_part = wanted._replace(into=None)
    parts = [slice(first, min(first + step, U)) for first in range(0, U, step)]
    run = run_of(parts, x)
    for u in run:
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
        found = _whole(dzp, own, part, of_part, buffer)
        wide["dx"][:, u] = found.dx
        if residual is not None:
            wide["dresidual"][:, u] = found.dresidual
        sums.append((found.dweight, found.dbias, found.dslope))
    sums *= -(-len(parts) // len(run))
    dweight, dbias, dslope = (None if v[0] is None else torch.cat(v)[:U] for v in zip(*sums, strict=True))
    dresidual = None if residual is None else wide["dresidual"].view(x.shape)
    return Gradients(wide["dx"].view(x.shape), dweight, dbias, dresidual, dslope)
