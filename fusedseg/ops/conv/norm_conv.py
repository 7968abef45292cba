"""A convolution with the norm before it and the statistics of the norm behind it: ``fusedseg::norm_conv``, for graphs.

    z = phi(weight * (x - mean) * rstd + bias)          z is x if no mean is given
    y = convolution(z, conv_weight) + conv_bias
    found mean and rstd of y, and moved running statistics, if ``finds``

and its gradient ``fusedseg::norm_conv_backward``, over the m values of a statistic:

    dz = gradient of the input of the convolution       dconv_weight and dconv_bias from z, which is computed again
    g = dz * phi'      s1 = sum(g)      s2 = sum(g * (x - mean)) * rstd
    dx = weight * rstd * (g - s1 / m - (x - mean) * rstd * s2 / m)      dweight = sum(s2)      dbias = sum(s1)

Kept for backward: x, mean and rstd; z is never written in forward.  A vendor's kernel computes y from x with the sums
of y - shift and of its square, or g with its two sums (``Kernels``; ``cudnn_graphs.py`` has cuDNN's).  ``MEANING`` is
the same in PyTorch's ops, which stand for the kernels on a CPU.

The statistics are shift + sum / m and squares / m - (sum / m)^2, where the shift is the running mean, or 0 for a norm
without one.  Where the mean lies more than 8 standard deviations from the shift (``FAR``), digits are lost, and a
second pass sums from the mean itself; the device decides that, so that the host does not wait.

On a GPU the vendor's kernels take part in the calls for which a measurement at the first call of a kind finds them
right and faster (``choice.py``).  All other calls run the three ops that stand in a graph without the option.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ... import _backend
from ..._torch import is_listed
from ...activation import TABLE, Activation
from ..check import HALF
from ..layout import FORMATS, dense, is_rows
from ..norm import passes, triton
from ..norm.call import Norm, Operands, OutputGradient, Statistics, move_running, stats_dtype
from ..norm.statistic import BATCH, INSTANCE
from ..registry import graph_op, serve
from . import choice, conv3d

aten = torch.ops.aten
# The activations that the kernels compute, which are linear on both sides of 0.
SLOPES: dict[str, Callable[[float], float]] = {
    "identity": lambda param: 1.0, "relu": lambda param: 0.0, "leaky_relu": lambda param: param,
}  # fmt: skip
# The square of how many standard deviations the mean may lie from the shift: sums in fp32 lose a factor of 65.
FAR = 64.0
# Kernels load 16 bytes of adjacent channels.
STEP_CHANNELS = 8
_WINDOW = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"
_BEFORE = "Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? rstd, Tensor conv_weight"
_ACT = "str activation, float activation_param, bool of_samples"
ARGUMENTS = (
    f"{_BEFORE}, Tensor? conv_bias, Tensor? running_mean, Tensor? running_var, {_ACT}, {_WINDOW}, "
    "bool finds, float eps, float momentum, bool finds_of_samples"
)
_OF_GRADIENT = f"Tensor dy, {_BEFORE}, {_ACT}, {_WINDOW}, bool affine, bool of_weight, bool of_conv_bias"
# The place of the running mean among the arguments.
RUNNING_MEAN = 7


class Window(NamedTuple):
    """The geometry of a convolution without groups."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def arguments(self) -> conv3d.Arguments:
        return conv3d.Arguments(*self, False, [0] * len(self.stride), 1)


class Before(NamedTuple):
    """The norm before a convolution, and the weight of the convolution; there is no norm if ``mean`` is None."""

    x: Any
    weight: Any
    bias: Any
    mean: Any
    rstd: Any
    conv_weight: Any

    @classmethod
    def on_dense(cls, x: Tensor, *others: Any) -> "Before":
        return cls(dense(x)[0], *others)

    def z(self, norm: Norm) -> Tensor:
        """What the convolution reads."""
        if self.mean is None:
            return self.x
        return passes.recompute(Operands(self.x, self.weight, self.bias), Statistics(self.mean, self.rstd), norm)


