"""A convolution with the norm before it and the statistics of the norm behind it: ``fusedseg::norm_conv``, for graphs.

    z = phi(weight * (x - mean) * rstd + bias)          z is x if no mean is given
    y = convolution(z, conv_weight) + conv_bias
    found mean and rstd of y, and moved running statistics, if ``finds``

and its gradient ``fusedseg::norm_conv_backward``, over the m values of a statistic:

    dz = gradient of the input of the convolution       dconv_weight and dconv_bias from z, which is computed again
    g = dz * phi'      s1 = sum(g)      s2 = sum(g * (x - mean)) * rstd
    dx = weight * rstd * (g - s1 / m - (x - mean) * rstd * s2 / m)      dweight = sum(s2)      dbias = sum(s1)

Kept for backward: x, mean and rstd; z is never written in forward.  A vendor's kernel computes y from x with the sums
of y - shift and of its square, or g with its two sums (``Kernels``; ``cudnn_graphs.py`` has cuDNN's).  ``meaning`` is
the same in PyTorch's ops, which stand for the kernels on a CPU.

The statistics are shift + sum / m and squares / m - (sum / m)^2, where the shift is the running mean, or 0 for a norm
without one.  Where the mean lies more than 8 standard deviations from the shift (``FAR``), digits are lost, and a
second pass sums from the mean itself; the device decides that, so that the host does not wait.

On a GPU the vendor's kernels take part in the calls for which a measurement at the first call of a kind finds them
right and faster (``choice.py``).  All other calls run the three ops that stand in a graph without the option.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import _backend
from ..._torch import is_listed
from ...activation import TABLE, Activation
from ..check import HALF
from ..layout import FORMATS, dense, is_rows
from ..norm import dispatch, triton
from ..norm.call import BackwardCall, Norm, Operands, Statistics, move_running, stats_dtype
from ..norm.statistic import Statistic
from ..registry import graph_op, serve, whole
from . import choice, conv3d
from .geometry import Geometry

aten = torch.ops.aten
# The activations that the kernels compute, which are linear on both sides of 0.
SLOPES: dict[str, Callable[[float], float]] = {
    "identity": lambda param: 1.0, "relu": lambda param: 0.0, "leaky_relu": lambda param: param,
}  # fmt: skip
# The square of how many standard deviations the mean may lie from the shift: sums in fp32 lose a factor of 65.
FAR = 64.0
# Kernels load 16 bytes of adjacent channels.
STEP_CHANNELS = 8
# The arguments that the op and its gradient share, and their number.
_SHARED = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, Tensor conv_weight, str activation, "
    "float activation_param, bool of_samples, SymInt[] stride, SymInt[] padding, SymInt[] dilation"
)
_SHARED_COUNT = 12
ARGUMENTS = (
    f"{_SHARED}, Tensor? conv_bias, Tensor? running_mean, Tensor? running_var, bool finds, float eps, "
    "float momentum, bool finds_of_samples"
)
_OF_GRADIENT = f"Tensor dy, {_SHARED}, bool affine, bool of_weight, bool of_conv_bias"
# The place of the running mean among the arguments.
RUNNING_MEAN = 13


class NormConv(NamedTuple):
    """The arguments of the op, or of its gradient: tensors, or in a graph the nodes of tensors.

    x, weight, bias, mean, rstd, norm: of the norm before; there is none if ``mean`` is None.
    geometry: of the convolution, which has no groups.
    conv_bias, running_mean, running_var, after: of the op alone.  ``after`` has eps, momentum and the statistic of the
        norm behind; None if nothing is found.
    dy, wanted: of the gradient alone.  ``wanted`` says whether the gradients of the norm's parameters, of the weight
        and of the bias of the convolution are asked for; that of x always is.
    """

    x: Any
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    conv_weight: Any
    norm: Norm
    geometry: Geometry
    conv_bias: Any = None
    running_mean: Any = None
    running_var: Any = None
    after: Norm | None = None
    dy: Any = None
    wanted: tuple[bool, bool, bool] = (False, False, False)

    @classmethod
    def _of_shared(cls, call: Sequence[Any], **more: Any) -> "NormConv":
        x, weight, bias, mean, rstd, w = call[:6]
        stride, padding, dilation = map(tuple, call[9:_SHARED_COUNT])
        geometry = Geometry(stride, padding, dilation, groups=1)
        return cls(dense(x)[0], weight, bias, mean, rstd, w, norm_of(*call[6:9]), geometry, **more)

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "NormConv":
        conv_bias, mean, var, finds, eps, momentum, of_samples = call[_SHARED_COUNT:]
        after = norm_of("identity", 0.0, of_samples, eps, momentum) if finds else None
        return cls._of_shared(call, conv_bias=conv_bias, running_mean=mean, running_var=var, after=after)

    @classmethod
    def of_gradient(cls, call: Sequence[Any]) -> "NormConv":
        dy, *shared = call
        return cls._of_shared(shared, dy=dy, wanted=tuple(shared[_SHARED_COUNT:]))

    @property
    def arguments(self) -> tuple[Any, ...]:
        norm, after = self.norm, self.after
        shared = *self[:6], *norm.act, norm.over.of_samples, *map(list, self.geometry[:3])
        if self.dy is not None:
            return self.dy, *shared, *self.wanted
        found = (False, 0.0, 0.0, False) if after is None else (True, after.eps, after.momentum, after.over.of_samples)
        return *shared, self.conv_bias, self.running_mean, self.running_var, *found

    def z(self) -> Tensor:
        """What the convolution reads."""
        if self.mean is None:
            return self.x
        given, statistics = Operands(self.x, self.weight, self.bias), Statistics(self.mean, self.rstd)
        return dispatch.recompute(given, statistics, self.norm)


def norm_of(name: str, param: float, of_samples: bool, eps: float = 0.0, momentum: float = 0.0) -> Norm:
    return Norm("input", Activation(name, param), eps, momentum, over=Statistic(of_samples))


# Kernels of a vendor, or PyTorch's ops: y, and the sums of y - shift and of its square if ``after`` is given; of the
# gradient g, and the sums of g and of g * (x - mean).  Sums are (2, values of a statistic), in the dtype of statistics.
# Raises ``choice.Unserved`` for a call for which there are no kernels.
Kernels = Callable[[NormConv], tuple[Tensor, Tensor | None]]
# The kernels of a GPU, which their file puts here.
VENDORS: list[Kernels] = []


def each(v: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """A value for each statistic of x, or for each channel, so that it can be multiplied with x."""
    return v.view(-1 if norm.over.of_samples and v.numel() > x.shape[1] else 1, x.shape[1], *[1] * (x.dim() - 2))


def _sums(v: Tensor, also: Tensor, norm: Norm) -> Tensor:
    """The sums of v and of v * also over each statistic."""
    over = [d for d in range(v.dim()) if d != 1 and not (d == 0 and norm.over.of_samples)]
    return torch.stack([v.sum(over).flatten(), (v * also).sum(over).flatten()])


def meaning(call: NormConv) -> tuple[Tensor, Tensor | None]:
    """``Kernels`` in PyTorch's ops."""
    if call.dy is not None:
        return _meaning_of_gradient(call)
    y = torch.convolution(call.z(), call.conv_weight, call.conv_bias, *call.geometry.arguments)
    if call.after is None:
        return y, None
    d = y.to(stats_dtype(y))
    d = d if call.running_mean is None else d - each(call.running_mean, y, call.after)
    return y, _sums(d, d, call.after)


