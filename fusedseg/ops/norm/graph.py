"""The norm op of compiled graphs, ``fusedseg::norm``, and its gradient: norm, residual and activation in one call.

    z, mean, rstd, running_mean, running_var, xhat, share = norm(x, weight, bias, residual, running_mean, ...)

computes z = phi(weight * (x - mean) * rstd + bias [+ residual]).  The mean and the rstd are found from x; given among
the arguments, they are used as they are, which is how backward computes z again.  In eval mode the running statistics
stand in their place.  The op keeps the memory format of x.  Of its results, those that a call does not have are empty:
``mean`` is one of a norm that keeps its input, ``xhat`` one of kept channels (``kept.py``), and ``share`` one of the
statistics of all processes (``call.py``).

The op changes no argument: it returns moved copies of the running statistics.  Generated code calls ``Forward`` and
``Backward``, which may also write over an argument that nobody reads again, or move the running statistics where they
are.  ``NormCall`` and ``GradientCall`` name the arguments; nothing else knows their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import getcallargs
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...activation import IDENTITY, TABLE, Activation
from ..double_backward import refused
from ..layout import dense, like
from ..registry import graph_op, whole
from . import dispatch
from .call import BackwardCall, Norm, Operands, Statistics, cast, stats_dtype
from .kept import Kept
from .statistic import SCHEMA, Statistic
from .stock import OF_FUNCTION

# The arguments of ``flat`` in a schema.
_SPEC = (
    f"str keep, str activation, float activation_param, float eps, float momentum, bool own, {SCHEMA}, "
    "str? process_group"
)
# The arguments of the op, and of its gradient.
ARGUMENTS = (
    "Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? running_mean, Tensor? running_var, "
    f"Tensor? mean, Tensor? rstd, Tensor? slope, Tensor? slots, {_SPEC}, SymInt kept_count"
)
_OF_GRADIENT = (
    "Tensor dz, Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? mean, Tensor second, Tensor? slope, "
    f"Tensor? slots, Tensor? xhat, Tensor? share, {_SPEC}, SymInt kept_count, bool affine, bool of_residual"
)
# The place of the running mean, which has moved, among the results of the op; the variance follows.
RUNNING_MEAN = 3
# The tensors that a prepared call of the op, and of its gradient, is given.
_TENSORS, _OF_BACKWARD = 8, 7


def flat(norm: Norm) -> tuple[Any, ...]:
    """What the op computes, as arguments after the tensors."""
    keep, act, eps, momentum, own, over, process_group = norm
    return keep, *act, eps, momentum, own, *over, process_group


def norm_of(keep: str, name: str, param: float, *others: Any) -> Norm:
    """The norm of the arguments of ``flat``."""
    eps, momentum, own, *over, process_group = others
    return Norm(keep, Activation(name, param), eps, momentum, own, Statistic(*over), process_group)


def is_plain(norm: Norm) -> bool:
    """Whether a norm keeps its input and has neither learned slopes nor statistics of other processes.

    Passes over graphs look at these.  Others never run again: one that keeps its output has nothing to recompute, and
    a synchronised one must not communicate again.
    """
    return norm.keep == "input" and norm.process_group is None and not TABLE[norm.act.name].learned


class NormCall(NamedTuple):
    """The arguments of the op by their names: tensors, or in a graph the nodes of tensors; None for no tensor."""

    norm: Norm
    x: Any
    weight: Any = None
    bias: Any = None
    residual: Any = None
    running_mean: Any = None
    running_var: Any = None
    mean: Any = None
    rstd: Any = None
    slope: Any = None
    slots: Any = None
    kept_count: Any = 0

    @classmethod
    def of(cls, node: object) -> "NormCall | None":
        """The call of a node of a graph, as the op or prepared, of a plain norm; None for other nodes."""
        if not isinstance(node, fx.Node):
            return None
        if isinstance(node.target, Forward):
            return cls(node.target.norm, *node.args)
        found = cls.of_arguments(node.args) if node.target is norm_op else None
        return found if found is not None and is_plain(found.norm) else None

    @classmethod
    def captured(cls, node: fx.Node) -> "NormCall | None":
        """The call of a node of a captured graph, of the op or of a norm of PyTorch; None for other nodes.

        Its numbers may be nodes of the graph.
        """
        function: Any = node.target
        if function is norm_op:
            return cls.of_arguments(node.args)
        if node.op != "call_function" or function not in OF_FUNCTION:
            return None
        kind = OF_FUNCTION[function]
        given: dict[str, Any] = getcallargs(kind.function, *node.args, **node.kwargs)
        own = not kind.own or given[kind.own]
        over = kind.over(given.get("num_groups"))
        norm = Norm("input", IDENTITY, given["eps"], given.get("momentum", 0.0), own, over)
        vectors = (given.get(name) for name in ("weight", "bias", "residual", "running_mean", "running_var"))
        return cls(norm, given["input"], *vectors)

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "NormCall":
        *others, kept_count = call
        return cls._make([norm_of(*others[10:]), *others[:10], kept_count])

    @property
    def of_samples(self) -> bool:
        """Whether each sample has statistics of its own."""
        return self.norm.over.of_samples

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What ``Forward`` is called with."""
        return self[1 : 1 + _TENSORS]

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the op."""
        return *self[1:-1], *flat(self.norm), self.kept_count

    @property
    def reads(self) -> tuple[Any, ...]:
        """What z is computed from where the statistics are known: x, weight, bias, residual, and two vectors."""
        known = (self.mean, self.rstd) if self.norm.own else (self.running_mean, self.running_var)
        return self.x, self.weight, self.bias, self.residual, *known

    def with_act(self, act: Activation) -> "NormCall":
        return self._replace(norm=self.norm._replace(act=act))


class GradientCall(NamedTuple):
    """The arguments of the gradient by their names, as ``NormCall`` has those of the op.

    affine, of_residual: whether the gradients of weight and bias, and that of the residual, are wanted.
    x: the tensor that was kept, as in ``Operands``.
    second: the rstd; the running variance of a norm that keeps its input in eval mode, whose ``mean`` is the running
        mean.
    also: a second gradient of z, which only a prepared call has.
    """

    norm: Norm
    affine: bool
    of_residual: bool
    dz: Any
    x: Any
    weight: Any
    bias: Any
    residual: Any
    mean: Any
    second: Any
    also: Any = None
    slope: Any = None
    slots: Any = None
    xhat: Any = None
    share: Any = None
    kept_count: Any = 0

    @classmethod
    def of(cls, node: object) -> "GradientCall | None":
        """The call of a node of a graph, as the op or prepared, of a plain norm; None for other nodes."""
        if not isinstance(node, fx.Node):
            return None
        if isinstance(node.target, Backward):
            of = node.target
            return cls(of.norm, of.affine, of.of_residual, *node.args)
        found = cls.of_arguments(node.args) if node.target is norm_backward_op else None
        return found if found is not None and is_plain(found.norm) else None

    @classmethod
    def of_arguments(cls, call: Sequence[Any]) -> "GradientCall":
        *others, kept_count, affine, of_residual = call
        norm = norm_of(*others[_OF_BACKWARD + 4 :])
        more = others[_OF_BACKWARD : _OF_BACKWARD + 4]
        return cls._make([norm, affine, of_residual, *others[:_OF_BACKWARD], None, *more, kept_count])

    @property
    def tensors(self) -> tuple[Any, ...]:
        """What ``Backward`` is called with."""
        return *self[3 : 3 + _OF_BACKWARD], *(() if self.also is None else (self.also,))

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the gradient."""
        tensors = (*self[3 : 3 + _OF_BACKWARD], self.slope, self.slots, self.xhat, self.share)
        return *tensors, *flat(self.norm), self.kept_count, self.affine, self.of_residual

    @property
    def reads(self) -> tuple[Any, ...]:
        """What z was computed from."""
        return self.x, self.weight, self.bias, self.residual, self.mean, self.second

    def with_act(self, act: Activation) -> "GradientCall":
        return self._replace(norm=self.norm._replace(act=act))