class NormConv(NamedTuple):
    """The arguments of the op: tensors, or in a graph the nodes of tensors, from which ``arguments`` are written.

    norm: of the norm before, its activation and its statistic.
    after: of the norm behind, eps, momentum and its statistic; None if nothing is found.
    """

    before: Before
    conv_bias: Any
    running_mean: Any
    running_var: Any
    norm: Norm
    window: Window
    after: Norm | None

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "NormConv":
        conv_bias, *running = call[6:9]
        finds, eps, momentum, of_samples = call[15:]
        after = norm_of("identity", 0.0, of_samples, eps, momentum) if finds else None
        norm, window = norm_of(*call[9:12]), Window(*call[12:15])
        return cls._make([Before.on_dense(*call[:6]), conv_bias, *running, norm, window, after])

    @property
    def arguments(self) -> tuple[Any, ...]:
        before, *others, norm, window, after = self
        found = (False, 0.0, 0.0, False) if after is None else (True, after.eps, after.momentum, after.over.of_samples)
        return *before, *others, *norm.act, norm.over.of_samples, *map(list, window), *found


class NormConvGradient(NamedTuple):
    """The arguments of the gradient; ``affine``, ``of_weight`` and ``of_conv_bias`` say which others are wanted."""

    dy: Any
    before: Before
    norm: Norm
    window: Window
    affine: bool
    of_weight: bool
    of_conv_bias: bool

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "NormConvGradient":
        return cls(call[0], Before.on_dense(*call[1:7]), norm_of(*call[7:10]), Window(*call[10:13]), *call[13:])

    @property
    def arguments(self) -> tuple[Any, ...]:
        dy, before, norm, window, *wanted = self
        return dy, *before, *norm.act, norm.over.of_samples, *map(list, window), *wanted


def norm_of(name: str, param: float, of_samples: bool, eps: float = 0.0, momentum: float = 0.0) -> Norm:
    return Norm("input", Activation(name, param), eps, momentum, over=INSTANCE if of_samples else BATCH)


class Kernels(Protocol):
    """The kernels of a vendor, or PyTorch's ops.  Sums are (2, values of a statistic), in the dtype of statistics."""

    def serves(self, call: "NormConv | NormConvGradient") -> bool:
        """Whether there are kernels for a call, which may take seconds to find out."""
        ...

    def forward(self, call: NormConv) -> tuple[Tensor, Tensor | None]:
        """y, and the sums of y - shift and of its square if ``call.after`` is given."""
        ...

    def input_gradient(self, call: NormConvGradient) -> tuple[Tensor, Tensor]:
        """g, and the sums of g and of g * (x - mean)."""
        ...


def each(v: Tensor, x: Tensor, norm: Norm) -> Tensor:
    """A value for each statistic of x, or for each channel, so that it can be multiplied with x."""
    return v.view(-1 if norm.over.of_samples and v.numel() > x.shape[1] else 1, x.shape[1], *[1] * (x.dim() - 2))


def _sums(v: Tensor, also: Tensor, norm: Norm) -> Tensor:
    """The sums of v and of v * also over each statistic."""
    over = [d for d in range(v.dim()) if d != 1 and not (d == 0 and norm.over.of_samples)]
    return torch.stack([v.sum(over).flatten(), (v * also).sum(over).flatten()])