def _meaning_of_gradient(call: NormConv) -> tuple[Tensor, Tensor]:
    x, weight, bias, mean, rstd = call[:5]
    wide, act = stats_dtype(x), call.norm.act
    centred = x.to(wide) - each(mean, x, call.norm)
    scale = rstd if weight is None else rstd.view(-1, x.shape[1]) * weight
    normed = centred * each(scale.flatten(), x, call.norm)
    normed = normed if bias is None else normed + each(bias, x, call.norm)
    g = TABLE[act.name].grad(_input_gradient(call).to(wide), normed, act.param, normed)
    assert isinstance(g, Tensor)
    return g.to(x.dtype), _sums(g, centred, call.norm)


def _input_gradient(call: NormConv) -> Tensor:
    # Of x it reads the shape and the strides.
    given = call.dy, call.x, call.conv_weight, None, *call.geometry.arguments, [True, False, False]
    dz, _, _ = conv3d.convolution_backward(*given)
    assert dz is not None
    return dz


def _parameter_gradients(call: NormConv, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weight and the bias of the convolution."""
    w, (_, *mask) = call.conv_weight, call.wanted
    _, *found = aten.convolution_backward(call.dy, z, w, [w.shape[0]], *call.geometry.arguments, [False, *mask])
    return tuple(found)


def statistics_of_sums(
    y: Tensor, sums: Tensor, norm: Norm, running: tuple[Tensor | None, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """The mean and rstd of y from the sums of y - shift; it moves the running statistics, whose mean is the shift."""
    if _backend.use_triton(y, triton.SUMS_FAMILY) and is_rows(y):
        return triton.statistics_of_sums(y, sums, norm, running, FAR)
    m, shift = y.numel() // sums.shape[1], running[0]

    def moments(sums: Tensor, shift: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
        offset, square = sums / m
        var = square - offset * offset
        return shift + offset, var, offset * offset <= FAR * var

    mean, var, near = moments(sums, 0.0 if shift is None else shift.to(sums.dtype))
    d = y.to(sums.dtype) - each(mean, y, norm)
    again, var_again, _ = moments(_sums(d, d, norm), mean)
    mean, var = torch.where(near, mean, again), torch.where(near, var, var_again)
    move_running(Operands(y, running_mean=shift, running_var=running[1]), norm, mean, var, m)
    return mean, (var + norm.eps).rsqrt()


def _statistics(y: Tensor, norm: Norm, running: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """The mean and rstd of y in a pass over y; it moves the running statistics."""
    if not norm.over.of_samples:
        return dispatch.statistics(y, norm, *running)
    found = [dispatch.statistics(sample, norm, None, None) for sample in y.split(1)]
    return torch.cat([mean for mean, _ in found]), torch.cat([rstd for _, rstd in found])


def _forward(call: NormConv, kernels: Kernels | None, moving: bool = False) -> tuple[Tensor | None, ...]:
    """The results by these kernels, or by the ops of a graph without them."""
    after, sums = call.after, None
    if kernels is None:
        y = conv3d.convolution(call.z(), call.conv_weight, call.conv_bias, *call.geometry.arguments)
    else:
        y, sums = kernels(call)
    if after is None:
        return y, *(None,) * 4
    mean, var = (v if v is None or moving else v.clone() for v in (call.running_mean, call.running_var))
    found = _statistics(y, after, (mean, var)) if sums is None else statistics_of_sums(y, sums, after, (mean, var))
    return y, *found, *((None, None) if moving else (mean, var))


def _backward(call: NormConv, kernels: Kernels | None) -> tuple[Tensor | None, ...]:
    (x, weight, bias, mean, rstd), norm, (affine, *others) = call[:5], call.norm, call.wanted
    of_parameters: tuple[Tensor | None, Tensor | None] = (None, None)
    if any(others):
        # z is gone before dz is allocated.
        of_parameters = _parameter_gradients(call, call.z())
    of_norm = Operands(x, weight, bias), Statistics(mean, rstd), norm, None
    needs = (True, affine and weight is not None, affine and bias is not None, False, False)
    if kernels is None:
        dz = _input_gradient(call)
        found = dispatch.backward(BackwardCall(dz, *of_norm, needs, dz if dispatch.fits(dz, x, norm) else None))
    else:
        g, sums = kernels(call)
        assert sums is not None
        sums = torch.stack([sums[0], sums[1] * rstd])
        found = dispatch.backward_of_sums(BackwardCall(g, *of_norm, needs), sums)
    dx, dweight, dbias, *_ = found.wanted(needs)
    return dx, dweight, dbias, *of_parameters


def _kernels(call: NormConv) -> Kernels | None:
    """The kernels that compute a call; None for the ops of a graph without them."""
    x = call.x
    if not _backend.on_gpu(x):
        return meaning
    if is_listed(x):
        return None
    (vendor,) = VENDORS

    def results(by: str) -> tuple[Tensor, ...]:
        kernels = vendor if by == "triton" else None
        found = _forward(call, kernels) if call.dy is None else _backward(call, kernels)
        return tuple(v for v in found if v is not None)

    tensors = (*call[:6], call.conv_bias, call.running_mean, call.dy)
    forms = tuple(None if t is None else (t.dtype, t.shape, t.stride()) for t in tensors)
    what, others = "norm_conv" if call.dy is None else "norm_conv_backward", (call.norm, call.geometry, call.after)
    return vendor if choice.is_faster(what, x, results, tensors=forms, others=others) else None


def norm_conv(*arguments: Any, moving: bool = False) -> tuple[Tensor | None, ...]:
    """The results of the op.  None stands for what is not found, and for what moved where it is."""
    call = NormConv.of_arguments(arguments)
    return _forward(call, _kernels(call), moving)


def norm_conv_moving(*arguments: Any) -> tuple[Tensor | None, ...]:
    """``norm_conv``, which moves the running statistics where they are."""
    return norm_conv(*arguments, moving=True)


def norm_conv_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The results of the gradient; None stands for what is not wanted."""
    call = NormConv.of_gradient(arguments)
    return _backward(call, _kernels(call))


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = NormConv.of_arguments(arguments)
    y = torch.convolution(call.x, call.conv_weight, call.conv_bias, *call.geometry.arguments)
    if call.after is None:
        return whole((y, *(None,) * 4), y)
    found = (y.new_empty(call.after.over.count(y), dtype=stats_dtype(y)) for _ in range(2))
    moved = (None if v is None else torch.empty_like(v) for v in (call.running_mean, call.running_var))
    return whole((y, *found, *moved), y)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call = NormConv.of_gradient(arguments)
    affine = (call.weight, call.bias) if call.wanted[0] else (None, None)
    like_each = (None if v is None else torch.empty_like(v) for v in (call.x, *affine))
    return whole((*like_each, *_parameter_gradients(call, call.x)), call.x)


def fits(x: Tensor, conv_weight: Tensor, act: Activation) -> bool:
    """Whether the kernels may serve such tensors, which are known when a graph is compiled.

    On a GPU they compute images in half precision and in channels_last.  PyTorch's ops stand for them on a CPU.
    """
    if act.name not in SLOPES or x.dtype != conv_weight.dtype or x.dim() not in FORMATS or not x.numel():
        return False
    aligned = x.shape[1] % STEP_CHANNELS == conv_weight.shape[0] % STEP_CHANNELS == 0
    return not _backend.on_gpu(x) or (x.dtype in HALF and is_rows(x) and aligned)


RESULTS = f"({', '.join(['Tensor'] * 5)})"
norm_conv_op = graph_op(
    f"norm_conv({ARGUMENTS}) -> {RESULTS}",
    lambda *arguments: whole(norm_conv(*arguments), arguments[0]),
    _fake,
    row={"reads": "exact", "cheap": False, "statistics": 1, "bounded": True, "images": (0,)},
    flexible=True,
)
norm_conv_backward_op = graph_op(
    f"norm_conv_backward({_OF_GRADIENT}) -> {RESULTS}",
    lambda *arguments: whole(norm_conv_backward(*arguments), arguments[0]),
    _fake_backward,
    row={"reads": "exact", "cheap": False, "dense": True, "images": (0, 1)},
    flexible=True,
)
# A measurement chooses who computes, so that no call is replayed.
serve(norm_conv_op, norm_conv, replayed=False)
serve(norm_conv_backward_op, norm_conv_backward, replayed=False)