@dataclass(frozen=True)
class Forward:
    """The op with all that does not change between its calls, which generated code makes once, for a plain norm.

    It is called with ``NormCall.tensors``, and returns the results of the op; None stands for what is not computed.

    over: z is written over x.
    moving: the running statistics move where they are, and are not returned.
    """

    norm: Norm
    over: bool = False
    moving: bool = False

    @property
    def __name__(self) -> str:
        """The name in the text of generated code."""
        return f"norm{'_moving' * self.moving}{'_over' * self.over}"

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return _forward(NormCall(self.norm, *tensors), self.over, self.moving)


@dataclass(frozen=True)
class Backward:
    """The gradient with all that does not change between its calls, as ``Forward`` is for the op.

    It is called with ``GradientCall.tensors``.

    over: the gradient of x is written over dz.
    over_also: the gradient of the residual may be written over ``also``.
    """

    norm: Norm
    affine: bool
    of_residual: bool
    over: bool = False
    over_also: bool = False

    @property
    def __name__(self) -> str:
        """The name in the text of generated code."""
        return f"norm_backward{'_over' * self.over}"

    def __call__(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(GradientCall(self.norm, self.affine, self.of_residual, *tensors), self.over, self.over_also)


def _kept(call: NormCall | GradientCall) -> Kept | None:
    return None if call.slots is None else Kept(call.slots, call.kept_count)


def _found(x: Tensor, mean: Tensor | None, rstd: Tensor, *more: Tensor | None) -> Statistics:
    wide = stats_dtype(x)
    # The running mean of eval mode may be a column of a matrix, and kernels read adjacent elements.
    mean = None if mean is None else cast(mean, wide).contiguous()
    return Statistics(mean, cast(rstd, wide), *more)


def _forward(call: NormCall, over: bool = False, moving: bool = False) -> tuple[Tensor | None, ...]:
    norm, residual, (x, _) = call.norm, call.residual, dense(call.x)
    if residual is not None:
        residual = like(residual, x)
    out = x if over else None
    if call.mean is not None and call.rstd is not None:
        operands = Operands(x, call.weight, call.bias, residual)
        return dispatch.recompute(operands, _found(x, call.mean, call.rstd), norm, out), *(None,) * 6
    mean, var, keeps_input = call.running_mean, call.running_var, norm.keep == "input"
    if norm.own and not moving and mean is not None and var is not None:
        mean, var = mean.clone(), var.clone()
    running = (mean, var)
    if not keeps_input:
        out = torch.empty_like(x)
    elif not norm.own:
        # An op that keeps its input would copy the running mean for autograd, and nobody reads the copy here.
        norm = norm._replace(keep="output")
    operands = Operands(x, call.weight, call.bias, residual, call.slope, *running)
    z, stats = dispatch.forward(operands, norm, _kept(call), out)
    if out is None and z._is_view():
        # A program may change what a graph returns in place, and PyTorch refuses that for a view.
        z = z.data
    mean = stats.mean if norm.own and keeps_input else None
    rstd = stats.rstd if norm.own or not keeps_input else None
    moved = running if norm.own and not moving else (None, None)
    return z, mean, rstd, *moved, stats.xhat, stats.share


def _backward(call: GradientCall, over: bool = False, over_also: bool = False) -> tuple[Tensor | None, ...]:
    norm, affine, dz, second, (x, _) = call.norm, call.affine, call.dz, call.second, dense(call.x)
    if not norm.own and norm.keep == "input":
        second = (second.to(stats_dtype(x)) + norm.eps).rsqrt()
    into = dz if over and dz.dtype == x.dtype and dz.stride() == x.stride() else None
    needs = (
        True,
        affine and call.weight is not None,
        affine and call.bias is not None,
        call.of_residual,
        call.slope is not None,
    )
    given = Operands(x, call.weight, call.bias, call.residual, call.slope)
    stats = _found(x, call.mean, second, call.xhat, call.share)
    of = BackwardCall(dz, given, stats, norm, _kept(call), needs, into=into, also=call.also, over_also=over_also)
    return dispatch.backward(of).wanted(needs)


def statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, *flat_norm: Any, moving: bool = False
) -> tuple[Tensor | None, ...]:
    """The results of ``Forward`` of a batch norm but z, in whose place there is None."""
    source, _ = dense(x)
    running = [v if v is None or moving else v.clone() for v in (running_mean, running_var)]
    mean, rstd = dispatch.statistics(source, norm_of(*flat_norm), *running)
    return None, mean, rstd, *(None if moving else v for v in running)