class _Meaning:
    """``Kernels`` in PyTorch's ops."""

    def serves(self, call: NormConv | NormConvGradient) -> bool:
        return True

    def forward(self, call: NormConv) -> tuple[Tensor, Tensor | None]:
        weight, window = call.before.conv_weight, call.window
        y = torch.convolution(call.before.z(call.norm), weight, call.conv_bias, *window.arguments)
        if call.after is None:
            return y, None
        d = y.to(stats_dtype(y))
        d = d if call.running_mean is None else d - each(call.running_mean, y, call.after)
        return y, _sums(d, d, call.after)

    def input_gradient(self, call: NormConvGradient) -> tuple[Tensor, Tensor]:
        x, weight, bias, mean, rstd, _ = call.before
        wide, act = stats_dtype(x), call.norm.act
        centred = x.to(wide) - each(mean, x, call.norm)
        scale = rstd if weight is None else rstd.view(-1, x.shape[1]) * weight
        normed = centred * each(scale.flatten(), x, call.norm)
        normed = normed if bias is None else normed + each(bias, x, call.norm)
        g = TABLE[act.name].grad(_input_gradient(call).to(wide), normed, act.param, normed)
        assert isinstance(g, Tensor)
        return g.to(x.dtype), _sums(g, centred, call.norm)


MEANING = _Meaning()
# The kernels of a GPU, which their file puts here.
VENDORS: list[Kernels] = []


def _input_gradient(call: NormConvGradient) -> Tensor:
    # Of x it reads the shape and the strides.
    given = call.dy, call.before.x, call.before.conv_weight, None, *call.window.arguments, [True, False, False]
    dz, _, _ = conv3d.convolution_backward(*given)
    assert dz is not None
    return dz


def _parameter_gradients(call: NormConvGradient, z: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the weight and the bias of the convolution."""
    w, mask = call.before.conv_weight, [False, call.of_weight, call.of_conv_bias]
    _, *found = aten.convolution_backward(call.dy, z, w, [w.shape[0]], *call.window.arguments, mask)
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
        return passes.statistics(y, norm, *running)
    found = [passes.statistics(sample, norm, None, None) for sample in y.split(1)]
    return torch.cat([mean for mean, _ in found]), torch.cat([rstd for _, rstd in found])


def _forward(call: NormConv, kernels: Kernels | None, moving: bool) -> tuple[Tensor | None, ...]:
    """The results by these kernels, or by the ops of a graph without them."""
    after, sums = call.after, None
    if kernels is None:
        z = call.before.z(call.norm)
        y = conv3d.convolution(z, call.before.conv_weight, call.conv_bias, *call.window.arguments)
    else:
        y, sums = kernels.forward(call)
    if after is None:
        return y, *(None,) * 4
    mean, var = (v if v is None or moving else v.clone() for v in (call.running_mean, call.running_var))
    found = _statistics(y, after, (mean, var)) if sums is None else statistics_of_sums(y, sums, after, (mean, var))
    return y, *found, *((None, None) if moving else (mean, var))


def _backward(call: NormConvGradient, kernels: Kernels | None) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd, _ = call.before
    norm = call.norm
    of_parameters: tuple[Tensor | None, Tensor | None] = (None, None)
    if call.of_weight or call.of_conv_bias:
        # z is gone before dz is allocated.
        of_parameters = _parameter_gradients(call, call.before.z(norm))
    given_to_norm, statistics = Operands(x, weight, bias), Statistics(mean, rstd)
    needs = (True, call.affine and weight is not None, call.affine and bias is not None, False, False)
    if kernels is None:
        dz = _input_gradient(call)
        incoming = OutputGradient(dz, dz if passes.fits(dz, x, norm) else None)
        found = passes.backward(incoming, given_to_norm, statistics, norm, None, needs)
    else:
        g, (s1, products) = kernels.input_gradient(call)
        found = passes.backward_of_sums(g, given_to_norm, statistics, norm, torch.stack([s1, products * rstd]), needs)
    dx, dweight, dbias, *_ = found.wanted(needs)
    return dx, dweight, dbias, *of_parameters


class Kind(NamedTuple):
    """The kind of a call.  Calls of equal kinds share a measurement.

    tensors: the dtype, the shape and the strides of each tensor; None for no tensor.
    benchmark: a setting of the user for the vendor's library.
    """

    what: str
    device: str
    tensors: tuple[Any, ...]
    norm: Norm
    window: tuple[tuple[int, ...], ...]
    after: Norm | None
    benchmark: bool


# Whether the vendor's kernels compute a kind of call at all.
_served: dict[Kind, bool] = {}


def _kernels(
    call: NormConv | NormConvGradient, run: Callable[[Kernels | None], tuple[Tensor | None, ...]]
) -> Kernels | None:
    """The kernels that compute a call; None for the ops of a graph without them.  ``run`` computes it by either."""
    x = call.before.x
    if not _backend.on_gpu(x):
        return MEANING
    if choice.must_repeat() or is_listed(x):
        return None
    (vendor,) = VENDORS
    others = (call.conv_bias, call.running_mean) if isinstance(call, NormConv) else (call.dy,)
    kind = Kind(
        what=type(call).__name__,
        device=choice.device_name(x.device),
        tensors=tuple(t if t is None else (t.dtype, t.shape, t.stride()) for t in (*call.before, *others)),
        norm=call.norm,
        window=tuple(map(tuple, call.window)),
        after=call.after if isinstance(call, NormConv) else None,
        benchmark=torch.backends.cudnn.benchmark,
    )
    if kind not in _served:
        if torch.cuda.is_current_stream_capturing():
            return None
        _served[kind] = vendor.serves(call)
    if not _served[kind]:
        return None

    def results(by: str) -> tuple[Tensor, ...]:
        return tuple(v for v in run(vendor if by == "triton" else None) if v is not None)

    record = choice.recorded(kind, x, results)
    return vendor if record is not None and record.choice == "triton" else None


def norm_conv(*arguments: Any, moving: bool = False) -> tuple[Tensor | None, ...]:
    """The results of the op.  None stands for what is not found, and for what moved where it is."""
    call = NormConv.of_arguments(arguments)
    return _forward(call, _kernels(call, partial(_forward, call, moving=False)), moving)


def norm_conv_moving(*arguments: Any) -> tuple[Tensor | None, ...]:
    """``norm_conv``, which moves the running statistics where they are."""
    return norm_conv(*arguments, moving=True)


def norm_conv_backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    """The results of the gradient; None stands for what is not wanted."""
    call = NormConvGradient.of_arguments(arguments)
    return _backward(call, _kernels(call, partial(_backward, call)))


def _whole(results: Sequence[Tensor | None], x: Tensor) -> tuple[Tensor, ...]:
    """The results of an op, which cannot return None: an empty tensor stands for it."""
    return tuple(x.new_empty(0) if v is None else v for v in results)


def _run(*arguments: Any) -> tuple[Tensor, ...]:
    return _whole(norm_conv(*arguments), arguments[0])


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _whole(norm_conv_backward(*arguments), arguments[0])


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    before, conv_bias, *running, _, window, after = NormConv.of_arguments(arguments)
    y = torch.convolution(before.x, before.conv_weight, conv_bias, *window.arguments)
    if after is None:
        return _whole((y, *(None,) * 4), y)
    found = (y.new_empty(after.over.count(y), dtype=stats_dtype(y)) for _ in range(2))
    return _whole((y, *found, *(None if v is None else torch.empty_like(v) for v in running)), y)


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call = NormConvGradient.of_arguments(arguments)
    x, weight, bias, *_ = call.before
    affine = (weight, bias) if call.affine else (None, None)
    like_each = (None if v is None else torch.empty_like(v) for v in (x, *affine))
    return _whole((*like_each, *_parameter_gradients(call, x)), x)


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
    _run,
    _fake,
    row={"reads": "exact", "cheap": False, "statistics": 1, "images": (0,)},
    flexible=True,
)
norm_conv_backward_op = graph_op(
    f"norm_conv_backward({_OF_GRADIENT}) -> {RESULTS}",
    _run_backward,
    _fake_backward,
    row={"reads": "exact", "cheap": False, "dense": True, "images": (0, 1)},
    flexible=True,
)
# A measurement chooses who computes, so that no call is replayed.
serve(norm_conv_op, norm_conv, replayed=False)
serve(norm_conv_backward_op, norm_conv_backward, replayed=False)