def statistics_moving(*call: Any) -> tuple[Tensor | None, ...]:
    """``statistics``, which moves the running statistics where they are."""
    return statistics(*call, moving=True)


def _norm(*arguments: Any) -> tuple[Tensor, ...]:
    call = NormCall.of_arguments(arguments)
    z, mean, rstd, *others = _forward(call)
    # Results of an op must not share memory.
    rstd = None if rstd is None else rstd.clone()
    return whole((z, mean, rstd, *others), call.x)


def _norm_backward(*arguments: Any) -> tuple[Tensor, ...]:
    call = GradientCall.of_arguments(arguments)
    return whole(_backward(call), call.dz)


def prepared(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """What generated code calls for a node that calls a plain norm or its gradient, and with which arguments.

    None for other nodes.
    """
    if node.target is norm_op and (forward := NormCall.of(node)) is not None:
        return Forward(forward.norm), forward.tensors
    if node.target is norm_backward_op and (backward := GradientCall.of(node)) is not None:
        return Backward(backward.norm, backward.affine, backward.of_residual), backward.tensors
    return None


def _fake_norm(*arguments):
    call = NormCall.of_arguments(arguments)
    norm, (x, _), wide = call.norm, dense(call.x), stats_dtype(call.x)
    keeps_input, finds = norm.keep == "input", norm.own and call.mean is None
    count = norm.over.count(x)
    has = finds and keeps_input, finds or not keeps_input
    mean, rstd = (x.new_empty(count, dtype=wide) if one else None for one in has)
    running = (call.running_mean, call.running_var) if finds else (None, None)
    xhat = None if call.slots is None else x.new_empty(x.numel() // x.shape[1] * call.kept_count)
    share = None if norm.process_group is None else x.new_empty(count, dtype=wide)
    moved = (None if v is None else torch.empty_like(v) for v in running)
    return whole((torch.empty_like(x), mean, rstd, *moved, xhat, share), x)


def _fake_norm_backward(*arguments):
    call = GradientCall.of_arguments(arguments)
    x, _ = dense(call.x)
    affine = (call.weight, call.bias) if call.affine else (None, None)
    like_each = (x, *affine, x if call.of_residual else None, call.slope)
    return whole([None if v is None else torch.empty_like(v) for v in like_each], call.dz)


def _setup_context(ctx, inputs, output) -> None:
    call, (z, *found) = NormCall.of_arguments(inputs), output
    ctx.mark_non_differentiable(*found)
    mean, rstd, _, _, xhat, share = found
    norm, source, residual, statistics = call.norm, call.x, call.residual, (mean, rstd)
    ctx.norm, ctx.kept_count = norm, call.kept_count
    ctx.passed_on = residual is not None and TABLE[norm.act.name].identity
    if norm.keep == "output":
        source, statistics = z, (None, rstd)
    else:
        residual = None if ctx.passed_on else residual
        statistics = (mean, rstd) if norm.own else (call.running_mean, call.running_var)
    xhat = None if call.slots is None else xhat
    share = None if norm.process_group is None else share
    more = call.slope, call.slots, xhat, share
    ctx.save_for_backward(source, call.weight, call.bias, residual, *statistics, *more)


def _gradient(ctx, dz: Tensor, *unused: object) -> tuple[Tensor | None, ...]:
    needs = NormCall(ctx.norm, *ctx.needs_input_grad[:10])
    affine, of_residual = needs.weight or needs.bias, needs.residual and not ctx.passed_on
    *tensors, slope, slots, xhat, share = ctx.saved_tensors
    of = ctx.norm, affine, of_residual
    call = GradientCall._make([*of, dz, *tensors, None, slope, slots, xhat, share, ctx.kept_count])
    dx, dweight, dbias, dresidual, dslope = norm_backward_op(*call.arguments)
    dresidual = dz if ctx.passed_on else dresidual
    found = needs._replace(x=dx, weight=dweight, bias=dbias, residual=dresidual, slope=dslope)
    grads = [grad if need else None for grad, need in zip(found[1:11], needs[1:11], strict=True)]
    return *grads, *(None for _ in flat(ctx.norm)), None


RESULTS = f"({', '.join(['Tensor'] * 7)})"
# The norm is recomputed in a form of its own (``plan/recompute.py``).  Only plain norms have these rows.
norm_op = graph_op(
    f"norm({ARGUMENTS}) -> {RESULTS}",
    _norm,
    _fake_norm,
    gradient=(_gradient, _setup_context),
    row={"reads": "exact", "cheap": False, "statistics": 1, "bounded": True, "layout": "keeps"},
    flexible=True,
)
norm_backward_op = graph_op(
    f"norm_backward({_OF_GRADIENT}) -> ({', '.join(['Tensor'] * 5)})",
    _norm_backward,
    _fake_norm_backward,
    gradient=refused(lambda inputs: GradientCall.of_arguments(inputs).norm.name),
    row={"reads": "norm", "cheap": False, "dense": True, "layout": "keeps"},
    flexible=True,
)
